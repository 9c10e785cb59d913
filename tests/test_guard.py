"""StepGuard: the right step and phase, silence when nothing is wrong, and nothing changed."""

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nan_lab.guard import NonFiniteStep, StepGuard


def mlp(norm=False):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.ReLU(), nn.Linear(8, 3)
    )


def batches(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rand = [torch.rand(6, 4, generator=generator) for _ in range(n)]
    return [(x, torch.arange(6) % 3) for x in rand]


def train(model, forward, data, optimizer=None, scaler=None, guard=True, clip=True):
    """A plain loop with the guard; the (loss, norm) of every step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    guard = StepGuard(model, forward, optimizer, scaler) if guard else None
    seen = []
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        if guard:
            guard.begin(step, batch)
        loss = forward(batch)
        norm = None
        if scaler:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        else:
            loss.backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        seen.append(guard.check(loss, norm) if guard else (loss.item(), float(norm)))
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    return seen


def failure(*args, **kwargs):
    with pytest.raises(NonFiniteStep) as caught:
        train(*args, **kwargs)
    print(caught.value)
    return caught.value.report


def cross_entropy(model):
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def test_nan_in_the_batch():
    model, data = mlp(), batches(5)
    data[3][0][2, 1] = torch.nan
    report = failure(model, cross_entropy(model), data)
    assert (report.step, report.phase, report.kind, report.confirmed) == (3, "input", "nan", True)
    assert report.tensor.startswith("batch[0]: ")


def test_finite_loss_with_nan_gradient_stops_at_its_own_step():
    model, data = mlp(), batches(5)

    def forward(batch):
        h = model(batch[0])
        if batch is data[3]:
            h = h * 0
        return F.cross_entropy(h, batch[1]) + (h**2).sum().sqrt()

    report = failure(model, forward, data)
    assert (report.step, report.phase, report.op) == (3, "backward", "div")
    assert report.node == "SqrtBackward0"
    assert len(report.last) == 4 and math.isfinite(report.loss)


def test_adam_whose_eps_is_zero_in_half():
    model, data = mlp().half(), batches(3)
    data = [(x.half() * torch.tensor([1, 1, 1, 0]).half(), y) for x, y in data]
    adam = torch.optim.Adam(model.parameters(), eps=1e-8)
    report = failure(model, cross_entropy(model), data, adam, clip=False)
    assert (report.step, report.phase, report.op) == (0, "optimizer", "addcdiv_")
    assert report.confirmed and "eps" in report.note


def test_norm_that_overflows():
    model, data = mlp(), batches(2)
    report = failure(model, lambda batch: cross_entropy(model)(batch) * 1e22, data)
    assert (report.step, report.phase, report.confirmed) == (0, "norm", True)


class RunningSpread(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("spread", torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            self.spread.lerp_(x.std(0), 0.1)
        return x


def test_only_a_buffer_is_bad():
    model, data = nn.Sequential(RunningSpread(), mlp()), batches(4)
    data[2] = (data[2][0][:1], data[2][1][:1])
    report = failure(model, cross_entropy(model), data)
    assert (report.step, report.phase, report.op, report.module) == (2, "buffer", "std", "0")
    assert report.confirmed


@pytest.mark.parametrize("bug", [False, True])
def test_scaler_warm_up_is_silent_and_a_real_bug_is_not(bug):
    model, data = mlp(), batches(20)

    def forward(batch):
        with torch.autocast("cpu", torch.float16):
            h = model(batch[0])
            loss = F.cross_entropy(h, batch[1])
            if bug and batch is data[15]:
                loss = loss + (h - h).float().square().sum().sqrt()
            return loss

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    if bug:
        report = failure(model, forward, data, scaler=scaler)
        assert (report.step, report.node) == (15, "SqrtBackward0")
    else:
        guard_free = copy.deepcopy(model)
        with_guard = train(model, forward, data, scaler=scaler)
        model, trained = guard_free, model
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        without = train(model, forward, data, scaler=scaler, guard=False)
        assert str(with_guard) == str(without)
        assert all(map(torch.equal, model.parameters(), trained.parameters()))
        assert any(not math.isfinite(norm) for _, norm in with_guard)

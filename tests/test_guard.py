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


@pytest.mark.filterwarnings("ignore:std")
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


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    labels: dict


def test_any_batch_structure():
    model, data = mlp(), [Sample(x, {"class": [y]}) for x, y in batches(3)]
    data[1].image[0, 0] = torch.inf
    report = failure(model, lambda b: F.cross_entropy(model(b.image), b.labels["class"][0]), data)
    assert (report.step, report.phase) == (1, "input")
    assert report.tensor.startswith("batch.image")


def test_step_that_writes_its_batch():
    def forward(batch):
        batch[0].sub_(batch[0].mean()).div_(batch[0].std())
        return cross_entropy(model)(batch)

    model, data = mlp(), batches(4)
    data[3][0].fill_(0.5)
    report = failure(model, forward, data)
    assert (report.step, report.phase, report.op) == (3, "forward", "div_")
    model, data = mlp(), batches(4)
    data[0][0].fill_(0.5)
    report = failure(model, forward, data)
    assert (report.step, report.op, report.confirmed) == (0, "", False)
    assert "wrote into its batch" in report.note


def test_dropout_is_replayed_with_its_random_numbers():
    torch.manual_seed(1)

    def forward(batch):
        kept = F.dropout(torch.ones(3), 0.5)
        return cross_entropy(model)(batch) * (kept.sum() / kept.sum())  # 0/0 when all are dropped

    model = mlp()
    report = failure(model, forward, batches(2) * 100)
    assert (report.op, report.kind, report.confirmed) == ("div", "nan", True)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_micro_batches(bad):
    model, data = mlp(norm=True), batches(3)
    guard = StepGuard(model, cross_entropy(model))
    data[bad][0][0, 0] = torch.nan
    for batch in data:
        guard.begin(7, batch)
        loss = cross_entropy(model)(batch)
        (loss / 3).backward()
    with pytest.raises(NonFiniteStep) as caught:
        guard.check(loss)
    report = caught.value.report
    assert (report.step, report.phase, report.confirmed) == (7, "input", True)
    assert torch.isnan(data[bad][0]).sum() == 1


def test_list_of_micro_batches_and_several_optimizers():
    model, data = mlp(), batches(3)
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]

    def forward(micro):
        return sum(cross_entropy(model)(batch) for batch in micro)

    guard = StepGuard(model, forward, optimizers)
    guard.begin(0, data)
    forward(data).backward()
    assert guard.check(forward(data))[1] > 0
    model[0].weight.data.fill_(torch.nan)
    guard.begin(1, data)
    with pytest.raises(NonFiniteStep) as caught:
        guard.check(forward(data))
    assert (caught.value.report.step, caught.value.report.phase) == (0, "optimizer")


def test_scaler_that_skips_without_end():
    model, data = mlp(), batches(1) * 200
    forward = cross_entropy(model)
    scaler = torch.amp.GradScaler("cpu")
    guard = StepGuard(model, forward, None, scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NonFiniteStep) as caught:
        for step, batch in enumerate(data):
            optimizer.zero_grad()
            guard.begin(step, batch)
            loss = forward(batch)
            scaler.scale(loss).backward()
            model[0].weight.grad[0, 0] = torch.inf  # no replay shows it
            guard.check(loss)
            scaler.step(optimizer)
            scaler.update()
    report = caught.value.report
    assert report.phase == "scaler" and report.scale < 1
    assert guard.skipped == report.step + 1 < 144


def test_an_inf_mask_in_a_buffer_is_no_alarm():
    model, data = mlp(), batches(4)
    model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    assert len(train(model, cross_entropy(model), data)) == 4


def test_batch_norm_whose_statistics_go_bad():
    model, data = mlp(norm=True), batches(3)
    data[1][0][:] = 1e30
    report = failure(model, lambda b: model(b[0]).clamp(-1, 1).square().mean(), data)
    assert (report.step, report.module) == (1, "1")
    assert report.op in ("native_batch_norm", "cudnn_batch_norm")


@pytest.mark.parametrize("norm", [False, True])
def test_training_is_bitwise_the_same_and_one_host_read_a_step(norm, monkeypatch):
    model = mlp(norm)
    free = copy.deepcopy(model)
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append(t) or tolist(t))
    with CountReads() as count:
        guarded = train(model, cross_entropy(model), batches(5))
    assert (len(reads), count.reads) == (5, 0)
    assert guarded == train(free, cross_entropy(free), batches(5), guard=False)
    for mine, other in zip(model.state_dict().values(), free.state_dict().values(), strict=True):
        assert torch.equal(mine, other)


class CountReads(torch.utils._python_dispatch.TorchDispatchMode):
    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += "_local_scalar_dense" in str(func) or "nonzero" in str(func)
        return func(*args, **(kwargs or {}))


def test_wrong_use_is_told():
    model, (batch,) = mlp(), batches(1)
    forward = cross_entropy(model)
    with pytest.raises(TypeError, match="torch.nn.Module"):
        StepGuard(forward, model)
    with pytest.raises(TypeError, match="function of the batch"):
        StepGuard(model, None)
    guard = StepGuard(model, forward)
    with pytest.raises(RuntimeError, match="begin"):
        guard.check(torch.tensor(1.0))
    guard.begin(0, batch)
    for loss in (None, "1", torch.ones(2), torch.tensor(1)):
        with pytest.raises(TypeError, match="loss must be"):
            guard.check(loss)
    assert guard.check(torch.tensor(2.0)) == guard.check(torch.tensor(2.0)) == (2.0, 0.0)


def test_check_after_the_step_names_no_operation():
    model, (batch,) = mlp(), batches(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)
    forward = cross_entropy(model)
    guard = StepGuard(model, lambda b: forward(b) * 1e10, optimizer)
    guard.begin(0, batch)
    loss = guard.forward(batch)
    loss.backward()
    optimizer.step()
    with pytest.raises(NonFiniteStep) as caught:
        guard.check(loss * torch.nan)
    assert (caught.value.report.op, caught.value.report.step) == ("", 0)
    assert "before optimizer.step" in str(caught.value)


@pytest.mark.parametrize("forward", [lambda b: b.nothing, lambda b: None, lambda b: 3])
def test_a_location_that_fails_still_names_the_step(forward):
    model = mlp()
    guard = StepGuard(model, forward)
    guard.begin(4, None)
    with pytest.raises(NonFiniteStep, match="the replay stopped") as caught:
        guard.check(torch.tensor(torch.nan))
    assert (caught.value.report.step, caught.value.report.phase) == (4, "forward")


def test_frozen_model_and_model_that_grows():
    model, (batch,) = mlp().requires_grad_(False), batches(1)
    guard = StepGuard(model, lambda b: model(b[0]).sum() / 0)
    guard.begin(0, batch)
    model.append(nn.BatchNorm1d(3))
    with pytest.raises(NonFiniteStep) as caught:
        guard.check(guard.forward(batch))
    assert (caught.value.report.op, caught.value.report.phase) == ("div", "forward")


def test_a_large_norm_in_half_is_no_alarm_when_nobody_clips():
    model, data = mlp().half(), [(x.half(), y) for x, y in batches(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    seen = train(model, lambda b: model(b[0]).sum() * 8e3, data, optimizer, clip=False)
    assert all(65504 < norm < 1e6 for _, norm in seen)


def test_what_the_replay_does_not_show_is_said_to_be_so():
    model, data = mlp(), batches(4)
    calls = []

    def forward(batch):
        calls.append(batch)
        return cross_entropy(model)(batch) / (len(calls) != 3)

    report = failure(model, forward, data)
    assert (report.step, report.phase, report.op, report.confirmed) == (2, "forward", "", False)
    assert "the replay is finite" in report.note


def test_accumulation_that_overflows_in_half():
    model = mlp().half()
    batch = (torch.ones(1, 4).half(), None)
    guard = StepGuard(model, lambda b: model(b[0])[0, 0].float() * 4e4)
    for _ in range(2):
        guard.begin(0, batch)
        loss = guard.forward(batch)
        loss.backward()
    with pytest.raises(NonFiniteStep) as caught:
        guard.check(loss)
    report = caught.value.report
    assert (report.op, report.node, report.confirmed) == ("add_", "AccumulateGrad", True)
    assert report.module == "3"


class TwoRanks:
    """torch.distributed for rank 0, with a rank 1 that says what the test wants it to say."""

    class ReduceOp:
        MAX = "max"

    def __init__(self, says):
        self.says = says

    is_available = is_initialized = staticmethod(lambda: True)
    get_world_size = staticmethod(lambda: 2)
    get_rank = staticmethod(lambda: 0)

    def all_reduce(self, flags, op):
        assert flags.shape == (2,) and op == "max"
        flags[1] = self.says.pop(0)


def test_all_ranks_stop_at_the_same_step_and_the_guilty_one_is_named(monkeypatch):
    model = mlp()
    healthy, other_is_bad, other_is_sure = 0, math.inf, 2
    ranks = TwoRanks([healthy, healthy, other_is_bad, other_is_sure])
    monkeypatch.setattr("nan_lab.guard.dist", ranks)
    report = failure(model, cross_entropy(model), batches(5))
    assert (report.step, report.ranks, report.op, report.confirmed) == (2, [1], "", False)

    ranks.says = [healthy, healthy, healthy]
    data = batches(5)
    data[1][0][0] = torch.nan
    report = failure(model, cross_entropy(model), data)
    assert (report.step, report.ranks, report.phase) == (1, [0], "input")

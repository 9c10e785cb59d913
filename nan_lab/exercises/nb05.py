"""Checkers of notebook 05, The loss scaler, and the four runs of its first exercise."""

import copy

import torch
import torch.nn.functional as F

from nan_lab import loops, record, triggers
from nan_lab.exercises import NotAttempted, exercise

KINDS = ("saw-tooth", "staircase", "cliff", "floor")
FOUR_SCALES = {"A": "floor", "B": "staircase", "C": "saw-tooth", "D": "cliff"}
TELL_TALE = {
    "saw-tooth": "its scale also rises",
    "staircase": "single skips, far apart and regular, and it never rises",
    "cliff": "healthy first, then a skip at every step to the end",
    "floor": "it falls at once, below 1, and then hardly moves",
}


class _NaNEvery20Steps:
    cause_step = 19

    def apply(self, step, x, y):
        return (x * float("nan"), y) if step % 20 == 19 else (x, y)


def _summed(model, loader, optimizer, scaler, device_type, dtype):
    """The loss is a sum over 2**20 terms where the mean was meant."""
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y) * 2**20
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield loss


def four_scaled_runs():
    """The runs A to D of the exercise four_scales, as `record.History` by letter."""
    return {
        "A": record.run(_summed, lr=0.03 / 2**20),
        "B": record.run(loops.without_guard, _NaNEvery20Steps()),
        "C": record.run(loops.without_guard, growth_interval=16),
        "D": record.run(loops.broken, triggers.raw_pixels()),
    }


@exercise("05", difficulty=1, minutes=5)
def four_scales(answer):
    if not isinstance(answer, dict) or set(answer) != set(FOUR_SCALES):
        return 'Answer with a dictionary that has the keys "A", "B", "C" and "D".'
    unknown = sorted(set(answer.values()) - set(KINDS))
    if unknown:
        return f"{unknown[0]!r} is none of {', '.join(KINDS)}."
    for letter, kind in answer.items():
        if kind != FOUR_SCALES[letter]:
            return f"{letter} is no {kind}. How to tell a {kind}: {TELL_TALE[kind]}."


@exercise("05", difficulty=2, minutes=10)
def accumulate(answer):
    model, batches = _small_model(), _micro_batches()
    expected, before = _updated_at_once(model, batches), _weights(model)
    steps, scaler = _run(answer, model, batches)
    if steps != 1:
        return f"Four micro-batches make one update; your optimizer took {steps} steps."
    if scaler.get_scale() != 2 * 1024:
        return (
            "The scale must double once (growth_interval is 1): one `update`, after the one step."
        )
    off = (_weights(model) - before) / (expected - before)
    if torch.allclose(off, torch.full_like(off, 4.0), rtol=1e-2):
        return (
            "The step is 4 times too large: 4 means add up to 4 times the mean of the whole batch."
        )
    if not torch.allclose(_weights(model), expected, rtol=1e-4, atol=1e-6):
        return "The update is not that of the whole batch: has every micro-batch's gradient a part?"
    batches[1][0][0, 0] = float("nan")
    before = _weights(model)
    steps, scaler = _run(answer, model, batches)
    if steps or not torch.equal(_weights(model), before):
        return (
            "One micro-batch is NaN, and the update was made all the same: let the scaler decide."
        )
    if scaler.get_scale() != 512:
        return "One micro-batch is NaN: the update is skipped, and the scale halved once."


def _small_model():
    model = torch.nn.Linear(4, 3)
    values = torch.arange(15) % 7 / 8
    with torch.no_grad():
        model.weight.copy_(values[:12].reshape(3, 4))
        model.bias.copy_(values[12:])
    return model


def _micro_batches():
    x = (torch.arange(32).reshape(8, 4) % 5 - 2.0) * torch.arange(1.0, 9.0)[:, None]
    y = torch.arange(8) % 3
    return list(zip(x.split(2), y.split(2), strict=True))


def _weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _updated_at_once(model, batches):
    """The weights after one plain SGD step on all micro-batches as one batch."""
    model = copy.deepcopy(model)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    F.cross_entropy(model(x), y).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return _weights(model)


def _run(answer, model, batches):
    """Call the reader's function; return how many steps were taken, and the scaler."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    taken = []
    optimizer.register_step_post_hook(lambda *_: taken.append(1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # left over from an earlier update
    answer(model, batches, optimizer, scaler)
    touched = any(p.grad is None or (p.grad != 1).any() for p in model.parameters())
    if not touched and not taken:
        raise NotAttempted
    return len(taken), scaler

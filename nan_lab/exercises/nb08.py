"""Notebook 08, Find the first NaN: the three mystery runs and their checker."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nan_lab.exercises import NotAttempted, exercise

CAUSES = ("slope", "empty", "range", "mask", "scale", "batch")


class Run(NamedTuple):
    """What a script holds. `forward(batch)` returns the loss; everything is on the CPU."""

    model: nn.Module
    forward: object
    batches: list
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler


def mystery(name):
    """Run "a", "b" or "c", freshly made. It goes wrong at one step of its twelve."""
    runs = {"a": _run_a, "b": _run_b, "c": _run_c}
    if name not in runs:
        raise ValueError(f'the mystery runs are "a", "b" and "c", got {name!r}')
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model, forward, batches, scale = runs[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    return Run(model, forward, batches, optimizer, scaler)


def _run_a():
    model = nn.Linear(4, 4, bias=False)

    def forward(batch):
        h = model(batch)
        return torch.where(h > 0, torch.log(h), h).mean()

    batches = [0.1 + torch.rand(8, 4) for _ in range(12)]
    batches[5][2] = 0
    return model, forward, batches, None


def _run_b():
    model = nn.Linear(4, 4)

    def forward(batch):
        x, is_padding = batch
        scores = model(x).sum(-1).masked_fill(is_padding, -math.inf)
        weights = torch.softmax(scores, dim=-1)
        return (weights[..., None] * x).sum(1).pow(2).mean()

    lengths = [torch.tensor([6, 1 + step % 5, 4]) for step in range(12)]
    lengths[7][1] = 0
    batches = [(torch.rand(3, 6, 4), torch.arange(6) >= n[:, None]) for n in lengths]
    return model, forward, batches, None


def _run_c():
    model = nn.Linear(64, 3)
    nn.init.constant_(model.weight, 0.25)

    def forward(batch):
        with torch.autocast("cpu", torch.float16):
            return F.cross_entropy(model(batch), torch.arange(8) % 3)

    batches = [0.1 + 0.9 * torch.rand(8, 64) for _ in range(12)]
    batches[9] *= 30_000
    return model, forward, batches, 2.0**24


class Truth(NamedTuple):
    step: int
    phase: str
    ops: set  # every name that one may give the operation
    cause: str
    known: dict  # what to say of a likely wrong entry


TRUTH = {
    "a": Truth(5, "backward", {"div", "log", "LogBackward0"}, "slope", {
        6: "at step 6 the loss shows it, but the weights are NaN as that step begins.",
        "forward": "at this step the loss is finite. Which pass was it, then?",
    }),
    "b": Truth(7, "forward", {"_softmax", "softmax"}, "empty", {
        "masked_fill": "that -inf is there at the healthy steps too, and does no harm there.",
        "mask": "a mask is what softmax is made for. What is left of the row that fails?",
    }),
    "c": Truth(9, "forward", {"addmm", "linear", "mm"}, "range", {
        0: "the scaler skips that step, as it should: at scale 1 its gradient is finite.",
        "scale": "the loss itself is not finite, and the scale only acts on what comes after it.",
    }),
}  # fmt: skip


@exercise("08", difficulty=2, minutes=10)
def three_runs(answer):
    if not isinstance(answer, dict) or set(answer) != set(TRUTH):
        return 'The answer must be a dict with the keys "a", "b" and "c".'
    if all(given is None or given is ... for given in answer.values()):
        raise NotAttempted
    for name, given in answer.items():
        if not isinstance(given, (tuple, list)) or len(given) != 4:
            return f"Run {name} needs four entries, (step, phase, op, cause), got {given!r}."
        reason = _wrong(TRUTH[name], *given)
        if reason:
            return f"Run {name}: {reason}"


def _wrong(truth, step, phase, op, cause):
    """What is wrong with the answer for one run, or None."""
    if cause not in CAUSES:
        return f"the cause must be one of {', '.join(CAUSES)}, got {cause!r}."
    if step != truth.step:
        return truth.known.get(step, f"it is not step {step}. Let a guard stop the run.")
    if phase != truth.phase:
        return truth.known.get(phase, f"the step is right, the phase is not {phase!r}.")
    name = str(op).partition(".")[0]  # the notebook's own mode says log.default
    if name not in truth.ops:
        return truth.known.get(name, f"{op} made no NaN or inf out of finite numbers.")
    if cause != truth.cause:
        hint = "Look at the operands: dtype, range, zeros."
        return truth.known.get(cause, f"step and operation are right, {cause!r} is not. {hint}")

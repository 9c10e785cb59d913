"""Checkers of notebook 05, The loss scaler, and the four runs of its first exercise."""

import torch
import torch.nn.functional as F

from nan_lab import loops, record, triggers
from nan_lab.exercises import call, exercise

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


READINGS = (
    # scale, (halvings, doublings, power)
    ((8.0, 4.0, 4.0, 2.0, 1.0, 2.0), (3, 1, 0)),
    ((8.0, 16.0, 32.0, 16.0), (1, 2, 3)),
    ((65536.0, 65536.0), (0, 0, 16)),
    (tuple(2.0**-power for power in range(6)), (5, 0, -5)),
    ((8.0, 4.0, 2.0, 4.0, 8.0), (2, 2, 1)),
)
HINTS = {
    "halvings": "Compare each step with the one before it; a scale that stays counts for nothing.",
    "doublings": "Compare each step with the one before it; a scale that stays counts for nothing.",
    "power": "2 to this power is the lowest scale of all steps; below 1 the power is negative.",
}


@exercise("05", difficulty=1, minutes=6)
def read_scale(answer):
    for scale, right in READINGS:
        found = call(answer, list(scale))
        if not isinstance(found, (tuple, list)) or len(found) != 3:
            return f"Return three numbers, (halvings, doublings, power); you return {found!r}."
        for (part, hint), yours, wanted in zip(HINTS.items(), found, right, strict=True):
            if yours != wanted:
                return f"Scales {list(scale)}: {part} is not {yours!r}. {hint}"

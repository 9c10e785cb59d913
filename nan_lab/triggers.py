"""Reproducible NaN triggers: what goes wrong with the batches, and at which step; no chance."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Trigger:
    """Changes the batches of steps `cause_step` to `last_step` (None: to the end of the run).

    Steps count from 0 over the whole run. `change(x, y) -> (x, y)` makes new tensors.
    """

    name: str
    cause_step: int
    last_step: int | None
    change: Callable

    def __post_init__(self):
        if not isinstance(self.cause_step, int) or self.cause_step < 0:
            raise ValueError(f"a step must be an integer of 0 or more, got {self.cause_step!r}")
        if self.last_step is not None and self.last_step < self.cause_step:
            raise ValueError(
                f"until_step must come after from_step ({self.cause_step}), "
                f"got {self.last_step + 1}"
            )

    def apply(self, step, x, y):
        """Return the batch of this step: x float32 (B, 64), y one-hot float32 (B, 10)."""
        if step < self.cause_step or (self.last_step is not None and step > self.last_step):
            return x, y
        return self.change(x, y)


def raw_pixels(from_step=112, until_step=None):
    """Pixels arrive as 0..16 where 0..1 was meant; right again from `until_step` on, if given."""
    last_step = None if until_step is None else until_step - 1
    return Trigger("raw pixels", from_step, last_step, lambda x, y: (x * 16, y))


def mislabelled_spike(at_step=113, factor=64):
    """One batch with every label moved to the next class and its pixels times `factor`."""
    return Trigger(
        "mislabelled spike", at_step, at_step, lambda x, y: (x * factor, y.roll(1, dims=1))
    )


def nan_pixel(at_step=113):
    """One batch whose first pixel is NaN."""
    return Trigger("NaN pixel", at_step, at_step, _first_pixel(float("nan")))


def inf_pixel(at_step=113):
    """One batch whose first pixel is inf."""
    return Trigger("inf pixel", at_step, at_step, _first_pixel(float("inf")))


def huge_pixels(at_step=113):
    """One batch times 2**20: fine in float32 and bfloat16, 16 times above float16's 65504."""
    return Trigger("huge pixels", at_step, at_step, lambda x, y: (x * 2**20, y))


def _first_pixel(value):
    def change(x, y):
        x = x.clone()
        x[0, 0] = value
        return x, y

    return change

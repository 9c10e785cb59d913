"""Checkers of notebook 02, Missing clipping."""

import math

import torch
from torch.nn.utils import parameters_to_vector

from nan_lab.exercises import NotAttempted, call, exercise

SCALE = 1024.0


@exercise("02", difficulty=1, minutes=5)
def culprit(answer):
    calm, inf, nan = [1.0] * 20, math.inf, math.nan
    result = call(answer, calm + [200.0, 20.0])
    if isinstance(result, bool) or not isinstance(result, int):
        return f"Return the number of the step, an integer; got {result!r}."
    if result != 20:
        return f"After twenty norms of 1, step 20 has 200; your answer is {result}."
    if answer(calm + [200.0, 30.0, 500.0]) != 20:
        return "A ruined run can have a larger norm later: the first jump is asked for."
    if answer([inf, inf] + calm + [50.0, nan]) != 22:
        return "A norm of inf or NaN is a skipped step, neither a jump nor part of the median."
    if answer([0.001] * 10 + [0.05]) != 10:
        return "0.05 after ten norms of 0.001 is a jump too: compare with the norms before it."
    if answer(calm + [0.05] + calm) != -1:
        return (
            "One small norm makes the next one look large: compare with the median of all before."
        )
    if answer([100.0, 100.0] + calm + [15.0]) != 22:
        return (
            "A few large norms at the start must not hide a jump later: the median, not the mean."
        )
    if answer(calm + [5.0] * 3) != -1 or answer([]) != -1:
        return "Where no norm is above ten times the median, the answer is -1."


@exercise("02", difficulty=2, minutes=10)
def accumulated_update(answer):
    try:
        return _wrong_update(answer)
    except RuntimeError as error:
        if "unscale_() is being called after step()" in str(error):
            return "The first batch passes, the second is refused: is the scaler ready for it?"
        if "unscale_() has already been called" in str(error):
            return "unscale_ may be called once before each update, when all parts are there."
        raise


def _wrong_update(answer):
    step_of = _Stepper(answer)
    small, spike = [[0.1, 0.2, 0.0], [0.3, 0.0, 0.4]], [[30.0, 0.0, 0.0], [0.1, 0.0, 40.0]]
    mean = torch.tensor(small).mean(0)
    first = step_of(small)
    if step_of.untouched():
        raise NotAttempted
    if reason := _wrong_small_step(first, mean):
        return reason
    if not _equal(step_of(small), mean):
        return "The first batch is right, the second is not: what is left over from the first?"

    step, wanted = step_of(spike), torch.tensor(spike).mean(0)
    if step.norm() > 1.01:
        return f"The gradient is clipped to norm 1, but your step has the norm {step.norm():.3g}."
    if not _equal(step, wanted / wanted.norm()):
        return "Your step has another direction than the mean: clip once, when all parts are there."
    if step_of([[0.1, 0.2, 0.0], [math.nan, 0.0, 0.0]]).norm() != 0:
        return "One loss was NaN and the weights moved: without that part it is another batch."
    if not _equal(step_of(small), mean):
        return "After a batch with a NaN, the next good one must train again."


def _wrong_small_step(step, mean):
    """The reason why the first, harmless batch moved the weights by the wrong amount."""
    ratio = float(step.norm() / mean.norm())
    if ratio == 0:
        return "The weights did not move: is the optimizer's step taken?"
    if ratio > SCALE / 10:
        return "Your step is hundreds of times too long: some gradients were never unscaled."
    if ratio < 10 / SCALE:
        return "Your step is hundreds of times too short: what was the unit when you clipped?"
    if not math.isclose(ratio, 1, rel_tol=1e-4):
        return f"Your step is {ratio:.2g} times as long as the gradient of the mean loss."
    if not _equal(step, mean):
        return "Your step has the right length, but not the direction of the mean's gradient."


def _equal(step, wanted):
    # A gradient that was left over unscaled is 1 / SCALE of the next one: 0.001 must be seen.
    return torch.allclose(step, wanted, rtol=1e-4, atol=1e-5)


class _Stepper:
    """Calls the answer on a model of three weights, with SGD at learning rate 1.

    The losses are linear in the weights, so their gradients are the numbers given, exactly.
    """

    def __init__(self, answer):
        self.answer, self.model = answer, torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def __call__(self, gradients):
        """How far one call moved the weights downhill: a tensor (3,)."""
        (weight,), bias = self.model.weight, self.model.bias[0]
        losses = [(weight * torch.tensor(g[:2])).sum() + bias * g[2] for g in gradients]
        before = parameters_to_vector(self.model.parameters()).detach().clone()
        self.answer(losses, self.model, self.optimizer, self.scaler)
        return before - parameters_to_vector(self.model.parameters()).detach()

    def untouched(self):
        """Whether no gradient was ever made, as after a stub."""
        return all(p.grad is None for p in self.model.parameters())

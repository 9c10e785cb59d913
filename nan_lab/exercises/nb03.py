"""Checkers of notebook 03, No guard."""

import torch
from torch import nn

from nan_lab.exercises import call, exercise

GOOD, NAN, INF = (torch.tensor(value) for value in (1.25, float("nan"), float("inf")))


@exercise("03", difficulty=2, minutes=8)
def scaler_guard(answer):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    returned = call(answer, 3, torch.tensor(0.5), GOOD, model, _scaler(65536.0))
    if not isinstance(returned, (list, tuple)) or list(returned) != [0.5, 1.25]:
        return "On a healthy step it must return the loss and the gradient norm, as two floats."
    for scale in (65536.0, 2.0):
        for norm in (INF, NAN):
            if _stops(answer, GOOD, norm, model, _scaler(scale)):
                return (
                    f"It stops at loss scale {scale:.0f} with a finite loss and gradient norm "
                    f"{norm.item()}: that step is the scaler's to skip."
                )
    if not _stops(answer, GOOD, NAN, model, _scaler(None)):
        return "In bfloat16 the scaler is off and skips nothing: a NaN norm must stop the run."
    for loss in (NAN, INF):
        if not _stops(answer, loss, loss, model, _scaler(65536.0)):
            return f"The loss is {loss.item()} and it goes on: no loss scale can mend a loss."
    for scale in (1.0, 0.5):
        if not _stops(answer, GOOD, INF, model, _scaler(scale)):
            return f"At loss scale {scale} the gradient norm is inf, and it goes on."
    message = _stops(answer, NAN, GOOD, model, _scaler(65536.0), step=4711)
    if "4711" not in message:
        return "Its message does not name the step."
    model[1].running_var[0] = float("nan")
    for norm in (GOOD, INF):
        if not _stops(answer, GOOD, norm, model, _scaler(65536.0)):
            return f"A buffer is NaN, the gradient norm is {norm.item()}, and it goes on."


def _scaler(scale):
    """A scaler with this loss scale; one that is off for None."""
    return torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)


def _stops(answer, loss, norm, model, scaler, step=3):
    """The message of the exception that the guard raises for this step, or "" if it raises none."""
    try:
        answer(step, loss, norm, model, scaler)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""

"""Typical wrong answers of notebook 03, each with a part of the reason that it must get."""

import math

import torch


def _numbers(loss, grad_norm, model):
    numbers = {"loss": loss.detach(), "gradient norm": grad_norm}
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            numbers[name] = buffer.abs().max()
    return dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True))


def _raise_unless_finite(step, numbers):
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise FloatingPointError(f"step {step}: the {name} is {value}")


def unchanged(step, loss, grad_norm, model, scaler):
    numbers = _numbers(loss, grad_norm, model)
    _raise_unless_finite(step, numbers)
    return loss.item(), grad_norm.item()


def only_inf_is_healthy(step, loss, grad_norm, model, scaler):
    numbers = _numbers(loss, grad_norm, model)
    if scaler.get_scale() > 1 and math.isinf(numbers["gradient norm"]):
        numbers["gradient norm"] = 0.0
    _raise_unless_finite(step, numbers)
    return loss.item(), grad_norm.item()


def norm_left_out(step, loss, grad_norm, model, scaler):
    numbers = _numbers(loss, torch.nan_to_num(grad_norm), model)
    _raise_unless_finite(step, numbers)
    return loss.item(), grad_norm.item()


def scaler_will_do_it(step, loss, grad_norm, model, scaler):
    if scaler.get_scale() <= 1:
        _raise_unless_finite(step, _numbers(loss, grad_norm, model))
    return loss.item(), grad_norm.item()


def trusts_any_scale(step, loss, grad_norm, model, scaler):
    numbers = _numbers(loss, grad_norm, model)
    if scaler.is_enabled():
        del numbers["gradient norm"]
    _raise_unless_finite(step, numbers)
    return loss.item(), grad_norm.item()


def returns_at_the_skip(step, loss, grad_norm, model, scaler):
    if loss.isfinite() and not grad_norm.isfinite() and scaler.get_scale() > 1:
        return loss.item(), grad_norm.item()
    return unchanged(step, loss, grad_norm, model, scaler)


def nameless(step, loss, grad_norm, model, scaler):
    try:
        return returns_at_the_skip(step, loss, grad_norm, model, scaler)
    except FloatingPointError:
        raise FloatingPointError("not finite") from None


WRONG = {
    "scaler_guard": [
        (unchanged, "loss scale 65536 with a finite loss and gradient norm inf"),
        (only_inf_is_healthy, "loss scale 65536 with a finite loss and gradient norm nan"),
        (norm_left_out, "scaler is off and skips nothing"),
        (scaler_will_do_it, "no loss scale can mend a loss"),
        (trusts_any_scale, "At loss scale 1.0"),
        (nameless, "does not name the step"),
        (returns_at_the_skip, "A buffer is NaN, the gradient norm is inf"),
    ]
}

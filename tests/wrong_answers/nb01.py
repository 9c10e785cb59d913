"""Typical wrong answers of notebook 01, each with a part of the reason that it must get."""

import math

import torch
import torch.nn.functional as F


def _probability(gap, dtype):
    return torch.softmax(torch.tensor([gap, 0], dtype=dtype), dim=-1)[1]


def always_float32(dtype):
    return next(gap for gap in range(1000) if _probability(gap, torch.float32) == 0)


def last_above_zero(dtype):
    return next(gap for gap in range(1000) if _probability(gap, dtype) == 0) - 1


def from_smallest_normal(dtype):
    return math.ceil(-math.log(torch.finfo(dtype).tiny))


def stops_too_early(dtype):
    return next((gap for gap in range(64) if _probability(gap, dtype) == 0), 64)


def the_exact_gap(dtype):
    return -math.log(torch.finfo(dtype).tiny * torch.finfo(dtype).eps / 2)


def log_of_sigmoid(logits, y):
    p = torch.sigmoid(logits)
    return -(y * p.log() + (1 - y) * (1 - p).log()).mean()


def epsilon(logits, y):
    p = torch.sigmoid(logits)
    return -(y * (p + 1e-8).log() + (1 - y) * (1 - p + 1e-8).log()).mean()


def clamped_probability(logits, y):
    p = torch.sigmoid(logits).clamp(1e-7, 1 - 1e-7)
    return -(y * p.log() + (1 - y) * (1 - p).log()).mean()


def clamped_logits(logits, y):
    return F.binary_cross_entropy_with_logits(logits.clamp(-15, 15), y)


def nan_to_zero(logits, y):
    p = torch.sigmoid(logits)
    loss = -(y * p.log() + (1 - y) * (1 - p).log())
    return loss.nan_to_num(0, posinf=0).mean()


def nan_to_num_of_log(logits, y):
    p = torch.sigmoid(logits)
    return -(y * p.log().nan_to_num() + (1 - y) * (1 - p).log().nan_to_num()).mean()


def mean_over_wrong_axis(logits, y):
    return F.binary_cross_entropy_with_logits(logits, y, reduction="none").mean(0)


def sum_over_classes(logits, y):
    return F.binary_cross_entropy_with_logits(logits, y, reduction="none").sum(-1).mean()


def no_minus(logits, y):
    return (y * F.logsigmoid(logits) + (1 - y) * F.logsigmoid(-logits)).mean()


def only_hard_labels(logits, y):
    return -F.logsigmoid(torch.where(y > 0.5, logits, -logits)).mean()


def only_the_right_class(logits, y):
    return -(y * F.logsigmoid(logits)).mean()


def exp_of_the_logit(logits, y):
    return (torch.log(1 + logits.exp()) - y * logits).mean()


def without_gradient(logits, y):
    return torch.tensor(F.binary_cross_entropy_with_logits(logits.float(), y.float()).item())


def hidden_by_where(logits, y):
    """Right in value; the gradient goes through the branch that was not taken: 0 * inf."""
    unsafe = torch.log(1 + torch.exp(logits))
    return (torch.where(logits > 10, logits, unsafe) - y * logits).mean()


WRONG = {
    "first_gap": [
        (always_float32, "at a smaller gap than 104 already"),
        (last_above_zero, "17 is the last gap above 0"),
        (from_smallest_normal, "finfo.tiny is the smallest normal number"),
        (stops_too_early, "In bfloat16, a gap of 64 still gives more than 0."),
        (the_exact_gap, "A whole number"),
    ],
    "stable_bce": [
        (log_of_sigmoid, "0 * -inf is NaN"),
        (epsilon, "The epsilon caps the loss"),
        (clamped_probability, "The clamp caps the loss"),
        (clamped_logits, "The clamp caps the loss"),
        (nan_to_zero, "the NaN was replaced"),
        (nan_to_num_of_log, "no number to learn from"),
        (mean_over_wrong_axis, "shape (), is asked for; got (2,)"),
        (sum_over_classes, "It is 2 times the loss"),
        (no_minus, "The sign is wrong"),
        (only_hard_labels, "wrong for labels in between"),
        (only_the_right_class, "Logits from -2 to 3"),
        (exp_of_the_logit, "exp(200) is inf"),
        (without_gradient, "no gradient gets through"),
        (hidden_by_where, "its gradient is not"),
    ],
}

"""Checkers of notebook 01, The logarithm of zero."""

import torch
import torch.nn.functional as F

from nan_lab.exercises import call, exercise


@exercise("01", difficulty=1, minutes=5)
def first_gap(answer):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        name, gap = str(dtype).removeprefix("torch."), call(answer, dtype)
        if isinstance(gap, bool) or not isinstance(gap, int):
            return f"A whole number (int) is asked for; for {name} it returned {gap!r}."
        if gap < 0:
            return f"For {name} it returned {gap}: the gap is how far the first logit is above."
        if _small_probability(gap, dtype) > 0:
            if _small_probability(gap + 1, dtype) == 0:
                return f"In {name}, {gap} is the last gap above 0; the first 0 is asked for."
            below = _small_probability(gap, dtype) < torch.finfo(dtype).tiny
            hint = " finfo.tiny is the smallest normal number, not the smallest." if below else ""
            return f"In {name}, a gap of {gap} still gives more than 0.{hint}"
        if gap > 0 and _small_probability(gap - 1, dtype) == 0:
            return f"In {name}, the probability is 0 at a smaller gap than {gap} already."


def _small_probability(gap, dtype):
    return torch.softmax(torch.tensor([gap, 0], dtype=dtype), dim=-1)[1].item()


@exercise("01", difficulty=2, minutes=10)
def stable_bce(answer):
    logits = torch.tensor([[-2.0, 0.5], [1.0, 3.0], [0.25, -1.0]])
    hard = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 1.0]])
    soft = torch.tensor([[0.1, 0.7], [0.5, 0.9], [0.3, 1.0]])
    return (
        _wrong_shape_or_scale(answer, logits, hard)
        or _wrong_on_soft_labels(answer, logits, soft)
        or _wrong_where_sure(answer)
        or _wrong_in_float16(answer)
        or _wrong_gradient(answer, logits, soft)
    )


def _wrong_shape_or_scale(answer, logits, y):
    loss = call(answer, logits, y)
    if not isinstance(loss, torch.Tensor) or loss.shape != ():
        given = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        return f"The mean over all entries, a tensor of shape (), is asked for; got {given}."
    right = F.binary_cross_entropy_with_logits(logits.double(), y.double()).item()
    for factor, what in ((-1, "The sign is wrong: a loss is never below 0."),) + tuple(
        (n, f"It is {n} times the loss: take the mean over all entries, do not add them up.")
        for n in (*y.shape, y.numel())
    ):
        if abs(loss.item() - factor * right) < 1e-5 * abs(factor * right):
            return what
    if not abs(loss.item() - right) < 1e-5:
        return f"Logits from -2 to 3, labels 0 and 1: the loss is {right:.4f}, not {loss:.4f}."


def _wrong_on_soft_labels(answer, logits, y):
    loss, right = answer(logits, y), F.binary_cross_entropy_with_logits(logits, y)
    if not abs(loss - right) < 1e-5:
        return (
            f"Right for labels 0 and 1, wrong for labels in between: {right:.4f} was expected, "
            f"got {loss:.4f}. A label of 0.7 counts 0.7 for one class and 0.3 for the other."
        )


def _wrong_where_sure(answer):
    """Logits of 200, once right and once wrong: the loss is 0 and 200."""
    z = torch.tensor([200.0, -200.0])
    right, wrong = answer(z, (z > 0).float()).item(), answer(z, (z < 0).float()).item()
    if right != right or wrong != wrong:
        return "NaN at logits of 200 and -200: the sigmoid is exactly 1 and 0, and 0 * -inf is NaN."
    if wrong == 0:
        return "Sure and wrong by 200, and the loss is 0: the NaN was replaced, the mistake hidden."
    if right > 1000:
        return f"Sure and right, the loss is 0; got {right}. exp(200) is inf in float32."
    if wrong > 1000:
        return f"Sure and wrong by 200, the loss is 200; {wrong} is no number to learn from."
    if abs(wrong - 200) > 0.01:
        exact = answer(z.double(), (z > 0).double()).item()
        if exact < 0:
            return (
                f"The epsilon caps the loss: wrong by 200, it says {wrong:.1f}, with gradient 0. A "
                "sure and right prediction even goes below 0: probability + epsilon is above 1."
            )
        return (
            f"The clamp caps the loss: wrong by 200, it says {wrong:.1f}, and what is clamped has "
            "gradient 0. The model cannot learn from its worst mistakes."
        )
    if abs(right) > 1e-6:
        return f"Sure and right, the loss is 0; it returned {right}."


def _wrong_in_float16(answer):
    z = torch.tensor([30.0, -30.0, 12.0, -12.0], dtype=torch.float16)
    y = torch.tensor([0.0, 1.0, 1.0, 0.5], dtype=torch.float16)
    loss = answer(z, y).double().item()
    right = F.binary_cross_entropy_with_logits(z.double(), y.double()).item()
    if not abs(loss - right) < 0.01 * right:
        return f"float16 logits from -30 to 30: the loss is {right:.2f}, got {loss:.2f}."


def _wrong_gradient(answer, logits, y):
    """Of the mean: (sigmoid(logit) - label) / number of entries."""
    logits = torch.cat([logits, torch.tensor([[200.0, -200.0], [-200.0, 200.0]])])
    y = torch.cat([y, torch.tensor([[1.0, 0.0], [1.0, 0.0]])])
    logits = logits.requires_grad_()
    loss = answer(logits, y)
    if not loss.requires_grad:
        return "The loss is right, but no gradient gets through it (item, detach or no_grad?)."
    (gradient,) = torch.autograd.grad(loss, logits)
    right = (torch.sigmoid(logits) - y) / y.numel()
    if not torch.allclose(gradient, right, atol=1e-6):
        worst = torch.isclose(gradient, right, atol=1e-6).int().argmin()
        return (
            f"The loss is right, its gradient is not: at a logit of {logits.flatten()[worst]:.0f} "
            f"{right.flatten()[worst]:.3f} was expected, got {gradient.flatten()[worst]:.3f}."
        )

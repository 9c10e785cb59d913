"""Checkers of notebook 04, fp16 range against bf16."""

import torch

from nan_lab.exercises import call, exercise


@exercise("04", difficulty=2, minutes=8)
def largest_number(answer):
    largest = call(answer, 5, 10)
    if not isinstance(largest, int | float):
        return f"Return a number; you return {type(largest).__name__}."
    if largest == 2 * 65504:
        return "Twice too large: the exponent whose bits are all 1 is kept for inf and NaN."
    if largest in (2**15, 2**16):
        return "That is a power of two: in the largest number every mantissa bit is 1."
    if largest != 65504:
        return f"With 5 exponent and 10 mantissa bits it must be float16's 65504, not {largest}."
    for dtype, bits in ((torch.bfloat16, (8, 7)), (torch.float32, (8, 23))):
        if answer(*bits) != torch.finfo(dtype).max:
            return f"Right for float16, but not for {bits}, {str(dtype).removeprefix('torch.')}."
    if answer(5, 2) != 57344:
        return "Right for the three types, but not for (5, 2), an 8-bit float: use both arguments."


@exercise("04", difficulty=2, minutes=7)
def attention_scores(answer):
    for width in (64, 16):
        q, k = (torch.arange(n * width).reshape(n, width) % 7 - 3.0 for n in (4, 5))
        scores = call(answer, q.half(), k.half())
        if tuple(scores.shape) != (4, 5):
            return f"4 queries and 5 keys make scores of shape (4, 5), not {tuple(scores.shape)}."
        if scores.dtype != torch.float16:
            return f"The scores go on as float16; you return {scores.dtype}."
        if not _close(scores, q, k):
            return f"Small numbers, width {width}: the values are not q @ k.T / sqrt({width})."
    q, k = torch.full((4, 64), 64.0), torch.full((5, 64), -64.0)
    scores = answer(q.half(), k.half())
    if not scores.isfinite().all():
        return "64 * 64 * 64 overflows before you divide: an inf divided by 8 is still inf."
    if not _close(scores, q, k):
        return f"Finite, but wrong: -32768 is right and fits, you return {scores[0, 0].item():.0f}."


def _close(scores, q, k):
    expected = q.double() @ k.double().T / q.shape[-1] ** 0.5
    return torch.allclose(scores.double(), expected, rtol=2e-3, atol=2e-2)

"""Pictures of what a number type can hold: its range, and the gaps between its numbers."""

import math

import torch

from nan_lab.figures import COLOURS, Picture, new_figure

# One colour and one line a type, the same in all pictures; the y axis names the type as well.
TYPES = {torch.float16: COLOURS[1], torch.bfloat16: COLOURS[0], torch.float32: COLOURS[2]}


def number_line(marks=()):
    """Range and gaps of float16, bfloat16 and float32.

    marks: pairs (value, label), values above 0, drawn as lines across the ranges; the caption says
    in which types such a value is inf or 0. Returns a `Picture`.
    """
    figure, (ranges, gaps) = new_figure(2, height=4.6, height_ratios=[3, 2])
    for row, (dtype, colour) in enumerate(TYPES.items()):
        info = torch.finfo(dtype)
        least = math.log10(info.smallest_normal * info.eps)
        normal, most = math.log10(info.smallest_normal), math.log10(info.max)
        ranges.barh(row, most - normal, left=normal, height=0.5, color=colour)
        ranges.barh(
            row,
            normal - least,
            left=least,
            height=0.5,
            color="none",
            edgecolor=colour,
            hatch="////",
        )
        steps = min(2**-5 / info.eps, 512)  # 512 lines are a solid block already
        numbers = [1 + 2**-5 * step / steps for step in range(int(steps) + 1)]
        gaps.vlines(numbers, row - 0.3, row + 0.3, color=colour, linewidth=1.6)
    for value, label in marks:
        position = math.log10(value)
        ranges.axvline(position, color="0.25", linestyle=":", linewidth=1.6)
        ranges.annotate(
            label,
            (position, 1.0),
            xycoords=ranges.get_xaxis_transform(),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=10,
        )
    _name_rows(ranges)
    _name_rows(gaps)
    ranges.set_xlim(-48, 42)
    ranges.set_xlabel("value, powers of ten (hatched: fewer and fewer digits)")
    gaps.set_xlabel("every number from 1 to 1 + 1/32")
    gaps.set_xticks(
        [1, 1 + 2**-7, 1 + 2**-6, 1 + 2**-5], ["1", "1 + 1/128", "1 + 1/64", "1 + 1/32"]
    )
    return Picture(figure, _number_line_caption(marks))


def _name_rows(axis):
    axis.set_yticks(range(len(TYPES)), [_name(dtype) for dtype in TYPES])
    axis.grid(axis="y", visible=False)
    axis.set_ylim(len(TYPES) - 0.5, -0.5)


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _number_line_caption(marks):
    lines = []
    for dtype in TYPES:
        info = torch.finfo(dtype)
        most = f"{info.max:.0f}" if info.max < 1e6 else f"{info.max:.1e}"
        bounds = f"{info.smallest_normal * info.eps:.0e} to {most}"
        gap = int(math.log2(info.eps))
        lines.append(
            f"{_name(dtype)} reaches from {bounds}; the next number after 1 is 1 + 2^{gap}."
        )
    for value, label in marks:
        for outcome, test in (("inf", torch.isinf), ("0", lambda number: number == 0)):
            names = [_name(t) for t in TYPES if test(torch.tensor(value, dtype=t))]
            if names:
                lines.append(f"{label} is {outcome} in {' and '.join(names)}.")
    return "\n".join(lines)

"""Pictures of what a number type can hold: its range, its gaps, and gradients in its window."""

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


def gradient_histogram(gradients, scales=(1.0, 65536.0)):
    """Sizes of gradient entries, times each loss scale, against float16's window.

    gradients: finite float32 tensor of any shape, on CPU; zeros are left out. The caption says in
    words, not in per cent, how many become 0 or inf in float16, so that it is the same on every
    device. Returns a `Picture`.
    """
    entries = gradients.detach().abs().flatten()
    entries = entries[entries > 0].double()
    figure, panels = new_figure(
        len(scales), height=1.5 * len(scales) + 0.7, sharex=True, squeeze=False
    )
    low = math.floor(entries.min().log2().item()) + min(0, math.log2(min(scales)))
    high = math.ceil(entries.max().log2().item()) + max(0, math.log2(max(scales)))
    edges = range(int(min(low, -34)), int(max(high, 26)) + 1)
    lines = [f"Sizes of {len(entries)} gradient entries."]
    for axis, scale in zip(panels[:, 0], scales, strict=True):
        axis.hist((entries * scale).log2().tolist(), bins=list(edges), color=COLOURS[0])
        axis.axvspan(-24, 16, color=COLOURS[1], alpha=0.15, zorder=0)
        for edge in (-24, 16):
            axis.axvline(edge, color=COLOURS[1], linestyle="--", linewidth=1.4)
        axis.set_title(f"loss scale 2^{math.log2(scale):.0f}", fontsize=11, loc="left")
        axis.set_yticks([])
        axis.set_ylabel("entries")
        half = (entries * scale).half()
        lost, too_large = _how_many(half == 0), _how_many(half.isinf())
        lines.append(
            f"Loss scale 2^{math.log2(scale):.0f}: {lost} become 0 in float16, {too_large} inf."
        )
    for place, text in ((-24.5, "0"), (-4, "float16"), (16.5, "inf")):
        side = {"0": "right", "inf": "left"}.get(text, "center")
        panels[0, 0].annotate(
            text, (place, 1.03), xycoords=("data", "axes fraction"), ha=side, color=COLOURS[1]
        )
    panels[-1, 0].set_xlabel("size of an entry times the loss scale, powers of two")
    return Picture(figure, "\n".join(lines))


def _how_many(chosen):
    share = chosen.double().mean().item()
    return {0: "none", 1: "all"}.get(share, "most" if share > 0.5 else "some")

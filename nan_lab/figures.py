"""The pictures of the series; each has a caption, built from its data, that says what it shows."""

import io
import math
from itertools import compress

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

# Okabe and Ito's colours, which colour-blind readers can tell apart; never without a line style.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
LINES = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1))]
STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
WIDTH = 8  # inches, at 100 dots an inch: JupyterLab's default width


class Picture:
    """A figure with its caption: JupyterLab shows both, nbval compares the caption."""

    def __init__(self, figure, caption):
        self.figure, self.caption = figure, caption

    def png(self):
        """The figure as PNG bytes with 256 colours, about a third of matplotlib's own size."""
        raw = io.BytesIO()
        self.figure.savefig(raw, dpi=100, bbox_inches="tight", facecolor="white")
        small = io.BytesIO()
        Image.open(raw).convert("RGB").quantize(256).save(small, "png", optimize=True)
        return small.getvalue()

    def _ipython_display_(self):
        from IPython.display import display  # the package works without IPython, but for this

        display({"image/png": self.png(), "text/plain": self.caption}, raw=True)
        print(self.caption)


def new_figure(rows=1, columns=1, height=3.2, **options):
    """A figure in the series' style and its axes: `(figure, axes)`, as plt.subplots gives them."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        return figure, figure.subplots(rows, columns, **options)


def timeline(*histories, labels=None):
    """Loss, gradient norm and loss scale of one or several `record.History` over the steps.

    NaN and inf stand as marks on the upper edge of their panel, gradients of exactly 0 on the lower
    edge of theirs, skipped steps on the lower edge of the last one. The scale panel is left out
    where no run used a scaler. Returns a `Picture`.
    """
    labels = labels or [f"{h.name}, {str(h.dtype).removeprefix('torch.')}" for h in histories]
    if not histories or len(labels) != len(histories):
        raise ValueError(f"got {len(histories)} histories and {len(labels)} labels")
    scaled = any(scale != 1 for h in histories for scale in h.scale)
    panels = ["loss", "grad_norm", "scale"] if scaled else ["loss", "grad_norm"]
    figure, axes = new_figure(len(panels), height=2 * len(panels) + 0.6, sharex=True)
    for axis, panel in zip(axes, panels, strict=True):
        for number, history in enumerate(histories):
            _draw(axis, panel, history, number)
    for number, history in enumerate(histories):
        skips = [step for step, skipped in enumerate(history.skipped) if skipped]
        _rug(axes[-1], skips, "|", 0.04 + 0.09 * number, number)
    _label_axes(axes, histories, scaled)
    _mark_steps(axes, histories)
    _add_legend(figure, histories, labels)
    return Picture(figure, _timeline_caption(histories, labels, scaled))


def _draw(axis, panel, history, number):
    """One run in one panel: its line, and its NaN and inf on the edge."""
    counts = {"loss": history.yielded, "grad_norm": history.had_gradient}.get(panel)
    values = getattr(history, panel)
    drawn = [v if math.isfinite(v) and (v > 0 or panel == "loss") else math.nan for v in values]
    style = {"color": COLOURS[number], "linestyle": LINES[number], "linewidth": 1.4}
    if panel == "scale" and all(v == 1 for v in values):
        return  # this run has no scaler
    axis.plot(drawn, drawstyle="steps-post" if panel == "scale" else "default", **style)
    if panel == "scale":
        _rug(axis, [step for step, v in enumerate(values) if v == 0], "v", 0.02, number)
        return
    for marker, wrong in (("x", math.isnan), ("^", math.isinf)):
        steps = [i for i, v in enumerate(values) if counts[i] and wrong(v)]
        _rug(axis, steps, marker, 0.97 - 0.09 * number, number)
    if panel == "grad_norm":
        _rug(axis, _zero_gradients(history), "s", 0.03 + 0.09 * number, number)


def _zero_gradients(history):
    """Steps whose backward pass left exactly 0, which a logarithmic axis cannot show."""
    norms = enumerate(zip(history.grad_norm, history.had_gradient, strict=True))
    return [step for step, (norm, on) in norms if on and norm == 0]


def _rug(axis, steps, marker, height, number):
    """Marks at a fixed height of the panel (0 is the lower edge, 1 the upper one)."""
    axis.plot(
        steps,
        [height] * len(steps),
        marker=marker,
        markersize=4,
        linestyle="none",
        color=COLOURS[number],
        transform=axis.get_xaxis_transform(),
    )


def _label_axes(axes, histories, scaled):
    largest = max((v for h in histories for v in h.loss if math.isfinite(v)), default=0)
    if largest > 20:
        axes[0].set_yscale("log")
    axes[0].set_ylabel("loss")
    axes[1].set_yscale("log")
    axes[1].set_ylabel("gradient norm")
    if scaled:
        axes[2].set_yscale("log", base=2)
        axes[2].set_ylabel("loss scale")
    axes[-1].set_xlabel(f"step ({histories[0].steps_per_epoch} an epoch)")
    for axis in axes:
        _make_room(axis)


def _make_room(axis):
    """Widen the panel for the marks on its edges; a log10 panel to whole decades."""
    low, high = axis.get_ylim()
    if axis.get_yscale() == "linear":
        axis.set_ylim(low, high + 0.2 * (high - low))
        return
    if axis.get_ylabel() != "loss scale":
        low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))
    axis.set_ylim(low / (high / low) ** 0.15, high * (high / low) ** 0.2)


def _mark_steps(axes, histories):
    """A grey line at the cause, and at the step at which a run stopped."""
    causes = {h.cause_step for h in histories} - {None}
    stops = {h.stopped_at for h in histories} - {None}
    for number, step in enumerate(sorted(causes | stops)):
        what = " and ".join(["cause"] * (step in causes) + ["stop"] * (step in stops))
        for axis in axes:
            axis.axvline(step, color="0.35", linestyle=(0, (1, 2)), linewidth=1.2)
        end = step > len(histories[0].loss) * 0.7
        axes[0].annotate(
            f"{what}: step {step}",
            (step, 1.0),
            xycoords=axes[0].get_xaxis_transform(),
            xytext=(-4 if end else 4, 3 + 12 * number),
            textcoords="offset points",
            ha="right" if end else "left",
            fontsize=10,
            color="0.25",
        )


def _add_legend(figure, histories, labels):
    runs = [
        Line2D([], [], color=COLOURS[i], linestyle=LINES[i], label=label)
        for i, label in enumerate(labels)
    ]
    readings = [v for h in histories for v in compress(h.loss, h.yielded)]
    readings += [v for h in histories for v in compress(h.grad_norm, h.had_gradient)]
    marks = [("x", "NaN", any(map(math.isnan, readings)))]
    marks += [("^", "inf", any(map(math.isinf, readings)))]
    marks += [("|", "skipped step", any(any(h.skipped) for h in histories))]
    marks += [("s", "gradient 0", any(map(_zero_gradients, histories)))]
    marks += [("v", "loss scale 0", any(0 in h.scale for h in histories))]
    runs += [
        Line2D([], [], color="0.25", marker=marker, linestyle="none", label=label)
        for marker, label, needed in marks
        if needed
    ]
    figure.legend(handles=runs, loc="outside upper left", ncols=3, frameon=False)


def _timeline_caption(histories, labels, scaled):
    shown = "Loss, gradient norm and loss scale" if scaled else "Loss and gradient norm"
    steps = max(len(h.loss) for h in histories)
    lines = [f"{shown} of {steps} steps."]
    for label, history in zip(labels, histories, strict=True):
        sunk = " The loss scale sinks below 1." if min(history.scale) < 1 else ""
        lines.append(f"{label}: {history.verdict()}{sunk}")
    return "\n".join(lines)

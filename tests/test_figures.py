"""The timeline shows every NaN and inf, needs no colour to be read, and says what it shows."""

import io
import math

import pytest
import torch
from PIL import Image

from nan_lab import figures, loops, triggers
from nan_lab.record import History
from tests.runs import run


@pytest.fixture(scope="module")
def broken():
    return run(loops.broken, triggers.raw_pixels())


def history(loss, grad_norm, scale, skipped):
    made = History("loop", torch.float16, 1, 3)
    made.loss, made.grad_norm, made.scale, made.skipped = loss, grad_norm, scale, skipped
    made.yielded, made.had_gradient = [True] * len(loss), [True] * len(loss)
    return made


def marks(axis, marker):
    """The steps at which an axis has this marker."""
    lines = [line for line in axis.lines if line.get_marker() == marker]
    return [int(x) for line in lines for x in line.get_xdata()]


def test_nan_inf_zero_and_skips_are_drawn_at_their_steps():
    values = [1.0, math.nan, math.inf, 2.0]
    picture = figures.timeline(history(values, values[::-1], [2.0, 1.0, 0.0, 0.0], [0, 1, 1, 0]))
    loss, norm, scale = picture.figure.axes
    assert (marks(loss, "x"), marks(loss, "^")) == ([1], [2])
    assert (marks(norm, "x"), marks(norm, "^")) == ([2], [1])
    assert (marks(scale, "|"), marks(scale, "v")) == ([1, 2], [2, 3])
    labels = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert labels == ["loop, float16", "NaN", "inf", "skipped step", "loss scale 0"]


def test_three_panels_with_names_and_the_cause(broken):
    picture = figures.timeline(broken)
    axes = picture.figure.axes
    assert [axis.get_ylabel() for axis in axes] == ["loss", "gradient norm", "loss scale"]
    assert axes[-1].get_xlabel() == "step (56 an epoch)"
    assert [axes[1].get_yscale(), axes[2].get_yscale()] == ["log", "log"]
    assert [text.get_text() for text in axes[0].texts] == ["cause: step 112"]
    assert marks(axes[0], "x") == marks(axes[2], "|") == list(range(112, 224))


def test_runs_differ_in_line_style_as_well_as_in_colour(broken):
    picture = figures.timeline(broken, run(loops.fixed, triggers.raw_pixels()), labels=["a", "b"])
    lines = [line for line in picture.figure.axes[0].lines if len(line.get_xdata()) == 224]
    assert len({line.get_linestyle() for line in lines}) == 2
    assert len({line.get_color() for line in lines}) == 2


def test_without_a_scaler_there_is_no_scale_panel():
    float32 = run(loops.broken, triggers.raw_pixels(), dtype=torch.float32)
    assert len(figures.timeline(float32).figure.axes) == 2
    made = history([1.0, 2.0], [1.0, 2.0], [1.0, 1.0], [False, True])
    assert marks(figures.timeline(made).figure.axes[-1], "|") == [1]  # a loop that skips by itself


def test_where_a_run_stopped():
    picture = figures.timeline(run(loops.fixed, triggers.nan_pixel()))
    assert [t.get_text() for t in picture.figure.axes[0].texts] == ["cause and stop: step 113"]


def test_the_caption_is_built_from_the_data(broken):
    assert figures.timeline(broken, labels=["my run"]).caption == (
        "Loss, gradient norm and loss scale of 224 steps.\n"
        f"my run: {broken.verdict()} The loss scale sinks below 1."
    )


def test_jupyterlab_gets_a_small_picture_and_everybody_the_caption(broken, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    picture = figures.timeline(broken)
    picture._ipython_display_()
    (data,) = shown
    assert data["text/plain"] == capsys.readouterr().out.strip() == picture.caption
    assert len(data["image/png"]) < 40_000
    image = Image.open(io.BytesIO(data["image/png"]))
    assert 700 < image.width < 900 and image.getcolors(256)


def test_bad_input(broken):
    with pytest.raises(ValueError, match="got 1 histories and 2 labels"):
        figures.timeline(broken, labels=["a", "b"])
    with pytest.raises(ValueError, match="got 0 histories"):
        figures.timeline()

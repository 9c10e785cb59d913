"""What each trigger does to a batch, and by which margin."""

import dataclasses

import pytest
import torch

from nan_lab import data, triggers
from nan_lab.model import classifier

HALF_MAX = torch.finfo(torch.float16).max


@pytest.fixture
def batch():
    return next(data.batches(32, torch.Generator().manual_seed(0)))


def test_a_trigger_touches_its_own_steps_only(batch):
    trigger = triggers.raw_pixels(from_step=10, until_step=12)
    changed = [trigger.apply(step, *batch)[0] is not batch[0] for step in range(9, 14)]
    assert changed == [False, True, True, False, False]
    assert (trigger.name, trigger.cause_step) == ("raw pixels", 10)
    assert triggers.raw_pixels().apply(10**6, *batch)[0].max() == 16


def test_a_trigger_leaves_the_batch_itself_alone(batch):
    before = [tensor.clone() for tensor in batch]
    for make in (triggers.nan_pixel, triggers.inf_pixel, triggers.huge_pixels):
        make(at_step=3).apply(3, *batch)
    triggers.mislabelled_spike(at_step=3).apply(3, *batch)
    assert all(torch.equal(a, b) for a, b in zip(before, batch, strict=True))


def test_what_they_change(batch):
    x, y = batch
    spiked, wrong = triggers.mislabelled_spike(at_step=3, factor=64).apply(3, x, y)
    assert torch.equal(spiked, x * 64)
    assert torch.equal(wrong.argmax(-1), (y.argmax(-1) + 1) % 10)
    assert triggers.nan_pixel(3).apply(3, x, y)[0].isnan().sum() == 1
    assert triggers.inf_pixel(3).apply(3, x, y)[0].isinf().sum() == 1


def test_huge_pixels_overflow_float16_alone(batch):
    x, _ = triggers.huge_pixels(3).apply(3, *batch)
    assert x.isfinite().all() and x.max() > 1.5 * HALF_MAX
    with torch.no_grad():
        for dtype, finite in ((torch.float16, False), (torch.bfloat16, True)):
            with torch.autocast("cpu", dtype=dtype):
                assert bool(classifier()(x).isfinite().all()) is finite


def test_a_trigger_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        triggers.nan_pixel().cause_step = 3


@pytest.mark.parametrize("step", [-1, 1.5, None, "3"])
def test_a_step_must_be_a_natural_number(step):
    with pytest.raises(ValueError, match="a step must be an integer of 0 or more, got"):
        triggers.nan_pixel(at_step=step)
    with pytest.raises(ValueError, match=r"until_step must come after from_step \(5\), got 4"):
        triggers.raw_pixels(from_step=5, until_step=4)

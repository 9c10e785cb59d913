"""The claims of notebook 05: underflow, a healthy scaler, what no skip saves, the collapse."""

from itertools import pairwise

import pytest
import torch

from nan_lab import loops, triggers
from nan_lab.exercises.nb05 import FOUR_SCALES, four_scaled_runs
from nan_lab.figures import timeline
from nan_lab.figures_dtype import gradient_histogram
from tests import runs
from tests.notebook_code import definitions

NOTEBOOK = definitions("05")
NOTEBOOK["PIXELS"] = PIXELS = 2048 * 2048


def nan_batches(first, count):
    return triggers.Trigger(
        "NaN batches", first, first + count - 1, lambda x, y: (x * float("nan"), y)
    )


def train_on_pixels(loop, seed, **options):
    return runs.run(NOTEBOOK[loop], lr=0.03 * PIXELS, seed=seed, **options)


@pytest.mark.parametrize("seed", range(3))
def test_without_a_scaler_every_gradient_is_0_and_with_one_it_trains(seed):
    silent = train_on_pixels("without_scaler", seed, epochs=1)
    assert set(silent.grad_norm) == {0.0} and silent.weights_finite and silent.accuracy[-1] < 0.25
    assert train_on_pixels("with_scaler", seed, epochs=2).accuracy[-1] > 0.85


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_other_types_need_no_scaler(dtype):
    assert train_on_pixels("without_scaler", 0, dtype=dtype, epochs=2).accuracy[-1] > 0.85


def test_the_largest_possible_logit_gradient_is_0_by_a_factor_of_4():
    largest = 1 / 32 / PIXELS
    assert torch.tensor([largest, 2 * largest, 8 * largest]).half().ne(0).tolist() == [0, 0, 1]


@pytest.mark.parametrize("seed", range(3))
def test_skips_at_the_start_are_healthy(seed):
    run = runs.run(loops.without_guard, init_scale=2.0**30, epochs=2, seed=seed)
    assert all(run.skipped[:9]) and sum(run.skipped[28:]) < 14
    assert run.first_bad_step is None and run.accuracy[-1] > 0.85


def test_a_skip_does_not_save_batch_norms_buffers():
    model = NOTEBOOK["with_batch_norm"]
    bad, good = (
        runs.run(loops.without_guard, trigger, model=model, epochs=1)
        for trigger in (triggers.nan_pixel(30), None)
    )
    assert bad.skipped == [step == 30 for step in range(56)] and bad.weights_finite
    assert not bad.model[1].running_mean.isfinite().any() and bad.accuracy[-1] < 0.25
    assert good.model[1].running_mean.isfinite().all() and good.accuracy[-1] > 0.85


def test_the_four_scales_are_what_their_names_say():
    four = {FOUR_SCALES[letter]: run for letter, run in four_scaled_runs().items()}
    rises = {k for k, r in four.items() if any(b > a for a, b in pairwise(r.scale))}
    assert rises == {"saw-tooth"}
    assert {k for k, r in four.items() if r.scale[-1] < 0.5} == {"cliff", "floor"}
    assert {k for k, r in four.items() if all(r.skipped[-56:])} == {"cliff"}
    assert not any(four["cliff"].skipped[:112]) and all(four["floor"].skipped[:12])
    assert sum(four["floor"].skipped[56:]) < 6 and sum(four["staircase"].skipped) == 11
    assert all(run.accuracy[-1] > 0.85 for run in four.values())


def test_the_solution_reads_the_staircase_and_the_cliff():
    four = {FOUR_SCALES[letter]: run for letter, run in four_scaled_runs().items()}
    assert NOTEBOOK["read_scale"](four["staircase"].scale) == (11, 0, 16 - 11)
    assert NOTEBOOK["read_scale"](four["cliff"].scale) == (111, 0, 16 - 111)
    assert NOTEBOOK["read_scale"](four["saw-tooth"].scale)[1] > 0


@pytest.mark.parametrize("bad_steps, survives", [(143, True), (144, False)])
def test_the_healthy_batch_after_144_skips_ruins_the_weights(bad_steps, survives):
    run = runs.run(loops.without_guard, nan_batches(0, bad_steps), epochs=3)
    assert all(run.skipped[:bad_steps]) and not run.skipped[bad_steps]
    assert run.weights_finite is survives


def test_a_lowest_scale_saves_them():
    run = runs.run(NOTEBOOK["with_lowest_scale"], nan_batches(0, 144), epochs=4)
    assert run.weights_finite and min(run.scale) == 1 and not any(run.skipped[144:])
    assert run.loss[-1] < run.loss[144] / 1.5


def test_the_histogram_counts_what_float16_loses():
    sizes = torch.tensor([0.0, 2.0**-30, 2.0**-26, 2.0**-10, -1.0])
    assert gradient_histogram(sizes, scales=(1, 2.0**10, 2.0**16)).caption.splitlines() == [
        "Sizes of 4 gradient entries.",
        "Loss scale 2^0: some become 0 in float16, none inf.",
        "Loss scale 2^10: none become 0 in float16, none inf.",
        "Loss scale 2^16: none become 0 in float16, some inf.",
    ]


def test_the_timeline_marks_a_gradient_of_exactly_0():
    silent = train_on_pixels("without_scaler", 0, epochs=1)
    scaled = train_on_pixels("with_scaler", 0, epochs=2)
    for run, marked in ((silent, True), (scaled, False)):
        (legend,) = timeline(run).figure.legends
        assert ("gradient 0" in [text.get_text() for text in legend.get_texts()]) is marked

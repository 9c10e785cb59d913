"""The incident on the digits: each row of its table, the margins, and a control for each fix."""

import math

import pytest
import torch

from nan_lab import loops, triggers
from tests.runs import gradient_entry, logit_gaps, run

RAW = triggers.raw_pixels()
SPIKE = triggers.mislabelled_spike()
SOFTMAX_IS_ZERO = 104  # the logit gap at which a float32 softmax is exactly 0
ALWAYS_SKIPPED = "The loss is NaN from step 112 to the end; every step is skipped"
NEVER_SKIPPED = "The loss is NaN from step 112 to the end; no step is skipped"

seeds = pytest.mark.parametrize("seed", [0, 1, 2])


@seeds
def test_the_loop_of_the_question_goes_nan_at_step_112_and_is_frozen(seed):
    history = run(loops.broken, RAW, seed=seed)
    assert history.verdict() == f"{ALWAYS_SKIPPED}; the weights are finite."
    assert history.first_bad_grad_step == 112
    assert history.accuracy[-1] == history.accuracy[1] > 0.85
    assert history.scale[112:] == [2.0 ** (16 - i) for i in range(112)]


@seeds
def test_the_margins_of_step_112(seed):
    gaps = logit_gaps(loops.broken, RAW, seed=seed)
    assert max(gaps[:112]) * 1.5 < SOFTMAX_IS_ZERO < min(gaps[112:]) / 1.5
    healthy = logit_gaps(loops.fixed, None, seed=seed)
    assert max(healthy) * 1.5 < SOFTMAX_IS_ZERO


def test_after_166_skips_the_scale_is_zero():
    history = run(loops.broken, RAW, epochs=6)
    assert history.scale[112 + 166] == 0 < history.scale[112 + 165]
    assert all(history.skipped[112:])  # told by the optimizer: at scale 0 the scale falls no more
    assert history.accuracy[-1] > 0.85


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_scaler_the_weights_are_nan_at_once(dtype):
    history = run(loops.broken, RAW, dtype=dtype)
    assert history.verdict() == f"{NEVER_SKIPPED}; the weights are NaN or inf."
    assert history.accuracy[1] > 0.85 and history.accuracy[-1] < 0.15


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_tenth_of_the_learning_rate_hides_it(dtype):
    history = run(loops.broken, RAW, dtype=dtype, lr=0.003)
    assert history.verdict() == "The loss is finite in all 224 steps; the weights are finite."
    assert history.accuracy[-1] > 0.85


@seeds
def test_the_repair_trains_on_the_same_batches(seed):
    history = run(loops.fixed, RAW, seed=seed)
    assert history.verdict() == "The loss is finite in all 224 steps; the weights are finite."
    assert history.accuracy[-1] > 0.85
    assert 1 <= sum(history.skipped) <= 6


@seeds
def test_control_the_fused_loss_taken_out_stops_at_step_112(seed):
    history = run(loops.without_fused_loss, RAW, seed=seed)
    assert history.stopped_at == 112
    assert history.verdict() == (
        "Stopped at step 112 by AssertionError: step 112: the loss is nan; the weights are finite."
    )
    assert history.accuracy[-1] > 0.85


@seeds
def test_control_the_clipping_taken_out_lets_a_spike_through(seed):
    clipped = run(loops.fixed, SPIKE, seed=seed, init_scale=1024.0, epochs=3)
    blown = run(loops.without_clipping, SPIKE, seed=seed, init_scale=1024.0, epochs=3)
    for history in (clipped, blown):
        assert not any(history.skipped) and history.first_bad_step is None
        assert history.grad_norm[113] > 100 > 1.5 > max(history.grad_norm[:113])
    assert clipped.accuracy[2] > 0.9 > 0.85 > blown.accuracy[2]
    assert clipped.applied_norm[113] == pytest.approx(1, rel=1e-3)
    assert blown.applied_norm[113] == blown.grad_norm[113]


@seeds
def test_the_spike_is_inside_float16_at_scale_1024_and_far_outside_at_65536(seed):
    entry = gradient_entry(
        loops.without_clipping, SPIKE, 113, seed=seed, init_scale=1024.0, epochs=3
    )
    assert entry * 1.5 < 65504 / 1024
    assert entry > 1.5 * 65504 / 65536
    assert run(loops.without_clipping, SPIKE, seed=seed, epochs=3).skipped[113]


@pytest.mark.parametrize("trigger", [triggers.nan_pixel(), triggers.inf_pixel()])
def test_control_the_guard_taken_out_runs_past_a_bad_batch(trigger):
    guarded = run(loops.fixed, trigger)
    assert guarded.stopped_at == 113 and guarded.weights_finite
    assert str(guarded.error) == "step 113: the batch has a NaN or inf"
    unguarded = run(loops.without_guard, trigger)
    assert unguarded.stopped_at is None and unguarded.first_bad_step == 113
    assert [i for i, skipped in enumerate(unguarded.skipped) if skipped] == [113]
    assert unguarded.weights_finite  # the scaler's doing: see the next test
    assert not run(loops.bfloat16_without_guard, trigger, dtype=torch.bfloat16).weights_finite


def test_a_float16_overflow_in_the_forward_pass_is_none_in_bfloat16():
    history = run(loops.fixed, triggers.huge_pixels())
    assert str(history.error) == "step 113: the loss is nan"
    history = run(loops.bfloat16_without_guard, triggers.huge_pixels(), dtype=torch.bfloat16)
    assert history.first_bad_step is None and history.accuracy[-1] > 0.85


def test_control_clipping_before_unscale_trains_nothing():
    history = run(loops.clip_before_unscale, dtype=torch.float16)
    assert history.verdict() == "The loss is finite in all 224 steps; the weights are finite."
    assert max(history.applied_norm) < 1.5 / 65536  # max_norm / scale
    assert history.accuracy[-1] < 0.15 < 0.85 < run(loops.without_guard).accuracy[-1]


def test_clip_before_unscale_is_hidden_by_adam():
    history = run(loops.clip_before_unscale, optimizer=_adam)
    assert history.accuracy[-1] > 0.85


def _adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


@pytest.mark.parametrize(
    ("bad_steps", "finite", "improves"), [(28, True, True), (88, True, False), (144, False, False)]
)
def test_when_the_data_comes_right_again(bad_steps, finite, improves):
    history = run(loops.broken, triggers.raw_pixels(until_step=112 + bad_steps), epochs=7)
    assert history.scale[112 + bad_steps] == 2.0 ** (16 - bad_steps)
    assert history.weights_finite == finite
    assert (history.accuracy[-1] > history.accuracy[1] + 0.02) == improves


@seeds
def test_the_natural_nan_comes_when_the_model_is_confident(seed):
    history = run(loops.broken, policy="native", device="cpu", seed=seed, epochs=3)
    assert 56 * 2 <= history.first_bad_step < 56 * 3  # the third epoch
    assert history.first_bad_grad_step + 20 < history.first_bad_step
    assert run(loops.broken, seed=seed, epochs=3).first_bad_step is None  # CUDA's rule
    assert math.isfinite(
        sum(run(loops.fixed, policy="native", device="cpu", seed=seed, epochs=3).loss)
    )

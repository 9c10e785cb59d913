"""The claims of notebook 06: the limit 2 / curvature, warm-up, range test, a delayed NaN."""

import math
from functools import cache

import pytest
import torch

from nan_lab import data, loops, record, triggers
from tests.notebook_code import definitions

NOTEBOOK = definitions("06")
SEEDS = pytest.mark.parametrize("seed", range(3))


def curvature():
    x = torch.cat([data.digits()[0], torch.ones(1797, 1)], dim=1).double()
    return torch.linalg.eigvalsh(x.T @ x / len(x))[-1].item()


@cache
def train(lr, seed=0, dtype=torch.float32, loop="regression", epochs=3):
    """The notebook's linear model on the CPU."""
    options = {"momentum": 0, "seed": seed, "dtype": dtype, "device": "cpu", "epochs": epochs}
    return record.run(NOTEBOOK[loop], model=NOTEBOOK["linear"], lr=lr, **options)


def test_the_limit_lies_between_the_two_rates():
    limit = 2 / curvature()
    assert 1.5 * 0.11 < limit < 0.27 / 1.5
    assert abs(round(curvature(), 1) - curvature()) < 0.045  # far enough from the next tenth


@SEEDS
def test_below_the_limit_it_trains_and_above_it_the_norm_rises_at_every_step(seed):
    slow, fast = train(0.11, seed), train(0.27, seed)
    assert slow.first_bad_step is None and slow.accuracy[-1] > 0.9
    assert max(slow.grad_norm) < 6 / 1.5
    assert not fast.weights_finite and 50 < fast.first_bad_step < 70  # said: 45 and 80
    ratios = [b / a for a, b in zip(fast.grad_norm, fast.grad_norm[1:45], strict=False)]
    assert 1.5 < min(ratios) and max(ratios) < 5 / 1.5
    assert fast.loss[fast.first_bad_step] == math.inf and math.isnan(fast.loss[-1])
    predicted = NOTEBOOK["steps_until"](2.0**64, 0.27, curvature())
    assert abs(predicted - fast.first_bad_step) < 10 / 1.5


def test_a_spike_is_one_jump():
    spike = record.run(
        loops.without_clipping,
        triggers.mislabelled_spike(113),
        dtype=torch.float32,
        epochs=3,
        device="cpu",
    )
    assert NOTEBOOK["largest_jump"](spike.grad_norm) > 1.5 * 50


@pytest.mark.parametrize("dtype, step", [(torch.float16, 16), (torch.float32, 128)])
def test_the_parabola_overflows_at_a_known_step(dtype, step):
    path, first_inf, after = NOTEBOOK["overflow"](dtype)
    assert (path, first_inf) == ([-2, 4, -8, 16], step) and after != after


@SEEDS
def test_warm_up_only_postpones_a_peak_above_the_limit(seed):
    peak = 4 / curvature()
    run = train(lambda step: peak * min(1, (step + 1) / 112), seed)
    assert 115 < run.first_bad_step < 125  # said: 112 and 135
    assert run.loss[run.first_bad_step] == math.inf
    assert max(run.grad_norm[:56]) < 5 / 1.4 and run.grad_norm[111] > 1e6


@SEEDS
def test_warm_up_cures_the_start_of_adam(seed):
    largest = []
    for lr in (0.3, lambda step: 0.3 * min(1, (step + 1) / 56)):
        options = {"optimizer": NOTEBOOK["adam"], "lr": lr, "dtype": torch.float32, "epochs": 2}
        run = record.run(loops.without_clipping, seed=seed, device="cpu", **options)
        largest.append(max(run.loss))
    assert largest[0] > 8 * 1.5 and largest[1] < 8 / 1.5


@SEEDS
def test_the_range_test_brackets_the_usable_rates(seed):
    options = {"dtype": torch.float32, "epochs": 2, "seed": seed, "device": "cpu"}
    run = record.run(loops.without_clipping, lr=NOTEBOOK["rising"], **options)
    rates = [NOTEBOOK["rising"](step) for step in range(112)]
    best = rates[run.loss.index(min(run.loss))]
    gone = next(r for r, loss in zip(rates, run.loss, strict=True) if loss > 2 * run.loss[0])
    assert 0.1 * 1.5 < best < 1.2 / 1.5 and 0.7 * 1.5 < gone < 4 / 1.5
    used = [record.run(loops.without_clipping, lr=lr, **options).accuracy for lr in (0.1, gone)]
    assert used[0][-1] > 0.9 and used[1][-1] < 0.85 / 1.5


def test_a_lower_rate_delays_the_nan_of_the_logarithm_and_float32_has_none():
    native = {"policy": "native", "device": "cpu"}
    runs = ((0.03, 4), (0.02, 5), (0.01, 8))
    steps = [record.run(loops.broken, lr=lr, epochs=n, **native).first_bad_step for lr, n in runs]
    assert 1.4 * steps[0] < steps[1] and 1.4 * steps[1] < steps[2]
    assert steps[2] > 1.5 * 2 * steps[0]
    run = record.run(loops.broken, lr=0.1, dtype=torch.float32, **native)
    assert run.first_bad_step is None and run.accuracy[-1] > 0.9


@SEEDS
def test_float16_has_the_same_limit_and_reaches_its_end_sooner(seed):
    assert train(0.11, seed, torch.float16).accuracy[-1] > 0.9
    half = train(0.27, seed, torch.float16)
    assert half.first_bad_step < 45 and half.first_bad_step < train(0.27, seed).first_bad_step / 1.5
    assert sum(half.skipped) > 1.4 * 100 and half.weights_finite
    assert half.accuracy[-1] < 0.25 / 1.5


@SEEDS
def test_clipping_removes_the_nan_and_not_the_cause(seed):
    run = train(6 / curvature(), seed, loop="clipped")
    assert run.first_bad_step is None and run.accuracy[-1] < 0.65 < train(0.11, seed).accuracy[-1]

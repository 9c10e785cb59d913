"""The claims of notebook 03: each check sees its part, and the guard stops at the very step."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F

from nan_lab import data, loops, record, triggers
from nan_lab.model import classifier
from tests.notebook_code import definitions

NOTEBOOK = definitions("03")
EXP_LIMIT = 88.8  # exp of more than this is inf in float32
# The notebook's bright batch, and one that fails early: a new model needs brighter pictures.
BRIGHT = triggers.Trigger("bright batch", 113, 113, lambda x, y: (x * 64, y))
EARLY = triggers.Trigger("bright batch", 2, 2, lambda x, y: (x * 4096, y))
NAN_PIXELS = triggers.Trigger("NaN pixels", 40, 49, triggers.nan_pixel().change)
SEEDS = pytest.mark.parametrize("seed", range(3))


@cache
def train(check="no_check", trigger=EARLY, loss="bce", epochs=1, **options):
    loss = NOTEBOOK.get(loss, F.binary_cross_entropy_with_logits)
    loop = NOTEBOOK["train_with"](NOTEBOOK[check], loss)
    return record.run(loop, trigger, epochs=epochs, **{"dtype": torch.bfloat16, **options})


@SEEDS
def test_without_a_guard_the_loss_names_the_step_after_the_cause(seed):
    run = train(seed=seed)
    assert (run.first_bad_grad_step, run.first_bad_step) == (2, 3)
    assert run.accuracy[-1] < 0.15 and not run.weights_finite
    assert train(seed=seed, trigger=None).accuracy[-1] > 0.5


@SEEDS
def test_the_notebooks_bright_batch_fails_with_a_margin(seed):
    largest = []

    def spy(logits, y):
        largest.append(logits.max().item())
        return NOTEBOOK["bce"](logits, y)

    loop = NOTEBOOK["train_with"](NOTEBOOK["guard"], spy)
    run = record.run(loop, BRIGHT, epochs=3, seed=seed, dtype=torch.bfloat16)
    assert largest[113] > 1.5 * EXP_LIMIT and max(largest[:113]) < 20 / 1.5
    assert run.stopped_at == 113 and run.weights_finite and run.accuracy[1] > 0.8


@SEEDS
def test_a_check_of_the_loss_is_one_step_late_and_the_guards_are_in_time(seed):
    late = train("check_loss", seed=seed)
    assert late.stopped_at == 3 and not late.weights_finite
    for guard in ("check_norm", "guard", "scaler_guard"):
        run = train(guard, seed=seed)
        assert str(run.error) == "step 2: the gradient norm is nan" and run.weights_finite


def test_the_guard_changes_nothing_and_is_silent_once_the_cause_is_cured():
    assert train("guard").loss[:2] == train().loss[:2]
    cured = train("guard", loss="fused")
    assert cured.error is None and cured.weights_finite


def test_skipping_on_a_nan_loss_skips_to_the_end():
    run = record.run(NOTEBOOK["skip_nan_loss"], EARLY, epochs=1, dtype=torch.bfloat16)
    assert run.skipped == [False] * 3 + [True] * 53 and run.error is None


@SEEDS
def test_batchnorms_buffers_survive_the_skip(seed):
    options = {"model": NOTEBOOK["with_batchnorm"], "seed": seed, "epochs": 1}
    run = record.run(loops.without_guard, NAN_PIXELS, **options)
    assert run.weights_finite and run.loss[-1] < 1 and run.accuracy[-1] < 0.15
    assert run.skipped[40:50] == [True] * 10 and run.scale[-1] == run.scale[40] / 2**10
    control = record.run(loops.without_guard, **options)
    assert control.accuracy[-1] > 0.9


def test_each_of_the_three_failures_is_seen_by_one_check():
    torch.manual_seed(0)
    seen_by, model, normed = NOTEBOOK["seen_by"], classifier(), NOTEBOOK["with_batchnorm"]()
    x, y = next(data.batches(32, torch.Generator().manual_seed(0)))
    assert seen_by(model, x, F.cross_entropy(model(x), y)) == []
    assert model(x * 4096).max() > 1.5 * EXP_LIMIT
    assert seen_by(model, x * 4096, NOTEBOOK["bce"](model(x * 4096), y)) == ["gradients"]
    fused = F.binary_cross_entropy_with_logits(model(x * 4096), y)
    assert seen_by(model, x * 4096, fused) == []
    assert seen_by(model, x, F.cross_entropy(model(x), torch.full((32,), -100))) == ["loss"]
    assert all(p.grad.count_nonzero() == 0 for p in model.parameters())
    assert seen_by(normed, x, F.cross_entropy(normed(x), y)) == []
    normed(triggers.nan_pixel().change(x, y)[0])
    assert seen_by(normed, x, F.cross_entropy(normed(x), y)) == ["buffers"]


@pytest.mark.parametrize("mask", range(5))
def test_the_saved_step_fails_whatever_the_dropout_and_only_for_its_loss(mask):
    torch.manual_seed(0)
    seen_by, model = NOTEBOOK["seen_by"], NOTEBOOK["with_dropout"]()
    x, y = next(data.batches(4, torch.Generator().manual_seed(0)))
    losses = [("bce", ["gradients"]), ("fused", [])]
    for name, seen in losses:
        torch.manual_seed(mask)
        loss = NOTEBOOK.get(name, F.binary_cross_entropy_with_logits)
        assert seen_by(model, x * 4096, loss(model(x * 4096), y)) == seen


@SEEDS
def test_a_scaler_that_starts_too_high_stops_the_first_guard_but_not_the_second(seed):
    options = {"trigger": None, "dtype": torch.float16, "init_scale": 2.0**24, "seed": seed}
    search = train(epochs=1, **options)
    assert search.skipped[:3] == [True] * 3 and search.first_bad_step is None
    assert not any(search.skipped[-10:])
    assert train("guard", epochs=1, **options).stopped_at == 0
    assert train("scaler_guard", epochs=1, **options).error is None


def test_a_nan_gradient_at_every_step_stops_the_second_guard_at_loss_scale_1():
    always = triggers.Trigger("bright batches", 5, None, lambda x, y: (x * 4096, y))
    run = train("scaler_guard", always, epochs=1, dtype=torch.float16)
    assert run.scale[5] == 65536 and run.stopped_at == 5 + 16 and run.scale[-1] == 1
    assert run.weights_finite


@pytest.mark.parametrize("layers", [1, 5])
def test_the_guard_reads_once_whatever_the_model(layers):
    model = torch.nn.Sequential(*[NOTEBOOK["with_batchnorm"]() for _ in range(layers)])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with NOTEBOOK["HostReads"]() as reads:
        NOTEBOOK["guard"](0, torch.tensor(1.0), torch.tensor(1.0), model, scaler)
    assert reads.count == 1
    with NOTEBOOK["HostReads"]() as reads:
        NOTEBOOK["all_finite"](model.parameters())
    assert reads.count == 6 * layers

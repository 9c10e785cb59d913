"""The claims of notebook 07: the sample behind the step, the validator, and data or not."""

import pytest
import torch
import torch.nn.functional as F

from nan_lab import data, record
from nan_lab.exercises.nb07 import two_linear_runs
from tests.notebook_code import definitions

NOTEBOOK = definitions("07")
PICTURES, LABELS = data.digits()
PICTURES = PICTURES * 16
PICTURES[1000] = 0
NOTEBOOK.update(pictures=PICTURES, targets=F.one_hot(LABELS, 10).float())
KEPT = [row for row in range(1797) if row != 1000]
SEEDS = pytest.mark.parametrize("seed", range(3))


def train(batches, seed=0, **options):
    loop = NOTEBOOK["feed"](batches, **options)
    return record.run(loop, seed=seed, epochs=1, dtype=torch.bfloat16)


def first_step_with_sample_1000(seed):
    shuffled = torch.randperm(1797, generator=torch.Generator().manual_seed(seed)).tolist()
    return shuffled.index(1000) // 32


@SEEDS
def test_the_run_fails_where_the_sample_is_and_trains_without_it(seed):
    run = train(NOTEBOOK["order"](seed), seed)
    step = first_step_with_sample_1000(seed)
    assert run.first_bad_step == run.first_bad_grad_step == step < 56
    assert max(run.grad_norm[:step]) < 10 * min(run.grad_norm[:step])
    assert 1000 in NOTEBOOK["batch_of"](seed, step)
    without = train(NOTEBOOK["order"](seed, KEPT), seed)
    assert without.first_bad_step is None and without.accuracy[-1] > 0.5


def test_the_three_failing_batches_share_that_sample_alone():
    steps = [first_step_with_sample_1000(seed) for seed in range(3)]
    batches = [set(NOTEBOOK["batch_of"](seed, step)) for seed, step in enumerate(steps)]
    assert len(set(steps)) == 3 and set.intersection(*batches) == {1000}


@SEEDS
def test_the_validator_stops_at_the_step_names_the_sample_and_keeps_the_weights(seed):
    checked = {"check_batch": NOTEBOOK["check_batch"]}
    run = train(NOTEBOOK["order"](seed), seed, **checked)
    assert run.stopped_at == first_step_with_sample_1000(seed) and run.weights_finite
    assert "samples [1000]" in str(run.error)
    assert train(NOTEBOOK["order"](seed, KEPT), seed, **checked).error is None


def test_bad_inputs_finds_each_kind_and_leaves_the_edges_of_the_range_alone():
    row = torch.tensor([0.0, 0.5, 1.0])
    for value in (float("nan"), float("inf"), -float("inf"), -0.01, 1.01, 16.0):
        x = torch.stack([row, row, row])
        x[1, 2] = value
        assert NOTEBOOK["bad_inputs"](x) == [1]
    assert NOTEBOOK["bad_inputs"](row[None]) == []


def test_a_forgotten_transform_shows_in_the_count():
    assert NOTEBOOK["bad_inputs"](NOTEBOOK["normalise"](PICTURES)) == [1000]
    assert NOTEBOOK["bad_inputs"](PICTURES) == KEPT


def ctc(length):
    frames, letters = torch.zeros(3, 1, 4).log_softmax(-1), torch.tensor([[1, 2, 3, 1, 2]])
    return F.ctc_loss(frames, letters, torch.tensor([3]), torch.tensor([length]))


@pytest.mark.parametrize(
    "bad, good",
    [
        (lambda: torch.log(torch.tensor(0.0) / 32), lambda: torch.log(torch.tensor(1.0) / 32)),
        (
            lambda: F.cross_entropy(torch.zeros(2, 10), torch.tensor([-100, -100])),
            lambda: F.cross_entropy(torch.zeros(2, 10), torch.tensor([-100, 1])),
        ),
        (lambda: ctc(5), lambda: ctc(3)),
    ],
    ids=["box", "ignored", "ctc"],
)
def test_finite_samples_that_become_inf_or_nan_and_their_healthy_neighbours(bad, good):
    assert not bad().isfinite() and good().isfinite()


@SEEDS
def test_only_the_learning_rate_announces_itself_in_the_gradient_norm(seed):
    def order(_, *kept):
        return NOTEBOOK["order"](seed, *kept)

    high, sample = two_linear_runs(NOTEBOOK["linear_run"], order, KEPT)
    growth = [run.grad_norm[run.first_bad_step - 5] / run.grad_norm[10] for run in (high, sample)]
    assert growth[0] > 1500 and growth[1] < 10
    assert max(high.first_bad_step, sample.first_bad_step) < 56
    healthy = NOTEBOOK["linear_run"](NOTEBOOK["order"](seed, KEPT), 0.1)
    assert healthy.first_bad_step is None and healthy.weights_finite

"""What notebook 01 says, with margins, and each cure taken out again."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from nan_lab import data, exercises, loops, record, triggers

SEEDS = 0, 1, 2


@functools.cache
def natural(seed, loop=loops.broken, policy="native"):
    return record.run(loop, policy=policy, device="cpu", seed=seed, epochs=3)


@functools.cache
def frozen_model(seed):
    """The model of step 112 of the incident: no later step changed it."""
    return record.run(loops.broken, triggers.raw_pixels(), seed=seed, epochs=3, device="cpu").model


def gaps(logits):
    return logits.amax(-1) - logits.amin(-1)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_natural_nan_comes_after_about_two_epochs_of_a_good_model(seed):
    run = natural(seed)
    assert round(run.first_bad_step / run.steps_per_epoch) == 2
    assert run.accuracy[1] > 0.88  # the notebook says 0.85
    assert math.isnan(run.loss[run.first_bad_step])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_gradient_is_bad_dozens_of_steps_before_the_loss(seed):
    run = natural(seed)
    assert run.first_bad_step - run.first_bad_grad_step > 36  # the notebook says 24
    assert run.skipped[run.first_bad_grad_step] and math.isfinite(run.loss[run.first_bad_grad_step])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "loop, policy", [(loops.without_clipping, "native"), (loops.broken, "cuda")]
)
def test_the_fused_loss_and_cudas_policy_each_prevent_it(seed, loop, policy):
    run = natural(seed, loop, policy)
    assert run.first_bad_step is None and run.first_bad_grad_step is None
    assert max(run.grad_norm) < 1 / 0.3  # far from anything that overflows


def test_slope_of_the_logarithm_overflows_at_one_in_32():
    """Scale 65536, batch 32: -y / p passes 65504 where the true gradient p - y is below 1."""
    for p, overflows in ((1 / 31, False), (1 / 33, True)):
        slope = 65536 / 32 / torch.tensor(p, dtype=torch.float16)
        assert slope.isinf() == overflows


@pytest.mark.parametrize("seed", SEEDS)
def test_that_slope_is_what_the_gradient_norm_saw(seed):
    """The first bad gradient comes at the first step with a digit below 1 in 32, and p is not 0."""
    smallest = []

    def watched(model, loader, optimizer, scaler, device_type, dtype):
        def look(module, inputs, logits):
            p = torch.softmax(logits.detach().float(), -1)
            smallest.append((p * batches[-1]).sum(-1).min().item())

        batches = []

        def kept():
            for x, y in loader:
                batches.append(y)
                hook = model.register_forward_hook(look)
                yield x, y
                hook.remove()

        yield from loops.broken(model, kept(), optimizer, scaler, device_type, dtype)

    run = record.run(watched, policy="native", device="cpu", seed=seed, epochs=2)
    first = run.first_bad_grad_step
    assert min(smallest[:first]) > 1 / 32 > smallest[first] > 1e-6


@pytest.mark.parametrize("seed", SEEDS)
def test_raw_pixels_pass_the_gap_of_float32_and_right_ones_do_not(seed):
    x, y = data.digits()
    raw, right = frozen_model(seed)(16 * x), frozen_model(seed)(x)
    assert gaps(raw).max() > 1.5 * 1.5 * 104
    assert gaps(right).max() < 104 / 1.5
    right_and_nan = (raw.argmax(-1) == y) & (gaps(raw) > 104)
    assert right_and_nan.float().mean() > 1.5 * 0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_only_the_loss_line_decides(seed):
    raw = triggers.raw_pixels()
    by_hand = record.run(loops.without_fused_loss, raw, seed=seed, epochs=3)
    assert by_hand.stopped_at == 112 and isinstance(by_hand.error, AssertionError)
    fused = record.run(loops.fixed, raw, seed=seed, epochs=3)
    assert fused.first_bad_step is None and fused.error is None and fused.weights_finite


@pytest.mark.parametrize(
    "dtype, exact",
    [(torch.float16, 17.3), (torch.bfloat16, 92.9), (torch.float32, 104.0), (torch.float64, 745.1)],
)
def test_the_gap_of_each_dtype(dtype, exact):
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert round(math.log(2) - math.log(smallest), 1) == exact
    below, above = (
        torch.softmax(torch.tensor([gap, 0], dtype=dtype), -1)[1]
        for gap in (math.ceil(exact) - 1, math.ceil(exact))
    )
    assert below > 0 and above == 0


def by_hand(logits, y):
    shifted = logits - logits.amax(-1, keepdim=True)
    return -(y * (shifted - shifted.exp().sum(-1, keepdim=True).log())).sum(-1).mean()


def textbook(logits, y):
    return -(y * torch.log(torch.softmax(logits, dim=-1))).sum(-1).mean()


def value_and_gradient(loss, logits, y):
    logits = logits.clone().requires_grad_()
    value = loss(logits, y)
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient


@pytest.mark.parametrize("loss", [by_hand, F.cross_entropy])
def test_the_cure_equals_the_float64_reference(loss):
    x, labels = data.digits()
    y = F.one_hot(labels, 10).float()
    logits = frozen_model(0)(16 * x).detach()
    assert gaps(logits).max() < 700  # float64 has room for the textbook's formula
    expected = value_and_gradient(textbook, logits.double(), y.double())
    for value, reference in zip(value_and_gradient(loss, logits, y), expected, strict=True):
        torch.testing.assert_close(value, reference.float(), rtol=1e-5, atol=1e-7)
    assert value_and_gradient(textbook, logits, y)[0].isnan()


def test_nan_to_num_hides_the_loss_and_not_the_gradient():
    logits, y = torch.tensor([20.0, 0.0], dtype=torch.float16), torch.tensor([1.0, 0.0])
    value, gradient = value_and_gradient(lambda z, y: textbook(z, y).nan_to_num(), logits, y)
    assert value == 0 and gradient.isnan().all()
    value, gradient = value_and_gradient(F.cross_entropy, logits, y)
    assert value.isfinite() and gradient.isfinite().all()


def test_an_epsilon_caps_the_loss_and_has_no_gradient():
    logits, y = torch.tensor([50.0, 0.0]), torch.tensor([0.0, 1.0])

    def epsilon(logits, y):
        return -(y * torch.log(torch.softmax(logits, dim=-1) + 1e-8)).sum(-1).mean()

    value, gradient = value_and_gradient(epsilon, logits, y)
    assert value < 19 and gradient.abs().max() < 1e-9
    value, gradient = value_and_gradient(F.cross_entropy, logits, y)
    assert value == 50 and torch.equal(gradient, torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize(
    "answer",
    [
        lambda z, y: -(y * F.logsigmoid(z) + (1 - y) * F.logsigmoid(-z)).mean(),
        lambda z, y: (F.softplus(z) - z * y).mean(),
        lambda z, y: (z.clamp(min=0) - z * y + torch.log1p(torch.exp(-z.abs()))).mean(),
        lambda z, y: (torch.logaddexp(z, torch.zeros_like(z)) - z * y).mean(),
        F.binary_cross_entropy_with_logits,
    ],
)
def test_every_right_way_to_write_the_loss_is_accepted(answer):
    assert exercises.check("stable_bce", answer).outcome == "correct"


def test_a_bisection_is_accepted_too():
    def first_gap(dtype):
        low, high = 0, 1000
        while high - low > 1:
            middle = (low + high) // 2
            zero = torch.softmax(torch.tensor([middle, 0], dtype=dtype), -1)[1] == 0
            low, high = (low, middle) if zero else (middle, high)
        return high

    assert exercises.check("first_gap", first_gap).outcome == "correct"

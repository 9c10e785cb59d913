"""The claims of notebook 04: range, not the loss scale, decides; bfloat16 has its price."""

import pytest
import torch

from nan_lab import data, loops, triggers
from nan_lab.autocast import cuda_autocast_policy
from nan_lab.figures_dtype import number_line
from tests import runs
from tests.notebook_code import definitions

NOTEBOOK = definitions("04")
LARGEST = torch.finfo(torch.float16).max
HALF, BFLOAT = torch.float16, torch.bfloat16


def photon_counts(from_step):
    return triggers.Trigger("photon counts", from_step, None, lambda x, y: (x * 2**20, y))


def train(loop=loops.without_guard, trigger=None, model="classifier", **options):
    return runs.run(loop, trigger, model=NOTEBOOK[model], **options)


@pytest.mark.parametrize("seed", range(3))
def test_float16_fails_at_the_cause_and_bfloat16_does_not(seed):
    float16 = train(trigger=photon_counts(56), seed=seed, epochs=2)
    assert float16.first_bad_step == 56
    assert float16.skipped == [step >= 56 for step in range(112)]
    bfloat16 = train(trigger=photon_counts(56), seed=seed, dtype=BFLOAT, epochs=2)
    assert bfloat16.first_bad_step is None and bfloat16.weights_finite
    assert bfloat16.accuracy[-1] > 0.85


def test_the_counts_pass_float16s_range_in_every_batch_and_the_pixels_never_do():
    brightest = [x.max().item() for x, _ in data.batches(32, torch.Generator().manual_seed(0))]
    assert min(brightest) * 2**20 > 1.5 * LARGEST and max(brightest) < LARGEST / 1.5


@pytest.mark.parametrize("init_scale", [65536.0, 1024.0, 1.0, 2.0**-10])
def test_no_loss_scale_helps(init_scale):
    run = train(trigger=photon_counts(5), init_scale=init_scale, epochs=1)
    assert run.first_bad_step == 5 and all(run.skipped[5:])


@pytest.mark.parametrize(
    "model, seed", [("norm_first", 0), ("with_island", 0), ("with_island", 1), ("with_island", 2)]
)
def test_another_order_and_an_island_stay_finite_in_float16(model, seed):
    run = train(loops.fixed, photon_counts(56), model=model, seed=seed, epochs=2)
    assert run.error is None and not any(run.skipped) and run.accuracy[-1] > 0.85


def test_without_a_cure_the_repaired_loop_stops():
    run = train(loops.fixed, photon_counts(5), epochs=1)
    assert run.stopped_at == 5 and str(run.error) == "step 5: the loss is nan"


def test_the_island_and_bfloat16_return_what_float32_returns():
    torch.manual_seed(0)
    island, plain = NOTEBOOK["with_island"](), NOTEBOOK["classifier"]()
    plain.load_state_dict(island.state_dict())
    images = data.digits()[0][:32] * 2**20
    expected = plain(images)
    for model, dtype, tolerance in ((island, HALF, 5e-3), (plain, BFLOAT, 5e-2)):
        with cuda_autocast_policy(), torch.autocast("cpu", dtype=dtype):
            torch.testing.assert_close(model(images).float(), expected, rtol=0, atol=tolerance)
    with cuda_autocast_policy(), torch.autocast("cpu", dtype=HALF):
        assert not plain(images).isfinite().any()


def test_the_first_linear_makes_the_nan():
    linear, images = NOTEBOOK["classifier"]()[0], data.digits()[0][:32] * 2**20
    with cuda_autocast_policy(), torch.autocast("cpu", dtype=HALF):
        assert linear(images).isnan().any(1).all() and linear(images / 2**20).isfinite().all()


def test_torchs_attention_is_finite_where_the_product_is_inf():
    q = torch.full((1, 4, 64), 64.0, dtype=HALF)
    assert (q @ q.mT).isinf().all()
    assert torch.nn.functional.scaled_dot_product_attention(q, q, q).isfinite().all()


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, torch.float32])
def test_bits_are_those_of_the_number(dtype):
    layout = {HALF: (5, 10), BFLOAT: (8, 7), torch.float32: (8, 23)}
    NOTEBOOK["LAYOUT"] = layout
    exponent_bits, mantissa_bits = layout[dtype]
    for value in (6.5, -0.15625, 1.0, -40000.0 if dtype == HALF else 2.0**100):
        stored = torch.tensor(value, dtype=dtype).item()
        sign, exponent, mantissa = NOTEBOOK["bits"](value, dtype).split()
        fraction = 1 + int(mantissa, 2) / 2**mantissa_bits
        power = int(exponent, 2) - (2 ** (exponent_bits - 1) - 1)
        assert (-1) ** int(sign) * fraction * 2.0**power == stored


@pytest.mark.parametrize("dtype, finite", [(HALF, True), (BFLOAT, False)])
def test_only_float16s_scaler_survives_a_nan_pixel(dtype, finite):
    run = runs.run(loops.without_guard, triggers.nan_pixel(5), dtype=dtype, epochs=1)
    assert run.weights_finite is finite and any(run.skipped) is finite
    guarded = runs.run(loops.fixed, triggers.nan_pixel(5), dtype=dtype, epochs=1)
    assert guarded.stopped_at == 5 and guarded.weights_finite


def test_the_number_line_says_which_type_cannot_hold_a_mark():
    caption = number_line([(2**20, "a"), (1e-8, "b"), (3.0, "c"), (1e-43, "d")]).caption
    assert caption.splitlines()[3:] == [
        "a is inf in float16.",
        "b is 0 in float16.",
        "d is 0 in float16 and bfloat16.",
    ]
    assert number_line().png().startswith(b"\x89PNG")

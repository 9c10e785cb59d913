"""The noise that stands in for another machine, and the incident's verdicts under it."""

import subprocess
import sys

import pytest
import torch

from nan_lab import loops, record, triggers
from tools import machines, noise


def test_it_moves_an_inexact_result_by_at_most_one_ulp():
    torch.manual_seed(0)
    a, b = torch.rand(64, 64), torch.rand(64, 64)
    plain = a @ b
    with noise.UlpNoise(0):
        noisy = a @ b
    ulps = (noisy.view(torch.int32) - plain.view(torch.int32)).unique()
    assert ulps.tolist() == [-1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_it_leaves_exact_and_infinite_results_alone(dtype):
    ones = torch.ones(8, 8, dtype=dtype)
    big = torch.full((8, 8), torch.finfo(dtype).max, dtype=dtype)
    with noise.UlpNoise(0):
        assert (ones @ ones == 8).all() and ones.sum() == 64
        assert (big @ ones).isinf().all()


def test_it_reaches_gradients_and_leaves_the_random_state_alone():
    weight = torch.rand(64, 64, requires_grad=True)
    x = torch.rand(64, 64)
    state = torch.get_rng_state()
    gradients = []
    for seed in (0, 1):
        weight.grad = None
        with noise.UlpNoise(seed):
            torch.sin(x @ weight).sum().backward()
        gradients.append(weight.grad)
    assert not torch.equal(*gradients)
    assert torch.allclose(*gradients, atol=1e-2)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_same_seed_gives_the_same_noise():
    torch.manual_seed(0)
    a = torch.rand(64, 64)
    results = []
    for _ in range(2):
        with noise.UlpNoise(3):
            results.append(a @ a)
    assert torch.equal(*results)


def test_a_kernel_with_the_profile_has_the_noise(tmp_path):
    noise.write_ipython_profile(tmp_path, 0)
    code = "import torch; a = torch.rand(64, 64); print((a @ a != a @ a).any().item())"
    command = [sys.executable, "-m", "IPython", f"--ipython-dir={tmp_path}", "-c", code]
    done = subprocess.run(command, cwd=machines.ROOT, capture_output=True, text=True)
    assert done.stdout.split()[-1] == "True", done.stderr


@pytest.mark.parametrize("seed", [0, 1])
def test_the_incident_under_noise(seed):
    with noise.UlpNoise(seed):
        broken = record.run(loops.broken, triggers.raw_pixels(), epochs=3, device="cpu")
        fixed = record.run(loops.fixed, triggers.raw_pixels(), epochs=3, device="cpu")
    assert broken.verdict() == (
        "The loss is NaN from step 112 to the end; every step is skipped; the weights are finite."
    )
    assert fixed.verdict() == "The loss is finite in all 168 steps; the weights are finite."
    quiet = record.run(loops.broken, triggers.raw_pixels(), epochs=3, device="cpu")
    assert broken.loss[:112] != quiet.loss[:112]  # the noise was there

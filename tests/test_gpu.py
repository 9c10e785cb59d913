"""Asserts that `course.py test --gpu` really uses CUDA; everywhere else there is nothing to see."""

import os

import pytest
import torch

from nan_lab import loops, record

pytestmark = pytest.mark.skipif(
    os.environ.get("NAN_LAB_DEVICE") != "cuda", reason="only under `course.py test --gpu`"
)


def test_a_run_is_on_the_gpu():
    before = torch.cuda.max_memory_allocated()
    history = record.run(loops.fixed, epochs=1)
    assert {p.device.type for p in history.model.parameters()} == {"cuda"}
    assert torch.cuda.max_memory_allocated() > before

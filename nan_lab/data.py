"""The data of the whole series: 1797 handwritten digits, shipped with the package.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits" (test part),
UCI Machine Learning Repository, 1998, doi 10.24432/C50P49, CC BY 4.0.
"""

import gzip
from functools import cache
from pathlib import Path

import torch

PIXELS, CLASSES = 64, 10


@cache
def _table():
    """One row a digit: 64 pixels, integers 0..16, and the class."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        return torch.tensor([[int(value) for value in line.split(",")] for line in file])


def digits():
    """All digits as `(x, y)`: x float32 (1797, 64) with pixels in 0..1, y int64 (1797,), on CPU."""
    table = _table()
    return table[:, :PIXELS] / 16, table[:, PIXELS].clone()


def batches(batch_size, generator):
    """One epoch of shuffled batches: x float32 (B, 64), y one-hot float32 (B, 10), on CPU.

    The last, smaller batch is dropped: 56 batches of 32. `generator` is a CPU torch.Generator, so
    that every device sees the same batches.
    """
    x, y = digits()
    y = torch.nn.functional.one_hot(y, CLASSES).float()
    order = torch.randperm(len(x), generator=generator)
    for chosen in order.split(batch_size):
        if len(chosen) == batch_size:
            yield x[chosen], y[chosen]

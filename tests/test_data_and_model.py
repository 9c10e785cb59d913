"""The digits, their batches and the classifier."""

import torch

from nan_lab import data
from nan_lab.model import classifier


def test_the_digits():
    x, y = data.digits()
    assert (x.shape, x.dtype) == ((1797, 64), torch.float32)
    assert (y.shape, y.dtype) == ((1797,), torch.int64)
    assert (x.min(), x.max()) == (0, 1)
    assert y.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_cannot_be_spoiled_by_a_reader():
    data.digits()[0].zero_()
    data.digits()[1].zero_()
    assert data.digits()[0].max() == 1 and data.digits()[1].max() == 9


def test_one_epoch_is_56_batches_of_one_hot_labels():
    batches = list(data.batches(32, torch.Generator().manual_seed(0)))
    assert len(batches) == 56
    for x, y in batches:
        assert (x.shape, y.shape, y.dtype) == ((32, 64), (32, 10), torch.float32)
        assert torch.equal(y.sum(-1), torch.ones(32))
    again = list(data.batches(32, torch.Generator().manual_seed(0)))
    other = list(data.batches(32, torch.Generator().manual_seed(1)))
    assert torch.equal(batches[7][0], again[7][0]) and not torch.equal(batches[7][0], other[7][0])


def test_each_batch_keeps_a_digit_with_its_label():
    x, y = data.digits()
    labels = {tuple(pixels.tolist()): label.item() for pixels, label in zip(x, y, strict=True)}
    pixels, one_hot = next(data.batches(32, torch.Generator().manual_seed(0)))
    found = [labels[tuple(row.tolist())] for row in pixels]
    assert found == one_hot.argmax(-1).tolist()


def test_the_classifier():
    shapes = {name: tuple(p.shape) for name, p in classifier().named_parameters()}
    assert shapes == {
        "0.weight": (64, 64), "0.bias": (64,), "2.weight": (10, 64), "2.bias": (10,),
    }  # fmt: skip

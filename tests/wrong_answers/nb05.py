"""Typical wrong answers of notebook 05, each with a part of the reason that it must get."""

import torch
import torch.nn.functional as F


def step_for_each(model, micro_batches, optimizer, scaler):
    for x, y in micro_batches:
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()


def without_division(model, micro_batches, optimizer, scaler):
    optimizer.zero_grad()
    for x, y in micro_batches:
        scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()


def zero_grad_in_the_loop(model, micro_batches, optimizer, scaler):
    for x, y in micro_batches:
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y) / len(micro_batches)).backward()
    scaler.step(optimizer)
    scaler.update()


def without_zero_grad(model, micro_batches, optimizer, scaler):
    for x, y in micro_batches:
        scaler.scale(F.cross_entropy(model(x), y) / len(micro_batches)).backward()
    scaler.step(optimizer)
    scaler.update()


def without_update(model, micro_batches, optimizer, scaler):
    optimizer.zero_grad()
    for x, y in micro_batches:
        scaler.scale(F.cross_entropy(model(x), y) / len(micro_batches)).backward()
    scaler.step(optimizer)


def unscale_for_each(model, micro_batches, optimizer, scaler):
    optimizer.zero_grad()
    for x, y in micro_batches:
        scaler.scale(F.cross_entropy(model(x), y) / len(micro_batches)).backward()
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def nan_gradients_hidden(model, micro_batches, optimizer, scaler):
    optimizer.zero_grad()
    for x, y in micro_batches:
        scaler.scale(F.cross_entropy(model(x), y) / len(micro_batches)).backward()
    for parameter in model.parameters():
        torch.nan_to_num_(parameter.grad)
    scaler.step(optimizer)
    scaler.update()


WRONG = {
    "four_scales": [
        ({"A": "floor", "B": "staircase"}, "has the keys"),
        ({"A": "cliff", "B": "staircase", "C": "saw-tooth", "D": "floor"}, "A is no cliff"),
        ({"A": "floor", "B": "saw-tooth", "C": "staircase", "D": "cliff"}, "B is no saw-tooth"),
        ({"A": "floor", "B": "staircase", "C": "healthy", "D": "cliff"}, "'healthy' is none of"),
    ],
    "accumulate": [
        (step_for_each, "took 4 steps"),
        (without_division, "4 times too large"),
        (zero_grad_in_the_loop, "not that of the whole batch"),
        (without_update, "one `update`"),
        (unscale_for_each, "unscale_() has already been called"),
        (nan_gradients_hidden, "let the scaler decide"),
    ],
}

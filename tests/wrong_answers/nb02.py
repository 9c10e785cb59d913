"""Typical wrong answers of notebook 02, each with a part of the reason that it must get."""

import math
from statistics import mean

import torch
from torch.nn.utils import clip_grad_norm_


def largest(grad_norm):
    return max(range(len(grad_norm)), key=grad_norm.__getitem__)


def above_a_hundred(grad_norm):
    steps = (i for i, norm in enumerate(grad_norm) if math.isfinite(norm) and norm > 40)
    return next(steps, -1)


def ten_times_the_step_before(grad_norm):
    for step in range(1, len(grad_norm)):
        if math.isfinite(grad_norm[step]) and grad_norm[step] > 10 * grad_norm[step - 1]:
            return step
    return -1


def ten_times_the_mean(grad_norm):
    seen = []
    for step, norm in enumerate(grad_norm):
        if math.isfinite(norm):
            if seen and norm > 10 * mean(seen):
                return step
            seen.append(norm)
    return -1


def not_finite(grad_norm):
    steps = (i for i, norm in enumerate(grad_norm) if not math.isfinite(norm) or norm > 10)
    return next(steps, -1)


def finish(model, optimizer, scaler):
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()


def clip_before_unscale(losses, model, optimizer, scaler):
    optimizer.zero_grad()
    for loss in losses:
        scaler.scale(loss / len(losses)).backward()
    clip_grad_norm_(model.parameters(), max_norm=1.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def unscale_each_part(losses, model, optimizer, scaler):
    optimizer.zero_grad()
    for loss in losses:
        scaler.scale(loss / len(losses)).backward()
        scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()


def sum_of_the_losses(losses, model, optimizer, scaler):
    optimizer.zero_grad()
    for loss in losses:
        scaler.scale(loss).backward()
    finish(model, optimizer, scaler)


def no_clipping(losses, model, optimizer, scaler):
    optimizer.zero_grad()
    for loss in losses:
        scaler.scale(loss / len(losses)).backward()
    scaler.step(optimizer)
    scaler.update()


def without_zero_grad(losses, model, optimizer, scaler):
    for loss in losses:
        scaler.scale(loss / len(losses)).backward()
    finish(model, optimizer, scaler)


def each_part_clipped(losses, model, optimizer, scaler):
    total = [torch.zeros_like(p) for p in model.parameters()]
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        for part, p in zip(total, model.parameters(), strict=True):
            part += p.grad / len(losses)
    optimizer.zero_grad()
    for part, p in zip(total, model.parameters(), strict=True):
        p.grad = scaler.scale(part)
    scaler.step(optimizer)
    scaler.update()


def nan_part_left_out(losses, model, optimizer, scaler):
    optimizer.zero_grad()
    for loss in losses:
        if torch.isfinite(loss):
            scaler.scale(loss / len(losses)).backward()
    finish(model, optimizer, scaler)


def no_update(losses, model, optimizer, scaler):
    optimizer.zero_grad()
    for loss in losses:
        scaler.scale(loss / len(losses)).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm=1.0)
    scaler.step(optimizer)


WRONG = {
    "culprit": [
        (largest, "the first jump"),
        (not_finite, "neither a jump"),
        (above_a_hundred, "0.05 after ten norms"),
        (ten_times_the_step_before, "next one look large"),
        (ten_times_the_mean, "not the mean"),
    ],
    "accumulated_update": [
        (clip_before_unscale, "hundreds of times too short"),
        (unscale_each_part, "may be called once before each"),
        (sum_of_the_losses, "2 times as long"),
        (no_clipping, "your step has the norm"),
        (without_zero_grad, "left over from the first"),
        (each_part_clipped, "another direction"),
        (nan_part_left_out, "it is another batch"),
        (no_update, "is the scaler ready"),
    ],
}

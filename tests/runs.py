"""Runs that several tests look at, each made once a process."""

from functools import cache

import torch

from nan_lab import record


@cache
def run(loop, trigger=None, **options):
    """`record.run`, on the device that NAN_LAB_DEVICE names."""
    return record.run(loop, trigger, **options)


@cache
def gradient_entry(loop, trigger, step, **options):
    """The largest gradient entry at a step, divided by the loss scale, as the optimizer got it."""
    found = {}

    def watched(model, loader, optimizer, scaler, device_type, dtype):
        for i, loss in enumerate(loop(model, loader, optimizer, scaler, device_type, dtype)):
            if i == step:
                found["entry"] = max(p.grad.abs().max().item() for p in model.parameters())
            yield loss

    run(watched, trigger, **options)
    return found["entry"]


@cache
def logit_gaps(loop, trigger, **options):
    """For each step of a run: the largest gap between two logits of a sample, in float32."""
    gaps = []

    def watched(model, loader, optimizer, scaler, device_type, dtype):
        def keep(x, y):
            with torch.no_grad(), torch.autocast(device_type, enabled=False):
                logits = model(x)
            gaps.append((logits.amax(-1) - logits.amin(-1)).max().item())
            return x, y

        batches = (keep(x, y) for x, y in loader)
        yield from loop(model, batches, optimizer, scaler, device_type, dtype)

    run(watched, trigger, **options)
    return gaps

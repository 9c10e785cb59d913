"""The training loops of the series: the broken one, the fixed one, and one for each missing fix.

Every loop is a generator `loop(model, loader, optimizer, scaler, device_type, dtype)`, called once
a run. `loader` yields x float32 (B, 64) and y one-hot float32 (B, 10) for all epochs. The loop
yields each step's loss after the step, so that whoever drives it can look between two steps.
"""

import inspect

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

from nan_lab.guard import StepGuard


def broken(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    """The question's loop, with one `yield`: it can go NaN for three separate reasons."""
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            logits = model(x)
            loss = -(y * torch.log(torch.softmax(logits, dim=-1))).sum(-1).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield loss


def fixed(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    """The accepted repair: fused loss, clipping of the unscaled gradients, a check on the spot."""
    for step, (x, y) in enumerate(loader):
        assert torch.isfinite(x).all(), f"step {step}: the batch has a NaN or inf"
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        assert torch.isfinite(loss), f"step {step}: the loss is {loss.item()}"
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


def guarded(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    """`fixed` with a StepGuard in the place of the two checks."""

    def forward(batch):
        x, y = batch
        with torch.autocast(device_type, dtype=dtype):
            return F.cross_entropy(model(x), y)

    guard = StepGuard(model, forward, optimizer, scaler)
    for step, batch in enumerate(loader):
        guard.begin(step, batch)
        optimizer.zero_grad()
        loss = forward(batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        grad_norm = clip_grad_norm_(model.parameters(), max_norm=1.0)
        guard.check(loss, grad_norm)
        scaler.step(optimizer)
        scaler.update()
        yield loss


def without_fused_loss(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    """`fixed` with the loss written by hand again."""
    for step, (x, y) in enumerate(loader):
        assert torch.isfinite(x).all(), f"step {step}: the batch has a NaN or inf"
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            logits = model(x)
            loss = -(y * torch.log(torch.softmax(logits, dim=-1))).sum(-1).mean()
        assert torch.isfinite(loss), f"step {step}: the loss is {loss.item()}"
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


def without_clipping(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    """`fixed` without `unscale_` and clipping."""
    for step, (x, y) in enumerate(loader):
        assert torch.isfinite(x).all(), f"step {step}: the batch has a NaN or inf"
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        assert torch.isfinite(loss), f"step {step}: the loss is {loss.item()}"
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield loss


def without_guard(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    """`fixed` without the two checks."""
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


def clip_before_unscale(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    """`without_guard`, but `unscale_` is forgotten: it clips at max_norm / loss scale."""
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


def bfloat16_without_guard(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.bfloat16
):
    """`without_guard` in bfloat16, whatever `dtype` says: no scaler, so nothing skips a step."""
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=torch.bfloat16):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        yield loss


def show_source(function):
    """Display a function's source: highlighted in JupyterLab, plain text elsewhere."""
    from IPython.display import display  # the package works without IPython, but for this

    source = inspect.getsource(function).rstrip()
    data = {"text/markdown": f"```python\n{source}\n```", "text/plain": source}
    display(data, raw=True)

"""Loops for the exam: right in different ways, or wrong in one known way each.

BANK lists (loop, names of the rows that must fail); bonus rows do not count. Every loop is a
generator function as the series' loops are, but for those that are wrong by not being one.
"""

import itertools
import random
import sys
import warnings

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from nan_lab import data, loops

BANK = []


def bank(*rows):
    """Put a loop into BANK with the rows that it must fail."""

    def add(loop):
        BANK.append((loop, set(rows)))
        return loop

    return add


BANK += [
    (loops.fixed, set()),
    (loops.broken, {"loss value", "clipping", "bad input", "overflow"}),
    (loops.without_fused_loss, {"loss value"}),
    (loops.without_clipping, {"clipping"}),
    (loops.without_guard, {"bad input", "overflow"}),
    (loops.clip_before_unscale, {"loss scale", "bad input", "overflow"}),
    (loops.bfloat16_without_guard, {"bad input", "overflow", "non-finite gradient"}),
]


def training(
    loss_of=F.cross_entropy,
    half=None,
    max_norm=1.0,
    clip=None,
    check=True,
    before_backward=None,
    after_backward=None,
    name="step {step}: the loss or the batch is not finite",
):
    """Build a loop like `fixed` with one part exchanged; for faults that lie in that part only."""

    def loop(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            with torch.autocast(device_type, dtype=half or dtype):
                loss = loss_of(model(x), y)
            if check and not (x.isfinite().all() and loss.isfinite()):
                raise FloatingPointError(name.format(step=step, late=step + 1))
            loss_for_backward = before_backward(loss) if before_backward else loss
            scaler.scale(loss_for_backward).backward()
            scaler.unscale_(optimizer)
            if after_backward:
                after_backward(model)
            if clip is None:
                clip_grad_norm_(model.parameters(), max_norm)
            else:
                clip(model)
            scaler.step(optimizer)
            scaler.update()
            yield loss

    return loop


def add(title, rows, **parts):
    loop = training(**parts)
    loop.__name__ = loop.__qualname__ = title
    BANK.append((loop, set(rows)))


# Right in another way.

add("log_softmax_by_labels", (), loss_of=lambda z, y: -(y * z.log_softmax(-1)).sum(-1).mean())
add("log_softmax_nll", (), loss_of=lambda z, y: F.nll_loss(F.log_softmax(z, -1), y.argmax(-1)))
add("logsumexp_by_hand", (), loss_of=lambda z, y: (z.logsumexp(-1) - (y * z).sum(-1)).mean())
add(
    "logsumexp_from_max",
    (),
    loss_of=lambda z, y: (lambda s: ((s.exp().sum(-1)).log() - (y * s).sum(-1)).mean())(
        z.float() - z.float().max(-1, keepdim=True).values.detach()
    ),
)
add("cross_entropy_float32", (), loss_of=lambda z, y: F.cross_entropy(z.float(), y))
add("cross_entropy_float64", (), loss_of=lambda z, y: F.cross_entropy(z.double(), y))
add("class_indices", (), loss_of=lambda z, y: F.cross_entropy(z, y.argmax(-1)))
add("max_norm_a_tenth", (), max_norm=0.1)
add("max_norm_five", (), max_norm=5.0)
add("padded_step_number", (), name="Step {step:06d} of this run has a NaN")


def own_global_norm(model):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()
    for g in gradients:
        g.mul_((2.0 / norm).clamp(max=1.0).to(g.dtype))


add("own_clipping", (), clip=own_global_norm)


@bank()
def bfloat16_guarded(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    """No scaler: the gradient norm is checked, which sees every NaN before the step."""
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast(device_type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            raise RuntimeError(f"gradient norm {norm} at step {step}")
        optimizer.step()
        yield loss.detach()


@bank()
def bfloat16_error_if_nonfinite(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    """PyTorch's own check of the norm, with the step put on to its exception."""
    for step, (x, y) in enumerate(loader):
        with torch.autocast(device_type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        try:
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        except RuntimeError as error:
            raise RuntimeError(f"in step {step}") from error
        optimizer.step()
        yield loss


@bank()
def bfloat16_with_scaler(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            raise ArithmeticError("not finite", step)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


class StepFailed(Exception):
    def __init__(self, step):
        super().__init__("something is not finite")
        self.step = step


@bank()
def custom_exception(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    """The step is an attribute only."""
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            logits = model(x)
            if not logits.isfinite().all():
                raise StepFailed(step)
            loss = F.cross_entropy(logits, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank()
def skips_and_reports(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            warnings.warn(f"step {step} skipped: the loss is {loss.item()}", stacklevel=2)
            continue
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank()
def skips_reports_and_yields(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    """Lets the scaler do the skipping, and says so; it counts by itself."""
    step = -1
    for x, y in loader:
        step += 1
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            warnings.warn(f"bad loss [step={step}]", RuntimeWarning, stacklevel=2)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank()
def warm_up(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    """The learning rate rises from 0 over 20 steps."""
    base = [group["lr"] for group in optimizer.param_groups]
    for step, (x, y) in enumerate(loader):
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * min(1, step / 20)
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"step {step}"
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank()
def threshold_in_scaled_units(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    """Clips scaled gradients at max_norm times the scale, which is the same thing."""
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"step {step}"
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank()
def skips_spikes(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    """A finite gradient that is far too large is left out instead of clipped."""
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"step {step}"
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm) and norm > 20:
            warnings.warn(f"step {step} left out: gradient norm {norm:.0f}", stacklevel=2)
        else:
            scaler.step(optimizer)
        scaler.update()
        yield loss


@bank()
def micro_batches(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    """Each batch in two halves whose gradients add up."""
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        total = 0
        for part in zip(x.chunk(2), y.chunk(2), strict=True):
            with torch.autocast(device_type, dtype=dtype):
                loss = F.cross_entropy(model(part[0]), part[1]) / 2
            assert torch.isfinite(loss), f"step {step}"
            scaler.scale(loss).backward()
            total = total + loss.detach()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield total


@bank()
def nan_gradients_reported(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    """Tells a NaN gradient from an overflow: with a scale of 1 the overflow is gone."""
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"step {step}"
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            with torch.autocast(device_type, dtype=dtype):
                again = F.cross_entropy(model(x), y)
            found = torch.autograd.grad(again, list(model.parameters()))
            if not all(g.isfinite().all() for g in found):
                raise FloatingPointError(f"step {step}: the gradient is not finite")
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank()
def yields_under_autocast(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    """The yield stands inside the autocast block; the state is the loop's own."""
    for step, (x, y) in enumerate(loader):
        with torch.autocast(device_type, dtype=dtype):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            assert torch.isfinite(loss), f"step {step}"
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            yield loss


@bank("step order")
def one_autocast_block_around_the_loop(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    """Autocast keeps its half copies of the weights until the block ends, stale ones."""
    with torch.autocast(device_type, dtype=dtype):
        yield from loops.fixed(model, loader, optimizer, scaler, device_type, dtype)


@bank()
def prints_a_lot(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for loss in loops.fixed(model, loader, optimizer, scaler, device_type, dtype):
        print("the loss is", loss, "\n" * 50)
        sys.stderr.write("still here\n")
        yield loss


# Masks over the loss.

add(
    "epsilon_1e-8",
    {"loss value"},
    loss_of=lambda z, y: -(y * (z.softmax(-1) + 1e-8).log()).sum(-1).mean(),
)
add(
    "epsilon_1e-38",
    {"loss value"},
    loss_of=lambda z, y: -(y * (z.softmax(-1) + 1e-38).log()).sum(-1).mean(),
)
add(
    "clamped_probability",
    {"loss value"},
    loss_of=lambda z, y: -(y * z.softmax(-1).clamp(min=1e-7).log()).sum(-1).mean(),
)
add("clamped_logits", {"loss value"}, loss_of=lambda z, y: F.cross_entropy(z.clamp(-30, 30), y))
add(
    "label_smoothing",
    {"loss value"},
    loss_of=lambda z, y: F.cross_entropy(z, y, label_smoothing=0.01),
)
add("sum_reduction", {"loss value"}, loss_of=lambda z, y: F.cross_entropy(z, y, reduction="sum"))
add("mean_over_classes", {"loss value"}, loss_of=lambda z, y: -(y * z.log_softmax(-1)).mean())
add(
    "nan_to_num_loss",
    {"loss value", "overflow", "bad input"},
    loss_of=lambda z, y: torch.nan_to_num(-(y * z.softmax(-1).log()).sum(-1).mean()),
    check=False,
)
add(
    "logsumexp_overflows",
    {"loss value"},
    loss_of=lambda z, y: (z.float().exp().sum(-1).log() - (y * z).sum(-1)).mean(),
)
add(
    "mean_squared_error",
    {"loss value"},
    loss_of=lambda z, y: F.mse_loss(z.softmax(-1).float(), y),
)
add(
    "log_in_half_on_cpu",  # right under CUDA's policy up to a gap of 104
    {"loss value"},
    loss_of=lambda z, y: -torch.where(y > 0, y * z.softmax(-1).log(), 0.0).sum(-1).mean(),
)


class Halved(torch.autograd.Function):
    """The loss itself forward, half of its gradient backward."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


add("half_the_gradient", {"loss gradient"}, before_backward=Halved.apply)
add("twice_the_gradient", {"loss gradient"}, before_backward=lambda loss: 2 * loss)
add(
    "gradient_of_another_loss",
    {"loss gradient"},
    loss_of=lambda z, y: (lambda other: other + (F.cross_entropy(z, y) - other).detach())(
        F.cross_entropy(z, y, label_smoothing=0.3)
    ),
)

# Clipping.

add("no_clipping", {"clipping"}, clip=lambda model: None)
add("clip_by_value", {"clipping"}, clip=lambda m: clip_grad_value_(m.parameters(), 0.1))
add(
    "clip_each_parameter",
    {"clipping"},
    clip=lambda m: [clip_grad_norm_(p, 1.0) for p in m.parameters()],
)
add("clip_first_layer_only", {"clipping"}, clip=lambda m: clip_grad_norm_(m[0].parameters(), 1.0))
add(
    "clip_by_largest_entry",
    {"clipping"},
    clip=lambda m: clip_grad_norm_(m.parameters(), 1.0, norm_type=float("inf")),
)
add("max_norm_fifty", {"clipping"}, max_norm=50.0)


def always_one(model):
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.div_(norm + 1e-12)


add("always_rescaled", {"clipping"}, clip=always_one)


def zero_over_zero(model):
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.mul_(norm.clamp(max=1.0) / norm)


add("zero_over_zero", {"clipping"}, clip=zero_over_zero)


@bank("clipping")
def clip_after_step(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"step {step}"
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        clip_grad_norm_(model.parameters(), 1.0)
        yield loss


# The scaler and the order of the steps.


@bank("loss scale")
def clips_scaled_gradients(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"step {step}"
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank("loss scale", "non-finite gradient")
def float16_without_scaler(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"step {step}"
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss


@bank("loss scale")
def own_scaler(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    mine = torch.amp.GradScaler(device_type)
    yield from loops.fixed(model, loader, optimizer, mine, device_type, dtype)


@bank("loss scale", "non-finite gradient")
def never_unscaled(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"step {step}"
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss


@bank("step order")
def no_zero_grad(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"step {step}"
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank("step order")
def zero_grad_after_backward(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for step, (x, y) in enumerate(loader):
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"step {step}"
        scaler.scale(loss).backward()
        optimizer.zero_grad(set_to_none=False)
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank("step order")
def steps_twice(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"step {step}"
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        if torch.isfinite(norm):
            optimizer.step()
        scaler.update()
        yield loss


@bank("step order")
def update_before_step(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"step {step}"
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.update()
        scaler.step(optimizer)
        yield loss


@bank("step order")
def no_update(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"step {step}"
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        yield loss


# The guard.

add("without_step_number", {"bad input", "overflow"}, name="the loss is not finite")
add("names_another_step", {"bad input", "overflow"}, name="step {late}: not finite")
add("no_guard", {"bad input", "overflow"}, check=False)


@bank("bad input", "overflow")
def checks_one_step_late(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    last = torch.zeros(())
    for step, (x, y) in enumerate(loader):
        assert torch.isfinite(last), f"step {step - 1} had the loss {last}"
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        last = loss.detach()
        yield loss


@bank("overflow")
def checks_input_only(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        assert torch.isfinite(x).all(), f"step {step}: the batch"
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank("bad input", "overflow")
def checks_for_nan_only(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    """Cleans inf out of x, so that nothing shows it; of the loss only NaN is checked."""
    for step, (x, y) in enumerate(loader):
        x = torch.where(x.isinf(), 0.0, x)
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        assert not torch.isnan(loss), f"step {step}"
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank("bad input", "overflow")
def cleans_input_and_logits(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x.nan_to_num(0, 1, 0)).nan_to_num(0), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank("bad input", "overflow")
def skips_in_silence(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            print("skipped")
            continue
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank("bad input", "overflow", "non-finite gradient")
def guard_after_the_step(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    """bfloat16, and the loss is looked at when the weights are NaN already."""
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not torch.isfinite(loss):
            raise RuntimeError(f"step {step}")
        yield loss


@bank("non-finite gradient")
def bfloat16_checks_loss_only(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"step {step}"
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss


@bank("non-finite gradient")
def bfloat16_skips_bad_gradients_in_silence(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"step {step}"
        loss.backward()
        if torch.isfinite(clip_grad_norm_(model.parameters(), 1.0)):
            optimizer.step()
        yield loss


@bank("non-finite gradient", "step order")
def gradients_cleaned_before_unscale(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    """nan_to_num before the scaler looks: it never skips, so its scale never falls."""
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"step {step}"
        scaler.scale(loss).backward()
        for p in model.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank("false alarm")
def raises_on_normal_skips(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"step {step}"
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        assert torch.isfinite(norm), f"step {step}: gradient norm {norm}"
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank("false alarm")
def warns_of_normal_skips(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"step {step}"
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            warnings.warn(f"step {step}: gradient norm {norm}", stacklevel=2)
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank("false alarm")
def alarm_at_a_healthy_loss(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for step, loss in enumerate(loops.fixed(model, loader, optimizer, scaler, device_type, dtype)):
        if loss > 2:
            raise RuntimeError(f"step {step}: the loss is too high")
        yield loss


@bank("bad input", "overflow")
def swallows_exceptions(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        loss = torch.zeros(())
        try:
            optimizer.zero_grad()
            with torch.autocast(device_type, dtype=dtype):
                loss = F.cross_entropy(model(x), y)
            assert torch.isfinite(loss), f"step {step}"
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        except Exception:
            pass
        yield loss


# Precision, model, learning.


@bank("mixed precision")
def forward_in_float32(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        logits = model(x)
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(logits, y)
        assert torch.isfinite(loss), f"step {step}"
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank("mixed precision")
def half_parameters(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    model.bfloat16()
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
        assert torch.isfinite(loss), f"step {step}"
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        yield loss


@bank("architecture")
def adds_a_norm(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    model.append(torch.nn.LayerNorm(10))
    yield from loops.fixed(model, loader, optimizer, scaler, device_type, dtype)


@bank("architecture")
def replaces_a_layer(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    old = model[0]
    model[0] = torch.nn.Linear(old.in_features, old.out_features, bias=False)
    yield from loops.fixed(model, loader, optimizer, scaler, device_type, dtype)


@bank("learning")
def learning_rate_dies(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, loss in enumerate(loops.fixed(model, loader, optimizer, scaler, device_type, dtype)):
        if step > 3:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.5
        yield loss


# Global state.


@bank("global state")
def sets_a_seed(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    torch.manual_seed(0)
    random.seed(0)
    yield from loops.fixed(model, loader, optimizer, scaler, device_type, dtype)


@bank("global state")
def sets_the_default_dtype(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    torch.set_default_dtype(torch.float64)
    yield from loops.fixed(model, loader, optimizer, scaler, device_type, dtype)


@bank("global state")
def leaves_gradients_off(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    yield from loops.fixed(model, loader, optimizer, scaler, device_type, dtype)
    torch.set_grad_enabled(False)


@bank("global state")
def silences_warnings(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    warnings.simplefilter("ignore")
    yield from loops.fixed(model, loader, optimizer, scaler, device_type, dtype)


# What cannot be graded.


@bank("contract")
def raises_at_once(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    raise OSError("no such file")
    yield


@bank("contract")
def exits(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    yield next(loops.fixed(model, loader, optimizer, scaler, device_type, dtype))
    sys.exit("done")


@bank("contract")
def no_generator(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for _ in loops.fixed(model, loader, optimizer, scaler, device_type, dtype):
        pass


@bank("contract")
def returns_a_list(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    return [torch.zeros(())]


@bank("contract")
def wrong_signature(model, loader):
    yield torch.zeros(())


@bank("contract")
def yields_nothing(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for _ in loops.fixed(model, loader, optimizer, scaler, device_type, dtype):
        pass
    return
    yield


@bank("contract")
def yields_floats(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for loss in loops.fixed(model, loader, optimizer, scaler, device_type, dtype):
        yield loss.item()


@bank("contract")
def yields_without_end(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    yield from loops.fixed(model, loader, optimizer, scaler, device_type, dtype)
    while True:
        yield torch.zeros(())


@bank("contract")
def asks_without_end(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    while True:
        yield from loops.fixed(model, loader, optimizer, scaler, device_type, dtype)


@bank("contract")
def stops_early(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    some = itertools.islice(loader, 100)
    yield from loops.fixed(model, some, optimizer, scaler, device_type, dtype)


@bank("contract")
def other_data(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    other = data.batches(32, torch.Generator().manual_seed(5))
    pairs = (next(other, (x, y)) for x, y in loader)
    yield from loops.fixed(model, pairs, optimizer, scaler, device_type, dtype)


@bank("contract")
def every_batch_drawn_first(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    yield from loops.fixed(model, list(loader), optimizer, scaler, device_type, dtype)

"""Loops for the exam by someone who has not read the grader, only the list of its rows.

BANK lists (loop, names of the rows that must fail); bonus rows do not count. The comment above a
wrong loop says which mistake it makes and why that row must fail.
"""

import copy
import itertools
import math
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from nan_lab.guard import StepGuard

BANK = []
VALUE, GRADIENT, CLIPPING, SCALE = "loss value", "loss gradient", "clipping", "loss scale"
ORDER, INPUT, OVERFLOW, FALSE_ALARM = "step order", "bad input", "overflow", "false alarm"
NON_FINITE, MIXED, GLOBAL = "non-finite gradient", "mixed precision", "global state"


def bank(*rows):
    """Put a loop into BANK with the rows that it must fail."""

    def add(loop):
        BANK.append((loop, set(rows)))
        return loop

    return add


# The parts that most loops share, so that what a loop does in its own way is easy to see.


def stop_at(step, loss):
    if not torch.isfinite(loss):
        raise FloatingPointError(f"step {step}: the loss is {loss.item()}")


def clip_to_one(model):
    return clip_grad_norm_(model.parameters(), 1.0)


def finish(model, optimizer, scaler, loss, clip=clip_to_one):
    """Everything after the loss, in the right order."""
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip(model)
    scaler.step(optimizer)
    scaler.update()


def assemble(loss_of=F.cross_entropy, guard=stop_at, clip=clip_to_one):
    """A loop that is right but for the part that is given."""

    def loop(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            with torch.autocast(device_type, dtype=dtype):
                loss = loss_of(model(x), y)
            guard(step, loss)
            finish(model, optimizer, scaler, loss, clip)
            yield loss

    return loop


def with_loss(*rows):
    """Decorate a function (logits, y) -> loss; the loop gets its name."""
    return _with("loss_of", rows)


def with_clip(*rows):
    """Decorate a function (model) that clips the unscaled gradients."""
    return _with("clip", rows)


def with_guard(*rows):
    """Decorate a function (step, loss) that looks at the loss before backward."""
    return _with("guard", rows)


def _with(part, rows):
    def add(function):
        loop = assemble(**{part: function})
        loop.__name__ = function.__name__
        BANK.append((loop, set(rows)))
        return function

    return add


# Right: other ways to the loss ------------------------------------------------------------------


@with_loss()
def log_softmax_times_y(logits, y):
    return -(y * F.log_softmax(logits.float(), -1)).sum(-1).mean()


@with_loss()
def log_softmax_inside_autocast(logits, y):
    return -(y * F.log_softmax(logits, dim=-1)).sum() / y.shape[0]


@with_loss()
def logsumexp_by_hand(logits, y):
    z = logits.float()
    top = z.max(-1, keepdim=True).values
    return (
        top + (z - top).exp().sum(-1, keepdim=True).log() - (y * z).sum(-1, keepdim=True)
    ).mean()


@with_loss()
def logsumexp_of_torch(logits, y):
    z = logits.float()
    return (torch.logsumexp(z, -1) - (y * z).sum(-1)).mean().reshape(1)


@with_loss()
def kl_divergence(logits, y):
    # Equal for one-hot y, whose entropy is 0; only the bonus row "soft labels" sees a difference.
    return F.kl_div(F.log_softmax(logits.float(), -1), y, reduction="batchmean")


@with_loss()
def nll_of_the_class(logits, y):
    # Wrong for soft labels, which is the bonus row; right for what the contract promises.
    return F.nll_loss(F.log_softmax(logits.float(), -1), y.argmax(-1))


@with_loss()
def sum_over_batch_size(logits, y):
    return F.cross_entropy(logits, y, reduction="sum") / len(y)


@with_loss()
def differences_to_the_target(logits, y):
    # sum_k exp(z_k - z_target), in a form that cannot overflow.
    z = logits.double()
    target = (z * y).sum(-1, keepdim=True)
    return torch.logsumexp(z - target, -1).mean()


@bank()
def float32_island(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast(device_type, dtype=dtype):
            logits = model(x)
            with torch.autocast(device_type, enabled=False):
                loss = F.cross_entropy(logits.float(), y.float())
        stop_at(step, loss)
        finish(model, optimizer, scaler, loss)
        yield loss.detach().clone()


# Right: other ways to clip ----------------------------------------------------------------------


@with_clip()
def clip_to_a_tenth(model):
    clip_grad_norm_(model.parameters(), max_norm=0.1)


@with_clip()
def clip_to_five(model):
    clip_grad_norm_(model.parameters(), max_norm=5.0, foreach=True)


@with_clip()
def clip_by_hand(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.sqrt(sum((g.double() ** 2).sum() for g in grads))
    if norm > 1.0:
        for g in grads:
            g.mul_(1.0 / norm.float())


@with_clip()
def clip_with_foreach(model):
    grads = [p.grad for p in model.parameters()]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_mul_(grads, (2.0 / (norm + 1e-6)).clamp(max=1.0))


@with_clip()
def clip_flat_only_if_finite(model):
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    norm = flat.norm()
    if torch.isfinite(norm):
        offset, flat = 0, flat * min(1.0, 1.0 / (norm.item() + 1e-12))
        for p in model.parameters():
            p.grad = flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()


# Right: other guards ----------------------------------------------------------------------------


class TrainingDiverged(Exception):
    def __init__(self, step):
        super().__init__("the training has diverged")
        self.step = step


@with_guard()
def own_exception_with_attribute(step, loss):
    if not math.isfinite(loss.item()):
        raise TrainingDiverged(step)


@with_guard()
def text_with_other_numbers(step, loss):
    if loss.isnan() or loss.isinf():
        raise ValueError(f"epoch {step // 56 + 1}, batch {step % 56 + 1} (step {step}): {loss}")


@bank()
def warn_and_skip(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            warnings.warn(f"step {step} skipped, the loss is {loss.item()}", stacklevel=2)
            continue
        finish(model, optimizer, scaler, loss)
        yield loss


@bank()
def warn_and_let_the_scaler_skip(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            warnings.warn(f"not finite at step {step}", RuntimeWarning, stacklevel=2)
        finish(model, optimizer, scaler, loss)
        yield loss


@bank()
def guard_after_the_scaler_skipped(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    # Late, but in float16 the scaler has skipped the step: the weights are clean when it reports.
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        finish(model, optimizer, scaler, loss)
        stop_at(step, loss)
        yield loss


@bank()
def guard_on_gradient_norm(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    # A norm that is not finite is the scaler's business, unless the logits are not finite either.
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        if not norm.isfinite() and not logits.isfinite().all():
            raise RuntimeError(f"gradient norm {norm} at step {step}")
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank()
def guard_with_module_hooks(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    current = {}

    def look(module, args, output):
        if not output.isfinite().all():
            raise ArithmeticError(f"step {current['step']}: {module} gave inf or NaN")

    hooks = [m.register_forward_hook(look) for m in model.modules()]
    try:
        for step, (x, y) in enumerate(loader):
            current["step"] = step
            optimizer.zero_grad()
            with torch.autocast(device_type, dtype=dtype):
                loss = F.cross_entropy(model(x), y)
            finish(model, optimizer, scaler, loss)
            yield loss
    finally:
        for hook in hooks:
            hook.remove()


@bank()
def step_guard(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    def forward(batch):
        with torch.autocast(device_type, dtype=dtype):
            return F.cross_entropy(model(batch[0]), batch[1])

    guard = StepGuard(model, forward, optimizer, scaler)
    for step, batch in enumerate(loader):
        guard.begin(step, batch)
        optimizer.zero_grad()
        loss = forward(batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        guard.check(loss, clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank()
def iterator_and_counter(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    model.train()
    optimizer.zero_grad()
    batches, accumulate = iter(loader), 1
    for step in itertools.count():
        batch = next(batches, None)
        if batch is None:
            return
        with torch.autocast(device_type=device_type, dtype=dtype, enabled=True):
            logits = model(batch[0])
        if not torch.isfinite(logits).all():
            raise OverflowError(f"logits of step {step}")
        loss = F.cross_entropy(logits.float(), batch[1]) / accumulate
        finish(model, optimizer, scaler, loss)
        optimizer.zero_grad()
        yield loss


@bank()
def bfloat16_clip_raises(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        try:
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        except RuntimeError as error:
            raise RuntimeError(f"step {step}: {error}") from error
        optimizer.step()
        yield loss


@bank()
def bfloat16_warn_and_skip(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        if loss.isfinite() and norm.isfinite():
            optimizer.step()
        else:
            warnings.warn(f"step {step}: loss {loss}, gradient norm {norm}", stacklevel=2)
        yield loss


@bank()
def default_autocast_dtype(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    # autocast without a dtype is bfloat16 on a CPU; the scaler does no harm there.
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        finish(model, optimizer, scaler, loss)
        yield loss


@bank()
def prints_a_lot(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale()}\n", logits)
        stop_at(step, loss)
        finish(model, optimizer, scaler, loss)
        yield loss


@bank()
def steps_by_hand_if_finite(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    # What scaler.step does, written out: unscale_ has recorded the overflow for update.
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
        scaler.update()
        yield loss


@bank()
def warm_up(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10))
    for loss in assemble()(model, loader, optimizer, scaler, device_type, dtype):
        rate.step()
        yield loss


@bank()
def measures_accuracy(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    # A second forward pass, in float32, that trains nothing.
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        finish(model, optimizer, scaler, loss)
        with torch.no_grad():
            print((model.eval()(x).argmax(-1) == y.argmax(-1)).float().mean())
        model.train()
        yield loss


# Wrong: the loss --------------------------------------------------------------------------------


# eps caps the loss at -log(1e-8) = 18.4: wrong from a gap of 20 on.
@with_loss(VALUE)
def epsilon_in_log(logits, y):
    return -(y * torch.log(torch.softmax(logits.float(), -1) + 1e-8)).sum(-1).mean()


# The same cap by clamp, and no gradient below it.
@with_loss(VALUE)
def clamped_probabilities(logits, y):
    return -(y * torch.softmax(logits.float(), -1).clamp(1e-7, 1 - 1e-7).log()).sum(-1).mean()


# Shifting by the maximum saves exp, not log(0): NaN at a gap of 110.
@with_loss(VALUE)
def stable_softmax_then_log(logits, y):
    e = torch.exp(logits.float() - logits.float().max(-1, keepdim=True).values)
    return -(y * torch.log(e / e.sum(-1, keepdim=True))).sum(-1).mean()


# Where p is 0 the term is dropped: a wrong prediction at a gap of 300 costs nothing. `p > 0` is
# False for NaN, too, so the guard sees a loss of 0 after a bad input or an overflow.
@with_loss(VALUE, INPUT, OVERFLOW)
def zero_where_p_is_zero(logits, y):
    p = torch.softmax(logits.float(), -1)
    return -(y * torch.where(p > 0, p.clamp_min(1e-45).log(), torch.zeros_like(p))).sum(-1).mean()


# Softmax twice: the loss is between 1.46 and 2.46 whatever the logits are.
@with_loss(VALUE)
def softmax_twice(logits, y):
    return F.cross_entropy(torch.softmax(logits.float(), -1), y)


@with_loss(VALUE)  # Another target, so another loss.
def label_smoothing(logits, y):
    return F.cross_entropy(logits.float(), y, label_smoothing=0.1)


@with_loss(VALUE)  # B times too large.
def summed_loss(logits, y):
    return F.cross_entropy(logits, y, reduction="sum")


@with_loss(VALUE)  # Gaps of 110 and 300 cannot be expressed; a NaN stays NaN and is reported.
def clamped_logits(logits, y):
    return F.cross_entropy(logits.float().clamp(-30, 30), y)


@with_loss(VALUE)  # A loss of 110 or 300 reads 50.
def clamped_loss(logits, y):
    return F.cross_entropy(logits.float(), y).clamp(max=50.0)


@with_loss(VALUE)  # Ten binary losses are not one softmax.
def binary_cross_entropy(logits, y):
    return F.binary_cross_entropy_with_logits(logits.float(), y)


@with_loss(VALUE)  # Focal loss: hard examples count for more.
def focal_loss(logits, y):
    loss = F.cross_entropy(logits.float(), y, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


@with_loss(GRADIENT)  # The value is right; the gradient is -y / B.
def detached_logsumexp(logits, y):
    return (torch.logsumexp(logits.float(), -1).detach() - (y * logits.float()).sum(-1)).mean()


# The fused loss is right, but a NaN becomes 0 before the guard sees it: nothing is reported.
@with_loss(INPUT, OVERFLOW)
def nan_to_num_on_loss(logits, y):
    return torch.nan_to_num(F.cross_entropy(logits.float(), y))


# Yields the right loss and trains on a smoothed one.
@bank(GRADIENT)
def yields_another_loss(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            smoothed = F.cross_entropy(logits, y, label_smoothing=0.1)
        stop_at(step, loss)
        finish(model, optimizer, scaler, smoothed)
        yield loss


# The value is right; the temperature of 2 halves the gradient.
@bank(GRADIENT)
def hidden_temperature(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        stop_at(step, loss)
        finish(model, optimizer, scaler, F.cross_entropy(logits.float() / 2, y))
        yield loss


# Wrong: clipping --------------------------------------------------------------------------------


@with_clip(CLIPPING)
def no_clipping(model):
    pass


@with_clip(CLIPPING)  # Nothing is ever clipped.
def max_norm_of_a_thousand(model):
    clip_grad_norm_(model.parameters(), 1000.0)


@with_clip(CLIPPING)  # Changes the direction; the norm of 4810 entries can still be 69.
def clip_by_value(model):
    clip_grad_value_(model.parameters(), 1.0)


@with_clip(CLIPPING)  # Each parameter by itself: not the global norm, another direction.
def clip_each_parameter(model):
    for p in model.parameters():
        clip_grad_norm_([p], 1.0)


@with_clip(CLIPPING)  # The first layer goes unclipped.
def clip_last_layer_only(model):
    clip_grad_norm_(model[-1].parameters(), 1.0)


@with_clip(CLIPPING)  # The largest entry, not the norm.
def clip_by_largest_entry(model):
    clip_grad_norm_(model.parameters(), 1.0, norm_type=math.inf)


@with_clip(CLIPPING)  # Every gradient gets norm 1, the small ones too.
def always_normalised(model):
    grads = [p.grad for p in model.parameters()]
    norm = torch.stack([g.norm() for g in grads]).norm()
    for g in grads:
        g.div_(norm + 1e-6)


@with_clip(CLIPPING)  # Ordinary gradients are cut, too.
def max_norm_of_a_hundredth(model):
    clip_grad_norm_(model.parameters(), 0.01)


@bank(CLIPPING)  # The spike is thrown away without a word, not clipped.
def skips_large_norms(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), math.inf)
        if norm < 10 or not norm.isfinite():
            scaler.step(optimizer)
        scaler.update()
        yield loss


# A wrong prediction at a gap of 20 or more is left out without a word: no loss, no step.
@bank(VALUE)
def drops_large_losses(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        if loss > 5:
            continue
        finish(model, optimizer, scaler, loss)
        yield loss


@bank(CLIPPING)  # Clips what the optimizer has already used.
def clip_after_step(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.update()
        yield loss


# Wrong: the loss scale and the order ------------------------------------------------------------


@bank(SCALE)  # The real threshold is max_norm / loss scale, so the update depends on the scale.
def clip_without_unscale(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank(SCALE)  # The same mistake with both calls in place, in the wrong order.
def clip_then_unscale(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank(SCALE)  # float16 without any scaling: small gradients are 0. The guards are in order.
def float16_without_scaler(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        if not (loss.isfinite() and norm.isfinite()):
            raise FloatingPointError(f"step {step}: loss {loss}, gradient norm {norm}")
        optimizer.step()
        yield loss


# unscale_ is there, but the optimizer is stepped past the scaler: nothing skips an overflow.
@bank(NON_FINITE)
def optimizer_step(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scaler.update()
        yield loss


@bank(ORDER)  # The scaler refuses the second unscale_.
def no_update(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        yield loss


@bank(ORDER)  # The step unscales once more; the scaler refuses the next step's unscale_.
def update_before_step(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.update()
        scaler.step(optimizer)
        yield loss


@bank(ORDER)  # The scaler refuses unscale_ after step.
def unscale_after_step(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.update()
        yield loss


@bank(ORDER)  # Gradients of all batches pile up.
def no_zero_grad(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        finish(model, optimizer, scaler, loss)
        yield loss


@bank(ORDER)  # Nothing left to step on: the weights never move.
def zero_grad_before_step(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for step, (x, y) in enumerate(loader):
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.zero_grad(set_to_none=False)
        scaler.step(optimizer)
        scaler.update()
        yield loss


@bank(ORDER)  # Three batches of four move nothing.
def accumulates_four(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        scaler.scale(loss / 4).backward()
        if step % 4 == 3:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        yield loss


# Zeros in the place of inf before unscale_: the scaler never sees an overflow, never lowers its
# scale, and steps on what is left of the gradient, under a NaN gradient as well.
@bank(ORDER, NON_FINITE)
def nan_to_num_on_gradients(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        scaler.scale(loss).backward()
        for p in model.parameters():
            torch.nan_to_num_(p.grad, nan=0.0, posinf=0.0, neginf=0.0)
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss


# Wrong: the guard -------------------------------------------------------------------------------


@with_guard(INPUT, OVERFLOW)
def no_guard(step, loss):
    pass


@with_guard(INPUT, OVERFLOW)  # A number that is one too high names a healthy batch.
def counts_from_one(step, loss):
    assert torch.isfinite(loss), f"step {step + 1}: the loss is {loss.item()}"


@with_guard(INPUT, OVERFLOW)  # It knows that, not when.
def no_number(step, loss):
    assert torch.isfinite(loss), "the loss is not finite"


@with_guard(INPUT, OVERFLOW)  # Printed, not reported: nobody can catch it.
def prints_only(step, loss):
    if not torch.isfinite(loss):
        print(f"step {step}: the loss is {loss.item()}")


@with_guard(INPUT, OVERFLOW)  # Looks at one step of a hundred.
def looks_now_and_then(step, loss):
    if step % 100 == 99:
        stop_at(step, loss)


@with_guard(INPUT, OVERFLOW)  # Against false alarms, the first steps go unguarded.
def no_guard_at_first(step, loss):
    if step > 10:
        stop_at(step, loss)


@with_guard(INPUT, OVERFLOW)  # From the second epoch on it names a step of the first.
def step_within_epoch(step, loss):
    assert torch.isfinite(loss), f"step {step % 56}: the loss is {loss.item()}"


@with_guard(OVERFLOW)  # An overflow of the target's logit to -inf makes the loss inf, not NaN.
def isnan_only(step, loss):
    assert not torch.isnan(loss), f"step {step}: the loss is NaN"


@with_guard(INPUT, OVERFLOW)  # The reports are made and thrown away.
def caught_at_once(step, loss):
    try:
        stop_at(step, loss)
    except FloatingPointError:
        pass


@bank(INPUT, OVERFLOW)  # Skips without a word.
def silent_continue(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        if torch.isnan(loss) or torch.isinf(loss):
            continue
        finish(model, optimizer, scaler, loss)
        yield loss


@bank(INPUT, OVERFLOW)  # Ends the training without a word.
def silent_return(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            return
        finish(model, optimizer, scaler, loss)
        yield loss


@bank(INPUT, OVERFLOW)  # The bare except swallows the report, and GeneratorExit with it.
def bare_except(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        try:
            optimizer.zero_grad()
            with torch.autocast(device_type, dtype=dtype):
                loss = F.cross_entropy(model(x), y)
            stop_at(step, loss)
            finish(model, optimizer, scaler, loss)
            yield loss
        except:  # noqa: E722
            continue


@bank(INPUT, OVERFLOW)  # Looks at the last loss when the next batch is in hand.
def one_step_late(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    last = None
    for step, (x, y) in enumerate(loader):
        if last is not None:
            stop_at(step - 1, last)
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        finish(model, optimizer, scaler, loss)
        last = loss.detach()
        yield loss


@bank(INPUT, OVERFLOW)  # Puts the old weights back, silently.
def silent_rollback(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for x, y in loader:
        saved = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        finish(model, optimizer, scaler, loss)
        if not torch.isfinite(loss):
            model.load_state_dict(saved)
        yield loss


@bank(OVERFLOW)  # x is finite when the forward pass overflows.
def guards_input_only(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        assert torch.isfinite(x).all(), f"step {step}"
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        finish(model, optimizer, scaler, loss)
        yield loss


@bank(INPUT)  # A NaN pixel becomes 0, unseen; an overflow is reported.
def nan_to_num_on_x(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        x = torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        finish(model, optimizer, scaler, loss)
        yield loss


@bank(INPUT, OVERFLOW)  # inf and 2**20 become 1, unseen.
def clamps_x(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    batches = ((x.clamp(0, 1), y) for x, y in loader)
    yield from assemble()(model, batches, optimizer, scaler, device_type, dtype)


@bank(INPUT)  # Throws the bad rows away, unseen; an overflow is reported.
def drops_bad_rows(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        good = torch.isfinite(x).all(-1)
        x, y = x[good], y[good]
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        finish(model, optimizer, scaler, loss)
        yield loss


# Batches with large values are left out: the one that overflows goes unreported.
@bank(OVERFLOW)
def drops_large_batches(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        assert torch.isfinite(x).all(), f"step {step}: the batch has a NaN or inf"
        if x.abs().max() > 1000:
            continue
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        finish(model, optimizer, scaler, loss)
        yield loss


@bank(NON_FINITE)  # bfloat16 has no scaler that skips; a NaN gradient under a good loss gets in.
def bfloat16_guards_loss_only(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss


@bank(NON_FINITE)  # As above, and the NaN gradient is made a 0 without a word.
def bfloat16_nan_to_num(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        loss.backward()
        for p in model.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss


@bank(INPUT, OVERFLOW, NON_FINITE)  # Reports at the right step, but the weights are NaN by then.
def bfloat16_guard_after_step(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        stop_at(step, loss)
        stop_at(step, norm)
        yield loss


@bank(FALSE_ALARM)  # Takes each lowering of the scale for a failure.
def alarm_on_scaler_skip(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        before = scaler.get_scale()
        finish(model, optimizer, scaler, loss)
        if scaler.get_scale() < before:
            raise RuntimeError(f"step {step} was skipped")
        yield loss


@bank(FALSE_ALARM)  # As above, as a warning.
def warning_on_scaler_skip(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        before = scaler.get_scale()
        finish(model, optimizer, scaler, loss)
        if scaler.get_scale() < before:
            warnings.warn(f"step {step}: gradient overflow, skipped", stacklevel=2)
        yield loss


@with_clip(FALSE_ALARM)  # Raises wherever the scaler would have skipped.
def error_if_nonfinite(model):
    clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


# Wrong: precision, model, contract, global state ------------------------------------------------


@bank(MIXED)
def no_autocast(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        finish(model, optimizer, scaler, loss)
        yield loss


@bank(MIXED)  # Only the loss is under autocast: the forward pass is float32.
def autocast_for_the_loss_only(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        logits = model(x)
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(logits, y)
        stop_at(step, loss)
        finish(model, optimizer, scaler, loss)
        yield loss


@bank(MIXED)  # The parameters are float16.
def half_model(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    model.half()
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.half()).float(), y)
        stop_at(step, loss)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss


@bank("architecture")  # Tanh keeps the activations small: another network.
def tanh_in_place_of_relu(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    model[1] = nn.Tanh()
    yield from assemble()(model, loader, optimizer, scaler, device_type, dtype)


@bank("contract")  # Trains a copy; the model that was given is never used.
def trains_a_copy(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    yield from assemble()(model, loader, optimizer, scaler, device_type, dtype)


@bank("learning")  # Nothing fails, since nothing is learnt.
def tiny_learning_rate(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for group in optimizer.param_groups:
        group["lr"] = 1e-6
    yield from assemble()(model, loader, optimizer, scaler, device_type, dtype)


@bank("learning")  # The same, less far.
def low_learning_rate(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for group in optimizer.param_groups:
        group["lr"] /= 100
    yield from assemble()(model, loader, optimizer, scaler, device_type, dtype)


@bank("contract")  # Draws every batch and trains on the first.
def first_batch_only(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    first = next(loader)
    batches = itertools.chain([first], (first for _ in loader))
    yield from assemble()(model, batches, optimizer, scaler, device_type, dtype)


@bank("contract")
def yields_floats(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    for loss in assemble()(model, loader, optimizer, scaler, device_type, dtype):
        yield loss.item()


@bank("contract")
def never_ends(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    while True:
        yield from assemble()(model, loader, optimizer, scaler, device_type, dtype)
        yield torch.zeros(())


@bank("contract")
def returns_a_list(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    return list(assemble()(model, loader, optimizer, scaler, device_type, dtype))


@bank("contract")
def raises_at_once(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    raise NotImplementedError("to do")
    yield


@bank("contract")
def stops_after_one_batch(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for loss in assemble()(model, loader, optimizer, scaler, device_type, dtype):
        yield loss
        break


@bank("contract")  # backward of the second step has no graph.
def gradients_switched_off(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        stop_at(step, loss)
        finish(model, optimizer, scaler, loss)
        torch.set_grad_enabled(False)
        yield loss


@bank(GLOBAL)
def gradients_off_at_the_end(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    yield from assemble()(model, loader, optimizer, scaler, device_type, dtype)
    torch.set_grad_enabled(False)


@bank(GLOBAL)
def sets_default_dtype(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    torch.set_default_dtype(torch.float64)
    yield from assemble()(model, loader, optimizer, scaler, device_type, dtype)


@bank(GLOBAL)
def seeds_torch(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    torch.manual_seed(0)
    yield from assemble()(model, loader, optimizer, scaler, device_type, dtype)


@bank(GLOBAL)
def silences_warnings(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    warnings.filterwarnings("ignore")
    yield from assemble()(model, loader, optimizer, scaler, device_type, dtype)

"""Drives a loop step by step and records, from outside, what a person would watch."""

import contextlib
import inspect
import math
import os
import warnings
from dataclasses import dataclass, field

import torch

from nan_lab import data
from nan_lab.autocast import cuda_autocast_policy
from nan_lab.model import classifier

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass
class History:
    """What a run looked like; the lists have one entry for each step whose batch was drawn.

    loss: as the loop yielded it; nan where the step yielded none.
    grad_norm: global norm as backward left it, divided by the loss scale, before clipping.
    applied_norm: global norm of the gradients that the optimizer got; 0 where it got none.
    scale: the loss scale in force in the step, before its `update`; 1 where no scaler is used.
    skipped: whether `optimizer.step` did not run for this step.
    accuracy: share of all digits (right pixels) that the model gets right, after each epoch.
    """

    name: str
    dtype: torch.dtype
    cause_step: int | None
    steps_per_epoch: int
    loss: list = field(default_factory=list)
    grad_norm: list = field(default_factory=list)
    applied_norm: list = field(default_factory=list)
    scale: list = field(default_factory=list)
    skipped: list = field(default_factory=list)
    accuracy: list = field(default_factory=list)
    yielded: list = field(default_factory=list, repr=False)
    had_gradient: list = field(default_factory=list, repr=False)
    weights_finite: bool = True
    stopped_at: int | None = None
    error: Exception | None = None
    model: torch.nn.Module | None = field(default=None, repr=False)

    @property
    def first_bad_step(self):
        """First step whose yielded loss is not finite, or None."""
        return _first_not_finite(self.loss, self.yielded)

    @property
    def first_bad_grad_step(self):
        """First step whose gradient norm is not finite, or None. A healthy scaler has some."""
        return _first_not_finite(self.grad_norm, self.had_gradient)

    def verdict(self):
        """One sentence on how the run ended, the same on every device."""
        weights = "the weights are finite" if self.weights_finite else "the weights are NaN or inf"
        if self.error is not None:
            reason = f"{type(self.error).__name__}: {self.error}".splitlines()[0]
            return f"Stopped at step {self.stopped_at} by {reason}; {weights}."
        first = self.first_bad_step
        if first is None:
            return f"The loss is finite in all {len(self.loss)} steps; {weights}."
        kind = "NaN" if math.isnan(self.loss[first]) else "inf"
        if any(math.isfinite(loss) for loss in self.loss[first:]):
            end = "finite again" if math.isfinite(self.loss[-1]) else "not finite at the end"
            return f"The loss is {kind} at step {first}, later {end}; {weights}."
        skipped = set(self.skipped[first:])
        steps = {(True,): "every", (False,): "no"}.get(tuple(skipped), "not every")
        return (
            f"The loss is {kind} from step {first} to the end; {steps} step is skipped; {weights}."
        )


def _first_not_finite(values, counts):
    """Index of the first value that counts and is NaN or inf, or None."""
    pairs = enumerate(zip(values, counts, strict=True))
    return next((i for i, (value, on) in pairs if on and not math.isfinite(value)), None)


def default_device():
    """The device of the series: NAN_LAB_DEVICE = auto (CUDA where there is one), cpu or cuda."""
    wish = os.environ.get("NAN_LAB_DEVICE", "auto")
    if wish not in ("auto", "cpu", "cuda"):
        raise ValueError(f"NAN_LAB_DEVICE must be auto, cpu or cuda, got {wish!r}")
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    return _checked_device(wish)


def run(
    loop,
    trigger=None,
    *,
    model=None,
    optimizer=None,
    lr=0.03,
    momentum=0.9,
    epochs=4,
    batch_size=32,
    seed=0,
    dtype=torch.float16,
    device=None,
    policy="cuda",
    init_scale=65536.0,
    growth_interval=2000,
):
    """Train the classifier on the digits with `loop` and return the `History`.

    trigger: a `triggers.Trigger`, or anything with `cause_step` and `apply(step, x, y)` that
        depends on its arguments alone: it is tried on one batch before the run.
    model, optimizer: factories `model()` and `optimizer(parameters)`, where the series' classifier
        or SGD(lr, momentum) is not meant.
    lr: a float, or a function of the step.
    dtype: float16 (with a loss scaler), bfloat16 or float32 (autocast off).
    device: "cpu" or "cuda"; None asks NAN_LAB_DEVICE.
    policy: "cuda" runs on CPU, too, in float32 what CUDA autocast runs in float32; "native" leaves
        the device's own rule.

    Raises ValueError or TypeError, before the first step, for arguments of the wrong kind, and
    TypeError for a loop that yields anything but a loss. What the loop itself raises ends the run
    and is kept in `History.error`. The caller's random state is left as it was.
    """
    device = default_device() if device is None else _checked_device(device)
    _check_arguments(loop, trigger, dtype, policy, epochs, batch_size)
    name = getattr(loop, "__name__", type(loop).__name__)

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        torch.manual_seed(seed)
        if policy == "cuda":
            stack.enter_context(cuda_autocast_policy())
        if dtype == torch.float32:
            # float32 means "autocast off" here; torch would say so in a warning at every step.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "In .* autocast, but the target dtype")

        net = (model or classifier)().to(device)
        rate = lr if callable(lr) else lambda step: lr
        if optimizer is None:
            opt = torch.optim.SGD(net.parameters(), lr=rate(0), momentum=momentum)
        else:
            opt = optimizer(net.parameters())
        half = dtype == torch.float16
        scaler = _WatchedScaler(
            device.type, init_scale, growth_interval=growth_interval, enabled=half
        )
        cause_step = None if trigger is None else trigger.cause_step
        history = History(name, dtype, cause_step, len(data.digits()[0]) // batch_size, model=net)
        watch = stack.enter_context(_Watch(history, net, opt, scaler))
        started = False

        def loader():
            if not started:
                raise TypeError(f"a loop must be a generator (use `yield loss`), {name} is not one")
            generator = torch.Generator().manual_seed(seed)
            for _ in range(epochs):
                for x, y in data.batches(batch_size, generator):
                    watch.end_step()
                    step = watch.begin_step()
                    if callable(lr):
                        for group in opt.param_groups:
                            group["lr"] = lr(step)
                    if trigger is not None:
                        x, y = trigger.apply(step, x, y)
                    yield x.to(device), y.to(device)
                watch.end_step()
                history.accuracy.append(_accuracy(net, device))

        steps = loop(net, loader(), opt, scaler, device.type, dtype)
        if not inspect.isgenerator(steps):
            raise TypeError(f"a loop must be a generator (use `yield loss`), {name} is not one")
        started = True
        _drive(steps, watch, history)
        history.weights_finite = all(bool(p.isfinite().all()) for p in net.parameters())
    return history


def _drive(steps, watch, history):
    """Run the loop to its end, or to the exception that it raises."""
    while True:
        try:
            loss = next(steps)
        except StopIteration:
            break
        except Exception as error:
            watch.end_step()
            history.error, history.stopped_at = error, len(history.loss) - 1
            break
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            given = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise TypeError(f"a loop must yield a loss tensor with one element, got {given}")
        watch.loss = loss.detach()
    watch.end_step()


class _WatchedScaler(torch.amp.GradScaler):
    """A GradScaler that remembers whether the loop used it in this step."""

    used = False

    def scale(self, outputs):
        self.used = True
        return super().scale(outputs)

    def reading(self, device):
        """The loss scale as a tensor on the device; `get_scale()` would read it back."""
        return super().scale(torch.ones((), device=device))


class _Watch:
    """Fills a History from hooks on the parameters and the optimizer; one host read a step."""

    def __init__(self, history, model, optimizer, scaler):
        self.history, self.optimizer, self.scaler = history, optimizer, scaler
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.is_open = False

    def __enter__(self):
        hooks = [p.register_post_accumulate_grad_hook(self._backward_done) for p in self.parameters]
        self.hooks = [*hooks, self.optimizer.register_step_pre_hook(self._update_begins)]
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def _backward_done(self, parameter):
        self.grad_norms[parameter] = _norm(parameter.grad)

    def _update_begins(self, *_):
        self.stepped = True
        self.applied_norms = [_norm(p.grad) for p in self.parameters if p.grad is not None]

    def begin_step(self):
        """Called when a batch is drawn; returns the step's number."""
        self.is_open, self.stepped, self.scaler.used = True, False, False
        self.loss, self.grad_norms, self.applied_norms = None, {}, []
        self.scale = self.scaler.reading(self.parameters[0].device)
        return len(self.history.loss)

    def end_step(self):
        """Called when the next batch is drawn, or the epoch or the run ends."""
        if not self.is_open:
            return
        self.is_open = False
        nothing = torch.full((), math.nan, device=self.scale.device)
        # In the order of `applied_norms`, not of the hooks: equal gradients have equal norms.
        grad_norms = [self.grad_norms[p] for p in self.parameters if p in self.grad_norms]
        readings = [
            nothing if self.loss is None else self.loss.reshape(()),
            torch.stack(grad_norms).norm() if grad_norms else nothing,
            torch.stack(self.applied_norms).norm() if self.applied_norms else nothing,
            self.scale,
        ]
        loss, grad_norm, applied_norm, scale = torch.stack([r.double() for r in readings]).tolist()
        if self.grad_norms and not self.scaler.used:
            scale = 1.0  # the loop has a scaler and ignores it
        history = self.history
        history.loss.append(loss)
        history.grad_norm.append(grad_norm / scale if scale else grad_norm)
        history.applied_norm.append(applied_norm if self.stepped else 0.0)
        history.scale.append(scale)
        history.skipped.append(not self.stepped)
        history.yielded.append(self.loss is not None)
        history.had_gradient.append(bool(self.grad_norms))


def _norm(gradient):
    # float64: the norm of finite float32 gradients can itself be inf.
    return torch.linalg.vector_norm(gradient, dtype=torch.float64)


@torch.no_grad()
def _accuracy(model, device):
    x, y = (tensor.to(device) for tensor in data.digits())
    training = model.training
    model.eval()
    with torch.autocast(device.type, enabled=False):
        right = (model(x).argmax(-1) == y).float().mean().item()
    model.train(training)
    return right


def _checked_device(device):
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {str(device)!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but torch sees no CUDA device; use cpu")
    return device


def _check_batch(x, y, batch_size):
    wanted = (batch_size, data.PIXELS), (batch_size, data.CLASSES)
    if (tuple(x.shape), tuple(y.shape)) != wanted:
        raise ValueError(
            f"a batch must have the shapes {wanted[0]} and {wanted[1]}, "
            f"got {tuple(x.shape)} and {tuple(y.shape)}"
        )


def _check_arguments(loop, trigger, dtype, policy, epochs, batch_size):
    if not callable(loop):
        raise TypeError(f"loop must be a generator function, got {loop!r}")
    if trigger is not None and not (hasattr(trigger, "cause_step") and hasattr(trigger, "apply")):
        raise TypeError(f"trigger must have `cause_step` and `apply(step, x, y)`, got {trigger!r}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be float16, bfloat16 or float32, got {dtype}")
    if policy not in ("cuda", "native"):
        raise ValueError(f'policy must be "cuda" or "native", got {policy!r}')
    if not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"epochs must be an integer of 1 or more, got {epochs!r}")
    most = len(data.digits()[0])
    if not isinstance(batch_size, int) or not 1 <= batch_size <= most:
        raise ValueError(f"batch_size must be an integer from 1 to {most}, got {batch_size!r}")
    if trigger is not None:
        # On a first batch, so that a wrong shape is found before the run.
        batch = next(data.batches(batch_size, torch.Generator().manual_seed(0)))
        _check_batch(*trigger.apply(trigger.cause_step, *batch), batch_size)

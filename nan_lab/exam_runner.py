"""Runs a stranger's loop for the exam: in its own global state, on the clock, seen from outside."""

import contextlib
import inspect
import re
import traceback
import warnings
from dataclasses import dataclass, field

import torch

from nan_lab import exam_containment as containment
from nan_lab.autocast import cuda_autocast_policy
from nan_lab.exam_containment import STATE, Clock, TimeUp, contained, read_state, write_state

DRAWS_AFTER_END = 1000  # so often an exhausted loader may be asked again
SEED = 20_011_201  # not one that a person would set, so that a set seed shows


@dataclass
class Step:
    """What one batch did. Tensors are detached; gradients are of the scaled loss."""

    x: torch.Tensor
    y: torch.Tensor
    before: torch.Tensor  # all parameters, float64 (n,)
    forwards: list = field(default_factory=list)  # [input, logits, gradient or None] a call
    half: list = field(default_factory=list)  # one a Linear call: half precision under autocast?
    after: torch.Tensor | None = None
    loss: float | None = None
    lr: float | None = None
    moves: int = 0  # calls of optimizer.step
    scale: float = 1.0
    calls: list = field(default_factory=list)  # the scaler's methods, in the order of the calls
    warned: list = field(default_factory=list)

    @property
    def with_gradient(self):
        """Inputs, logits and gradient of this batch: one forward pass, or micro-batches of it."""
        calls = [call for call in self.forwards if call[2] is not None]
        if not calls:
            return None
        if sum(len(call[0]) for call in calls) != len(self.x):
            calls = calls[-1:]
        return [torch.cat([call[i].double() for call in calls]) for i in range(3)]

    @property
    def used_scaler(self):
        return "scale" in self.calls

    @property
    def finite(self):
        return bool(self.after.isfinite().all())


@dataclass
class Run:
    """A loop's run in one situation."""

    model: torch.nn.Module
    steps: list = field(default_factory=list)
    yields: int = 0
    error: BaseException | None = None
    problem: str = ""  # why the driver stopped the loop, one sentence
    ended: bool = False
    same_model: bool = True
    float32: bool = True  # the parameters, at every forward pass and at the end
    changed: set = field(default_factory=set)  # global state that the loop left changed

    @property
    def last(self):
        return len(self.steps) - 1

    @property
    def used_scaler(self):
        """Whether it ever scaled a loss with the scaler that it was given."""
        return any(step.used_scaler for step in self.steps)

    @property
    def said(self):
        """The exception as one line."""
        text = (str(self.error).strip() or "no text").splitlines()[0]
        return f"{type(self.error).__name__}: {text[:120].rstrip('.')}."

    def from_scaler(self):
        """Whether the exception comes out of GradScaler: its methods complain about their order."""
        frames = traceback.extract_tb(self.error.__traceback__)
        return bool(frames) and frames[-1].filename.endswith("grad_scaler.py")

    def reports(self, step):
        """Whether this step was named while it was in hand, by an exception or a warning."""
        if step > self.last:
            return False
        warned = any(_names(text, step) for text in self.steps[step].warned)
        return warned or (step == self.last and self.error is not None and self.error_names(step))

    def error_names(self, step):
        values = [self.error, *vars(self.error).values(), *getattr(self.error, "__notes__", ())]
        return any(
            _names(str(value), step) or _is(value, step) or _is(getattr(value, "step", None), step)
            for value in values
        )


def _is(value, step):
    return not isinstance(value, bool) and isinstance(value, (int, float)) and value == step


def _names(text, step):
    """Whether the number stands in the text by itself, and not as a part of 0.13 or 1e-13."""
    return bool(re.search(rf"((?<![\w.+-])|(?<=_)|(?<=step))0*{step}(?!\w|\.\d)", text))


def signature(model):
    """What must stay: the modules, the names and shapes of all parameters and buffers."""
    modules = [(name, type(module)) for name, module in model.named_modules()]
    parameters = [(name, p.shape, p.requires_grad) for name, p in model.named_parameters()]
    return modules, parameters, [(name, value.shape) for name, value in model.state_dict().items()]


def is_float32(model):
    return all(p.dtype == torch.float32 for p in model.parameters())


def flat(model):
    """All parameters as one float64 vector (n,)."""
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


class _Scaler(torch.amp.GradScaler):
    """A GradScaler that notes which of its methods are called."""

    step_record = None

    def _note(self, name):
        if self.step_record is not None:
            self.step_record.calls.append(name)

    def scale(self, outputs):
        self._note("scale")
        return super().scale(outputs)

    def unscale_(self, optimizer):
        self._note("unscale_")
        return super().unscale_(optimizer)

    def step(self, optimizer, *args, **kwargs):
        self._note("step")
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale=None):
        self._note("update")
        return super().update(new_scale)


class _Loader:
    """The loader: an iterator that opens and closes the steps."""

    def __init__(self, batches, run, open_step, clock):
        self.batches, self.run, self.open_step, self.clock = iter(batches), run, open_step, clock
        self.started, self.asked = False, 0

    def __iter__(self):
        return self

    def __next__(self):
        if not self.started:
            raise TypeError("a loop must be a generator (use `yield loss`)")
        batch = next(self.batches, None)
        self.open_step(batch)
        if batch is None:
            self.asked += 1
            if self.asked > DRAWS_AFTER_END:
                self.run.problem = "It goes on asking for batches after the loader has ended."
                raise TimeUp
            raise StopIteration
        self.clock.tick()  # not above: a loop may ask for more without end
        return batch[0].clone(), batch[1].clone()


def drive(loop, model, batches, *, lr, momentum=0.0, scale=1024.0, policy="cuda", fault=None):
    """Run `loop` on a model and a list of batches (x, y), float16 and a scaler; return the `Run`.

    fault: `(step, gradient, logits)`: at this step the gradient of the first module's output is
        `gradient(it)`, and the last module's output `logits(it)` where that is not None.
    """
    run = Run(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    scaler = _Scaler("cpu", init_scale=scale, enabled=True)
    watch, built = _Watch(run, optimizer, scaler, fault), signature(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contained())
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        if policy == "cuda":
            stack.enter_context(cuda_autocast_policy())
        stack.enter_context(watch)
        watch.caught = caught
        torch.manual_seed(SEED)
        state, filters = read_state(), warnings.filters[:]
        clock = Clock()
        try:
            clock.start()
            loader = _Loader(batches, run, watch.open_step, clock)
            inside = _drive(loop, (model, loader, optimizer, scaler, "cpu", torch.float16), watch)
        except TimeUp:  # it arrived after the loop had ended
            inside = state
        finally:
            clock.stop()
        if clock.fired and not run.problem:
            run.problem = (
                f"It neither drew a batch nor yielded a loss for {containment.PATIENCE} seconds."
            )
        run.same_model = signature(model) == built
        run.float32 &= is_float32(model)
        run.changed = {name for name in STATE if inside[name] != state[name]}
        if torch.initial_seed() != SEED:
            run.changed.add("the seed")
        if warnings.filters != filters:
            run.changed.add("the warning filters")
    return run


def _drive(loop, arguments, watch):
    """Drive the loop to its end, an exception, or a breach of the contract; return its state."""
    run, loader, outside = watch.run, arguments[1], read_state()
    steps, inside = None, outside
    try:
        steps = loop(*arguments)
        if not inspect.isgenerator(steps):
            run.problem = "It is no generator: a loop has to `yield loss` after each step."
            return read_state()
        loader.started = True
        while not run.problem:
            write_state(inside)
            try:
                loss = next(steps)
            finally:
                inside = read_state()
                write_state(outside)
            loader.clock.tick()
            run.problem = watch.take(loss)
    except StopIteration:
        run.ended = True
    except KeyboardInterrupt:
        raise
    except TimeUp:
        run.problem = run.problem or "It did not end."
    except BaseException as error:  # SystemExit, too, is only the loop's
        run.error = error
    watch.close_step()
    if steps is not None:
        write_state(inside)
        with contextlib.suppress(Exception, TimeUp, SystemExit):
            steps.close()
        inside = read_state()
    write_state(outside)
    return inside


class _Watch:
    """Hooks on the model's first and last module, on its Linear modules and on the optimizer."""

    def __init__(self, run, optimizer, scaler, fault):
        self.run, self.optimizer, self.scaler, self.fault = run, optimizer, scaler, fault
        self.step, self.caught, self.calls = None, [], []

    def __enter__(self):
        children = list(self.run.model.children())
        linear = [module for module in children if isinstance(module, torch.nn.Linear)]
        self.hooks = [
            children[0].register_forward_hook(self._first),
            children[-1].register_forward_hook(self._spoil),
            children[-1].register_forward_hook(self._last),
            *(module.register_forward_hook(self._precision) for module in linear),
            self.optimizer.register_step_pre_hook(self._moved),
        ]
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def _first(self, module, inputs, output):
        self.input = inputs[0].detach().clone()
        if self.fault and self.run.last == self.fault[0] and output.requires_grad:
            output.register_hook(self.fault[1])

    def _spoil(self, module, inputs, output):
        if self.fault and self.fault[2] and self.run.last == self.fault[0]:
            return self.fault[2](output)

    def _last(self, module, inputs, output):
        if self.step is None:
            return
        call = [self.input, output.detach().clone(), None]
        self.step.forwards.append(call)
        if output.requires_grad:
            output.register_hook(lambda gradient: call.__setitem__(2, gradient.detach().clone()))

    def _precision(self, module, inputs, output):
        if self.step is not None:
            self.run.float32 &= is_float32(self.run.model)
            half = output.dtype in (torch.float16, torch.bfloat16)
            self.step.half.append(half and torch.is_autocast_enabled("cpu"))

    def _moved(self, optimizer, *_):
        if self.step is not None:
            self.step.moves += 1
            self.step.lr = float(optimizer.param_groups[0]["lr"])

    def open_step(self, batch):
        """Called when the loop asks for a batch; None when there is none left."""
        self.close_step()
        if batch is not None:
            scale = self.scaler.get_scale()
            self.step = Step(*batch, before=flat(self.run.model), scale=scale)
            self.scaler.step_record = self.step
            self.run.steps.append(self.step)

    def close_step(self):
        step, self.step, self.scaler.step_record = self.step, None, None
        if step is not None:
            step.after = flat(self.run.model)
            step.warned = [str(warning.message) for warning in self.caught]
        self.caught.clear()

    def take(self, loss):
        """Note a yielded loss; return what is wrong with it, or nothing."""
        run = self.run
        run.yields += 1
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            given = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else (f"a {type(loss).__name__}")
            )
            return f"It yields {given}, where the loss tensor with one element was expected."
        if self.step is None or self.step.loss is not None:
            return f"It yields more often than it draws batches ({len(run.steps)} drawn)."
        self.step.loss = float(loss.detach())
        return ""

"""Find the operation that made the first inf or NaN of a failed step, and prove it.

The step is run again under a mode that sees every ATen operation. Each *birth* (finite operands,
non-finite result) is a suspect. The proof is an intervention: put finite numbers in the place of
the suspect's result, run again, and see whether the symptom is gone.
"""

import contextlib
import dataclasses
import functools
import linecache
import math
import os
import random
import sys
import sysconfig
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

MAX_REPLAYS = 60
# To these operations -inf is a value like any other: it is how a mask is written.
TAKES_MASKS = {"_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "amax", "max"}
# These hand on an inf that somebody put there on purpose.
PLUMBING = set(
    """add sub mul div neg copy _to_copy clone where masked_fill cat stack index gather scatter
    index_put triu tril constant_pad_nd repeat sum mean lift_fresh""".split()
)
ADVICE = {
    "input": "clean or drop this batch: look at where the data is loaded and normalised",
    "optimizer": "keep float32 weights or raise eps, lower the learning rate, clip the gradients",
    "norm": "each gradient is finite, their squares are not: lower the loss or the learning rate",
    "scaler": "no loss scale cures this: use bfloat16, or float32 where the gradient is so large",
    "log": "its argument is 0 or below: log_softmax, cross_entropy, or an argument kept above 0",
    "div": "its denominator is 0: an eps that its dtype can hold, or leave out the empty case",
    "sqrt": "below 0 it has no value, at 0 no finite slope: add an eps inside the root",
    "rsqrt": "its argument is 0: add an eps that its dtype can hold (float16: 1e-4, not 1e-8)",
    "exp": "its argument is too large: subtract the maximum first, or clamp it",
    "pow": "too large, or 0 to a power below 1, whose slope is inf: bound the base",
    "_softmax": "a row is masked everywhere: leave one entry open, or drop the row",
    "nll_loss_forward": "every label is ignored: skip the batch, or sum / max(count, 1)",
    "_to_copy": "the value does not fit the smaller dtype: scale it down, or use bfloat16",
    "mm": "the product does not fit its dtype: scale the operands first, or use bfloat16",
    "std": "a spread needs two values: leave it out for a single one",
}
ADVICE |= {name: ADVICE["mm"] for name in ("addmm", "bmm", "baddbmm", "convolution")}
ADVICE |= {name: ADVICE["std"] for name in ("var", "var_mean", "std_mean")}


@dataclasses.dataclass
class Report:
    """What failed, where, and how sure that is. `str(report)` is the message for a person."""

    step: int | None = None
    phase: str = ""
    op: str = ""
    node: str = ""
    module: str = ""
    line: str = ""
    kind: str = ""
    confirmed: bool = False
    replays: int = 0
    source: str = ""  # the text of that line
    tensor: str = ""  # the batch tensor, parameter or buffer that was bad from the start
    operands: list = dataclasses.field(default_factory=list)
    first_bad: str = ""
    also_needed: list = dataclasses.field(default_factory=list)
    note: str = ""
    ranks: list = dataclasses.field(default_factory=list)
    loss: float = math.nan
    grad_norm: float = math.nan
    scale: float | None = None
    last: list = dataclasses.field(default_factory=list)  # (loss, gradient norm)

    def __str__(self):
        step = "" if self.step is None else f"step {self.step}, "
        scale = "" if self.scale is None else f", loss scale {self.scale:g}"
        sure = "confirmed" if self.confirmed else "NOT confirmed"
        why = {True: "with finite numbers in its place the step is finite", False: self.note}
        by = f", run by {self.node}" if self.node else ""
        forward_op = self.node.removesuffix("Backward0").lower()
        keys = (self.phase, self.op.rstrip("_") if not self.node else forward_op, forward_op)
        advice = next((ADVICE[key] for key in keys if key in ADVICE), "")
        rows = {
            f"{step}phase {self.phase or 'unknown'}": self.kind,
            "loss": f"{self.loss:g}, gradient norm {self.grad_norm:g}{scale}",
            "tensor": self.tensor,
            "operation": self.op and f"{self.op}{by}",
            "module": self.module,
            "line": f"{self.line}  {self.source}".strip(),
            **{f"operand {i}": text for i, text in enumerate(self.operands)},
            "first bad": self.first_bad,
            "also needed": "; ".join(self.also_needed),
            sure: f"{why[self.confirmed]} ({self.replays} replays)",
            "note": self.note * self.confirmed,
            "ranks": ", ".join(map(str, self.ranks)),
            "last steps": ", ".join(f"({loss:.4g}, {norm:.4g})" for loss, norm in self.last),
            "next": advice,
        }
        return "\n  ".join(f"{key}: {text}" for key, text in rows.items() if text)


class Site(NamedTuple):
    """A place where an operation runs. Births with an equal site are one suspect."""

    phase: str
    op: str
    node: str
    module: str
    file: str
    number: int

    @property
    def line(self):
        """`file.py:12`; in a notebook, whose cells live in files of no lasting name, `cell 7:3`."""
        if not self.file:
            return ""
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        cells = getattr(getattr(shell, "compile", None), "_filename_map", {})
        name = f"cell {cells[self.file]}" if self.file in cells else os.path.basename(self.file)
        return f"{name}:{self.number}"

    def __str__(self):
        return f"{self.phase} {self.op} {self.node} at {self.line}".replace("  ", " ")


@dataclasses.dataclass
class Birth:
    site: Site
    tier: int  # 1: out of finite numbers, 2: NaN out of inf, 3: inf out of inf, 4: written there
    call: int
    kind: str
    operands: list
    first_bad: str


# ------------------------------------------------------------------------ tensors and their state


def tensors_of(value, name="batch"):
    """Yield (name, tensor) for every tensor in sequences, mappings, dataclasses and objects."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensors_of(item, f"{name}[{i}]")
    elif isinstance(value, Mapping):
        for key in value:
            yield from tensors_of(value[key], f"{name}[{key!r}]")
    elif hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)):
        for key, item in vars(value).items():
            yield from tensors_of(item, f"{name}.{key}")


def non_finite(tensor):
    """The mask of inf and NaN, or None where there is none."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return None
    try:
        bad = ~torch.isfinite(tensor)
        return bad if bad.any() else None
    except (RuntimeError, NotImplementedError):  # sparse and 8-bit tensors do not say
        return None


def _kind(values):
    return "+".join(["inf"] * bool(values.isinf().any()) + ["nan"] * bool(values.isnan().any()))


def describe(tensor):
    """One line: dtype, shape, range of the finite entries, and how many are 0, NaN, inf."""
    text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    finite = tensor[tensor.isfinite()] if not tensor.is_complex() else tensor[:0]
    if finite.numel():
        text += f", {finite.min().item():.4g} to {finite.max().item():.4g}"
    counts = {"zero": tensor == 0, "nan": tensor.isnan(), "inf": tensor.isinf()}
    return text + "".join(f", {n.sum().item()} {name}" for name, n in counts.items() if n.any())


def rng_state():
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda


def set_rng_state(state):
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state_all(state[1])


class Snapshot:
    """Everything of the user's that a replay may touch; `restore` puts it back, bit for bit."""

    def __init__(self, model, leaves, tensors):
        self.rng, self.python = rng_state(), random.getstate()
        self.numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self.leaves = [(leaf, leaf.grad, leaf._post_accumulate_grad_hooks) for leaf in leaves]
        self.hooks = [(hooks, dict(hooks)) for _, _, hooks in self.leaves if hooks]
        self.values = [(tensor, tensor.detach().clone()) for tensor in tensors]
        owners = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        dicts = [d for m in owners for d in (m.__dict__, m._buffers, m._parameters)]
        self.dicts = [(d, dict(d)) for d in dicts]

    def restore(self):
        for live, kept in self.dicts + self.hooks:
            live.clear()
            live.update(kept)
        for tensor, value in self.values:
            tensor.data.copy_(value)  # .data: the user's graph must not see a new version
        for leaf, grad, _ in self.leaves:
            leaf.grad = grad
        set_rng_state(self.rng)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.clear_autocast_cache()


# ------------------------------------------------------------- the mode that sees each operation

_LIBRARIES = tuple(
    os.path.join(path, "")
    for path in {
        os.path.dirname(torch.__file__),
        *(sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)
_OURS = {
    os.path.join(os.path.dirname(__file__), f"{n}.py") for n in ("locate", "guard", "autocast")
}
_CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")


@functools.cache
def _is_users(file):
    installed = "site-packages" in file or "dist-packages" in file or file.startswith(_LIBRARIES)
    return not installed and file not in _OURS and not file.startswith(("<frozen", "<eval_with"))


class Tracer(TorchDispatchMode):
    """Records births; in the sites of `patch` it replaces what is born by finite numbers."""

    def __init__(self, model, leaves, patch):
        super().__init__()
        self.names = {id(m): n.removeprefix("_orig_mod.") for n, m in model.named_modules()}
        self.patch, self.births, self.call = patch, {}, 0
        self.first_use = dict.fromkeys(map(id, leaves))
        self.made_by, self.sequence = {}, torch.autograd._get_sequence_nr()
        self.previous = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.call += 1
        site = self._site(func)
        call = (args, kwargs or {})
        for tensor in _tensors(call):
            if self.first_use.get(id(tensor), site) is None:
                self.first_use[id(tensor)] = site
        # An operation that writes into its operands hides them: keep a copy of what they were.
        # (native_batch_norm writes its running statistics without saying so in its schema.)
        writes = func._schema.is_mutable or "batch_norm" in site.op
        before = _copy(call) if writes else call
        result = func(*call[0], **call[1])
        outputs = _tensors(result) + (_tensors(call) if writes else [])
        masks = [non_finite(tensor) for tensor in outputs]
        if any(mask is not None for mask in masks):
            tier, masks = _born(func, before, writes, outputs, masks)
            if tier:
                self._record(site, tier, func, before, outputs, masks)
                if site in self.patch:
                    for tensor, mask in zip(outputs, masks, strict=True):
                        if mask is not None:
                            _put_finite(tensor, mask)
        self.previous = site if writes else None
        return result

    def _record(self, site, tier, func, before, outputs, masks):
        if site in self.births and self.births[site].tier <= tier:
            return
        tensor, mask = next((t, m) for t, m in zip(outputs, masks, strict=True) if m is not None)
        index = tuple(mask.nonzero()[0].tolist())
        operands = [x for x in tree_leaves(before) if isinstance(x, (torch.Tensor, float, int))]
        at = []
        if torch.Tag.pointwise in func.tags:
            for x in operands:
                x = x.expand(mask.shape)[index].item() if isinstance(x, torch.Tensor) else x
                at.append(f"{x:.6g}")
        values = f"{site.op}({', '.join(at)}) = {tensor[index].item():g}"
        texts = [describe(x) if isinstance(x, torch.Tensor) else repr(x) for x in operands]
        call = self.births[site].call if site in self.births else self.call
        where = f"{values} at {list(index)} of {describe(tensor)}"
        self.births[site] = Birth(site, tier, call, _kind(tensor[mask]), texts, where)

    def _site(self, func):
        """Where this operation comes from: the Python stack, or, for what the autograd engine
        runs on its own, the place of the forward operation that made the node.
        """
        op = func._schema.name.split("::")[-1]
        node = torch._C._current_autograd_node()
        file, number, module, recomputed = self._stack()
        if node is None or recomputed:
            site = Site("forward", op, "", module, file, number)
        else:
            name = node.name().split("::")[-1]
            if name == "AccumulateGrad":
                made = self.first_use.get(id(node.variable))
            else:
                made = self.made_by.get(node._sequence_nr())
            if made and not file:
                file, number = made.file, made.number
            site = Site("backward", op, name, module or (made.module if made else ""), file, number)
        # A node takes its number before its operation arrives here; but in-place operations on
        # views make one more node afterwards.
        new = range(self.sequence, torch.autograd._get_sequence_nr())
        for number in new:
            self.made_by[number] = self.previous if self.previous and number != new[-1] else site
        self.sequence = new.stop
        return site

    def _stack(self):
        file, number, module, recomputed = "", 0, None, False
        frame = sys._getframe(1)
        while frame and frame.f_code.co_name not in ("_engine_run_backward", "_run_micro_batches"):
            if not file and _is_users(frame.f_code.co_filename):
                file, number = frame.f_code.co_filename, frame.f_lineno
            if module is None and "self" in frame.f_code.co_varnames:
                module = self.names.get(id(frame.f_locals.get("self")))
            recomputed |= frame.f_code.co_filename.endswith(_CHECKPOINT)
            frame = frame.f_back
        return file, number, module or "", recomputed


def _tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _copy(tree, unwanted=None):
    """Clone the tensors of a call; entries that are `unwanted(x)` become 0.5, plain numbers too."""

    def copied(x):
        if isinstance(x, float) and unwanted and unwanted(torch.tensor(x)):
            return 0.5
        if not isinstance(x, torch.Tensor):
            return x
        return (
            torch.where(unwanted(x), 0.5, x)
            if unwanted and non_finite(x) is not None
            else x.clone()
        )

    return tree_map(copied, tree)


def _run_again(func, call, writes, unwanted, outputs):
    """The outputs of the same operation on operands without their unwanted entries, or Nones."""
    try:
        call = _copy(call, unwanted)
        result = func(*call[0], **call[1])
    except RuntimeError:
        return [None] * len(outputs)
    again = _tensors(result) + (_tensors(call) if writes else [])
    return [x if x.shape == y.shape else None for x, y in zip(again, outputs, strict=True)]


def _born(func, before, writes, outputs, masks):
    """Which non-finite outputs began here: (tier, masks), tier 0 for none.

    Finite operands decide at once. Otherwise the operation runs again on operands whose inf and
    NaN are replaced: what is still non-finite began here, whatever else was carried along.
    """
    name = func._schema.name.split("::")[-1].strip("_")
    numbers = [x for x in tree_leaves(before) if isinstance(x, float) and not math.isfinite(x)]
    carried = [x for x in _tensors(before) if non_finite(x) is not None]
    if name.startswith(("empty", "new_empty")):  # memory as it was found
        return 4, masks
    if not carried and not numbers:
        return 1, masks
    is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
    if is_view or func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return 0, masks
    clean = _run_again(func, before, writes, lambda x: ~x.isfinite(), outputs)
    without_nan = outputs
    if any(x.isnan().any() for x in carried):
        without_nan = _run_again(func, before, writes, torch.isnan, outputs)

    def marked(again, test):
        pairs = zip(masks, again, strict=True)
        return [m & test(x) if m is not None and x is not None else None for m, x in pairs]

    tiers = {1: marked(clean, lambda x: ~x.isfinite()), 2: marked(without_nan, torch.isnan)}
    if numbers:
        tiers[4] = masks
    elif name not in PLUMBING:
        tiers[3] = marked(without_nan, torch.isinf)
    tiers = {t: ms for t, ms in tiers.items() if any(m is not None and m.any() for m in ms)}
    if not tiers:
        return 0, masks
    first = min(tiers)
    born = [
        [m for m in ms if m is not None]
        for ms in zip(*(tiers[t] for t in tiers if t <= max(2, first)))
    ]
    born = [functools.reduce(torch.logical_or, ms) if ms else None for ms in born]
    return first, [m if m is not None and m.any() else None for m in born]


def _put_finite(tensor, mask):
    """The intervention: +-1, because 0 makes new divisions by zero and the largest overflows."""
    ones = torch.where(tensor == -math.inf, -1.0, 1.0).to(tensor.dtype)
    tensor.copy_(torch.where(mask, ones, tensor))


# --------------------------------------------------------------- the failed step, again and again


class MicroBatch(NamedTuple):
    """What one `begin` keeps: references only, until a step has been seen to write its batch."""

    batch: object
    tensors: list  # (name, tensor)
    versions: list
    copies: list  # (tensor, copy)
    rng: tuple
    autocast: list  # (device type, on, dtype)

    def is_written(self):
        pairs = zip(self.tensors, self.versions, strict=True)
        return any(_version(tensor) != version for (_, tensor), version in pairs)


def _version(tensor):
    return 0 if tensor.is_inference() else tensor._version


def micro_batch(batch, copy=False):
    tensors = list(tensors_of(batch))
    versions = [_version(t) for _, t in tensors]
    copies = [(t, t.detach().clone()) for _, t in tensors] if copy else []
    devices = ("cpu", "cuda")
    autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    return MicroBatch(batch, tensors, versions, copies, rng_state(), autocast)


@dataclasses.dataclass
class Run:
    bad: str = ""  # what is not finite: "loss", "gradient", "buffer" or "error", or nothing
    error: str = ""
    births: dict = dataclasses.field(default_factory=dict)
    first_use: dict = dataclasses.field(default_factory=dict)


class FailedStep:
    """A context in which a step can be replayed; on leaving it nothing of the user's has changed."""

    def __init__(self, model, forward, micro_batches, buffers, optimizers=()):
        self.model, self.forward, self.optimizers = model, forward, optimizers
        self.micro_batches, self.buffers, self.replays = micro_batches, buffers, 0
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.params = {id(p): (n, p) for n, p in model.named_parameters()}
        for i, p in enumerate(p for group in groups for p in group["params"]):
            self.params.setdefault(id(p), (f"optimizer parameter {i}", p))
        self.inputs = [pair for micro in micro_batches for pair in micro.tensors]
        self.leaves = [p for _, p in self.params.values()]
        self.leaves += [t for _, t in self.inputs if t.is_leaf and t.requires_grad]

    def __enter__(self):
        tensors = self.leaves + [t for _, t in self.inputs] + list(self.model.buffers())
        tensors += [buffer for _, _, buffer, _ in self.buffers]
        unique = {id(t): t for t in tensors}.values()
        self.snapshot = Snapshot(self.model, self.leaves, unique)
        return self

    def __exit__(self, *error):
        self.snapshot.restore()

    def rewind(self):
        """Back to the moment of `begin`; parameters have not moved since."""
        self.snapshot.restore()
        for hooks, _ in self.snapshot.hooks:  # they may step an optimizer, or record the run
            hooks.clear()
        for leaf in self.leaves:
            leaf.grad = None
        for owner, name, buffer, copy in self.buffers:
            owner._buffers[name] = buffer
            buffer.data.copy_(copy)
        for micro in self.micro_batches:
            for tensor, copy in micro.copies:
                tensor.data.copy_(copy)

    def replay(self, patch=(), heal=(), scale=1.0, trace=True):
        """Run the step from its beginning; returns a Run. Never raises what the forward raises."""
        self.replays += 1
        self.rewind()
        for tensor in heal:
            numbers = 0.05 * (1.1 + torch.arange(tensor.numel()).cos()).view(tensor.shape)
            numbers = numbers.to(tensor.device, tensor.dtype)
            tensor.data.copy_(torch.where(tensor.isfinite(), tensor, numbers))
        tracer = Tracer(self.model, self.leaves + [t for _, t in self.inputs], patch)
        run = Run(births=tracer.births, first_use=tracer.first_use)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if hasattr(self.model, "no_sync"):  # other ranks may not replay as often as this one
                self.model.require_forward_param_sync = False
                stack.enter_context(self.model.no_sync())
            if trace:
                stack.enter_context(tracer)
            try:
                run.bad = self._run_micro_batches(scale)
            except Exception as error:
                run.bad, run.error = "error", f"{type(error).__name__}: {error}"
        return run

    def _run_micro_batches(self, scale):
        for micro in self.micro_batches:
            set_rng_state(micro.rng)
            with contextlib.ExitStack() as stack:
                for device, on, dtype in micro.autocast:
                    stack.enter_context(torch.autocast(device, dtype, enabled=on))
                loss = self.forward(micro.batch)
            if not (
                isinstance(loss, torch.Tensor) and loss.is_floating_point() and loss.numel() == 1
            ):
                got = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
                raise TypeError(f"forward(batch) must return a scalar float loss, got {got}")
            if not loss.isfinite():
                return "loss"
            if loss.requires_grad:
                (loss * scale).backward() if scale != 1 else loss.backward()
        if self.bad_gradients():
            return "gradient"
        return "buffer" if self.new_bad_buffers() else ""

    def bad_gradients(self):
        grads = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
        return any(non_finite(grad) is not None for grad in grads)

    def new_bad_buffers(self):
        """Names of the buffers that are not finite now, but were when the step began."""
        names = {id(b): name for name, b in self.model.named_buffers() if non_finite(b) is not None}
        now = [(m._buffers.get(n), copy) for m, n, _, copy in self.buffers]
        return [names[id(b)] for b, copy in now if id(b) in names and non_finite(copy) is None]

    # ----------------------------------------------------------------- from a replay to a report

    def find(self, phase, scale=1.0):
        """The Report of this step; `phase` is what it is called if the replay shows nothing."""
        run = self.replay(scale=scale)
        report = Report(phase=phase, replays=self.replays)
        if not run.bad:
            return self._norm_overflow(report) or dataclasses.replace(report, note=NOT_REPRODUCED)
        report = self._bad_from_the_start(run, report, scale) or self._birth(run, report, scale)
        report.replays = self.replays
        return report

    def _norm_overflow(self, report):
        grads = {n: p.grad for n, p in self.params.values() if p.grad is not None}
        if not grads or torch.nn.utils.get_total_norm(grads.values()).isfinite():
            return None
        largest = max(grads, key=lambda name: grads[name].abs().max().item())
        exact = torch.nn.utils.get_total_norm([g.double() for g in grads.values()])
        report.phase, report.op, report.kind = "norm", "linalg_vector_norm", "inf"
        report.tensor = f"gradient of {largest}: {describe(grads[largest])}"
        report.module = largest.rpartition(".")[0]
        report.confirmed = bool(exact.isfinite())
        report.note = (
            f"in float64 the norm is {exact.item():.4g}; clip_grad_norm_ would write zeros"
        )
        return report

    def _bad_from_the_start(self, run, report, scale, masks=False):
        """Were weights, batch or buffers bad before the first operation? Heal them and see.

        A tensor with -inf only is taken for a mask, unless `masks` says otherwise.
        """
        self.rewind()
        buffers = [(n, b) for n, b in self.model.named_buffers() if b.is_floating_point()]
        kinds = {"optimizer": self.params.values(), "input": self.inputs, "buffer": buffers}
        for phase, tensors in kinds.items():
            bad = [(n, t) for n, t in tensors if non_finite(t) is not None]
            bad = [(n, t) for n, t in bad if masks or (t.isnan() | (t == math.inf)).any()]
            if not bad:
                continue
            (name, first), kind, text = bad[0], _kind(bad[0][1]), describe(bad[0][1])
            op = self._update(name, first) if phase == "optimizer" else ("", "")
            if self.replay(heal=[t for _, t in bad], scale=scale).bad:
                self.rewind()
                continue
            site = run.first_use.get(id(first))
            report = dataclasses.replace(report, phase=phase, kind=kind, confirmed=True)
            report.op, report.note = op
            report.tensor = f"{name}: {text}"
            if phase == "input" and site:
                report.module, report.line, report.source = site.module, site.line, _source(site)
            elif phase != "input":
                report.module = name.rpartition(".")[0]
            return report

    def _update(self, name, param):
        """The optimizer's operation that spoils a parameter, and why, as far as its state tells."""
        bad = non_finite(param)
        for optimizer in self.optimizers:
            state, eps = optimizer.state.get(param, {}), optimizer.defaults.get("eps")
            for moment in ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"):
                if moment not in state:
                    continue
                zeros = (state[moment][bad] == 0).sum().item()
                if zeros and torch.tensor(eps, dtype=state[moment].dtype) == 0:
                    dtype = str(param.dtype).removeprefix("torch.")
                    why = f"{moment} is 0 in {zeros} of the {bad.sum().item()} bad entries, and so is eps={eps:g} in {dtype}"
                    return "addcdiv_", why
                return "addcdiv_", ""
        return "add_", "the update itself left the range of the dtype"

    def _birth(self, run, report, scale):
        needed = self._prove(run, scale)
        births = needed or ([] if run.error else list(run.births.values()))
        if not births:
            report.note = run.error and f"the replay stopped: {run.error}" or NO_BIRTH
            return report
        first = min(births, key=lambda birth: (birth.tier * (not needed), birth.call))
        op = first.site.op.rstrip("_")
        if first.tier > 1 and op not in TAKES_MASKS:
            found = self._bad_from_the_start(run, report, scale, masks=True)
            if found:
                return found
        site = first.site
        report = dataclasses.replace(
            report,
            **{key: getattr(site, key) for key in ("phase", "op", "node", "module", "line")},
            kind=first.kind,
            operands=first.operands,
            first_bad=first.first_bad,
            source=_source(site),
            confirmed=bool(needed),
            also_needed=[str(birth.site) for birth in births if needed and birth is not first],
        )
        if run.bad == "buffer":
            report.phase, report.tensor = "buffer", ""
        report.note = "" if needed else "no intervention made the step finite: take this as a hint"
        return report

    def _prove(self, run, scale):
        """The births without which the step is finite, earliest first; none if none is found."""
        chosen = {}
        while run.bad:
            new = {s: b for s, b in run.births.items() if s not in chosen}
            if not new or self.replays >= MAX_REPLAYS:
                return []
            tier = min(birth.tier for birth in new.values())
            chosen |= {s: b for s, b in new.items() if b.tier == tier}
            run = self.replay(patch=chosen, scale=scale)
        # Leave out what is not needed, the latest first: half of them, then quarters, then one.
        needed = sorted(chosen.values(), key=lambda birth: birth.call)
        size = len(needed) // 2
        while size:
            for end in range(len(needed), 0, -size):
                rest = needed[: max(end - size, 0)] + needed[end:]
                if rest and not self.replay(patch={b.site for b in rest}, scale=scale).bad:
                    needed = rest
            size //= 2
        return needed


NOT_REPRODUCED = (
    "the replay is finite, so no operation is named: the cause is not in what the step computes "
    "from its batch, its weights and torch's random numbers. Look for randomness of Python or "
    "NumPy, a counter in the model, a batch written in place, a gradient hook, or a kernel's fault"
)
NO_BIRTH = "no operation made it: a non-finite constant in the code, or data that is no tensor"


def _source(site):
    return linecache.getline(site.file, site.number).strip()


def locate(model, forward, batch, loss_scale=1.0):
    """Replay a step that failed and return its Report; nothing of the model changes.

    `forward(batch)` returns the scalar loss, with its autocast inside. Call it before the
    optimizer steps. Random numbers start from where the generators stand now.
    """
    buffers = [
        (m, n, b, b.clone())
        for m in model.modules()
        for n, b in m._buffers.items()
        if b is not None
    ]
    with FailedStep(model, forward, [micro_batch(batch)], buffers) as step:
        return step.find("", loss_scale)

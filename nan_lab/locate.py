"""Find the operation that made the first inf or NaN of a failed step, and prove it.

The step runs again under a mode that sees every ATen operation. Each *birth* (finite operands,
non-finite result) is a suspect. The proof is an intervention: put finite numbers in the place of
the suspect's result, run again, and see whether the symptom is gone.
"""

import contextlib
import functools
import linecache
import math
import os
import sys
import sysconfig
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from nan_lab.report import NO_BIRTH, NOT_REPRODUCED, Report, describe, kind_of
from nan_lab.snapshot import MicroBatch, Snapshot, set_rng_state

MAX_REPLAYS = 60
# To these operations -inf is a value like any other: it is how a mask is written.
TAKES_MASKS = {"_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "amax", "max"}
# These hand on an inf that somebody put there on purpose.
PLUMBING = {"add", "sub", "mul", "div", "copy", "_to_copy", "clone", "where", "masked_fill", "cat"}
PLUMBING |= {"stack", "index", "gather", "triu", "tril", "constant_pad_nd", "repeat", "lift_fresh"}


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
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        cells = getattr(getattr(shell, "compile", None), "_filename_map", {})
        name = f"cell {cells[self.file]}" if self.file in cells else os.path.basename(self.file)
        return self.file and f"{name}:{self.number}"

    def report(self):
        source = linecache.getline(self.file, self.number).strip()
        return Report(None, *self[:4], self.line, source=source)


class Birth(NamedTuple):
    site: Site
    tier: int  # 1: out of finite numbers, 2: NaN out of inf, 3: inf out of inf, 4: written there
    call: int  # its place in the order of operations
    report: Report


def non_finite(tensor):
    """The mask of inf and NaN, or None where there is none."""
    tensor = tensor._values() if tensor.is_sparse else tensor
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return None
    bad = ~torch.isfinite(tensor)
    return bad if bad.any() else None


_STDLIB = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = tuple(os.path.join(path, "") for path in [os.path.dirname(torch.__file__), *_STDLIB])
_OURS = [
    os.path.join(os.path.dirname(__file__), f"{n}.py") for n in ("locate", "guard", "autocast")
]
_CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")


@functools.cache
def _is_users(file):
    installed = "site-packages" in file or "dist-packages" in file or file.startswith(_LIBRARIES)
    return not installed and file not in _OURS and not file.startswith(("<frozen", "<eval_with"))


class Tracer(TorchDispatchMode):
    """Record births. At the sites in `patch`, put finite numbers in the place of what is born."""

    def __init__(self, model, leaves, patch=()):
        super().__init__()
        self.names = {id(m): n.removeprefix("_orig_mod.") for n, m in model.named_modules()}
        self.patch, self.births, self.calls = patch, {}, 0
        self.first_use = dict.fromkeys(map(id, leaves))
        # Who made the autograd node of which number; and the last operation, if it was in place.
        self.made_by, self.next_node, self.in_place = {}, torch.autograd._get_sequence_nr(), None
        self.bad = self.error = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        site, call = self._site(func), (args, kwargs or {})
        for tensor in _tensors(call):
            if self.first_use.get(id(tensor), site) is None:
                self.first_use[id(tensor)] = site
        # Writing into an operand hides what it was: keep a copy. (native_batch_norm writes its
        # running statistics and does not say so in its schema.)
        writes = func._schema.is_mutable or "batch_norm" in site.op
        before = _copy(call) if writes else call
        result = func(*call[0], **call[1])
        outputs = _tensors(result) + (_tensors(call) if writes else [])
        masks = [non_finite(tensor) for tensor in outputs]
        if any(mask is not None for mask in masks):
            tier, masks = _born(func, before, writes, outputs, masks)
            born = [(t, m) for t, m in zip(outputs, masks, strict=True) if m is not None]
            if tier:
                self._record(site, tier, func, before, *born[0])
            for tensor, mask in born if tier and site in self.patch else []:
                _put_finite(tensor, mask)
        self.in_place = site if writes else None
        return result

    def _record(self, site, tier, func, before, tensor, mask):
        known = self.births.get(site)
        if known and known.tier <= tier:
            return
        report, index = site.report(), tuple(mask.nonzero()[0].tolist())
        operands = [x for x in tree_leaves(before) if isinstance(x, (torch.Tensor, float, int))]
        at = ["..."]
        if torch.Tag.pointwise in func.tags:  # then the operands at this index tell it all
            at = [
                x.expand(mask.shape)[index] if isinstance(x, torch.Tensor) else x for x in operands
            ]
            at = [f"{float(x):.6g}" for x in at]
        report.first_bad = f"{site.op}({', '.join(at)}) = {tensor[index].item():g} at {list(index)}"
        report.first_bad += f" of {describe(tensor)}"
        report.kind, report.operands = kind_of(tensor[mask]), [describe(x) for x in operands]
        self.births[site] = Birth(site, tier, known.call if known else self.calls, report)

    def _site(self, func):
        """Where an operation comes from: the Python stack. What the autograd engine runs of its
        own has none: then the line whose forward operation made the node.
        """
        op = func._schema.name.split("::")[-1]
        node = torch._C._current_autograd_node()
        file, number, module, recomputed = self._stack()
        if node is None or recomputed:
            site = Site("forward", op, "", module or "", file, number)
        else:
            name = node.name().split("::")[-1]
            made = self.made_by.get(node._sequence_nr())
            if name == "AccumulateGrad":
                made = self.first_use.get(id(node.variable))
            if made:
                file, number = (file, number) if file else (made.file, made.number)
                module = made.module if module is None else module
            site = Site("backward", op, name, module or "", file, number)
        # Nodes are numbered before their operation arrives here. Only an in-place operation on a
        # view makes one more afterwards.
        new = range(self.next_node, torch.autograd._get_sequence_nr())
        for i in new:
            self.made_by[i] = self.in_place if self.in_place and i != new[-1] else site
        self.next_node = new.stop
        return site

    def _stack(self):
        """File and line of the innermost frame of the user, innermost module, is it recomputed."""
        file, number, module, recomputed, frame = "", 0, None, False, sys._getframe(1)
        while frame and frame.f_code.co_name not in ("_engine_run_backward", "_run_micro_batches"):
            code = frame.f_code
            if not file and _is_users(code.co_filename):
                file, number = code.co_filename, frame.f_lineno
            if module is None and "self" in code.co_varnames:
                module = self.names.get(id(frame.f_locals.get("self")))
            recomputed |= code.co_filename.endswith(_CHECKPOINT)
            frame = frame.f_back
        return file, number, module, recomputed


def _tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _copy(tree, unwanted=None):
    """Clone the tensors of a call; entries that are `unwanted(x)` become 0.5, plain numbers too."""

    def copied(x):
        if isinstance(x, float) and unwanted and unwanted(torch.tensor(x)):
            return 0.5
        if not isinstance(x, torch.Tensor):
            return x
        return torch.where(unwanted(x), 0.5, x) if unwanted and x.is_floating_point() else x.clone()

    return tree_map(copied, tree)


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

    def still(test, unwanted):
        """The outputs' entries for which `test` holds, without the operands' unwanted entries."""
        try:
            call = _copy(before, unwanted)
            again = _tensors(func(*call[0], **call[1])) + (_tensors(call) if writes else [])
        except RuntimeError:
            return [None] * len(masks)
        pairs = zip(masks, again, strict=True)
        return [None if m is None or m.shape != x.shape else m & test(x) for m, x in pairs]

    tiers = {1: still(lambda x: ~x.isfinite(), unwanted=lambda x: ~x.isfinite())}
    tiers[2] = still(torch.isnan, unwanted=torch.isnan)
    if name not in PLUMBING and not numbers:
        tiers[3] = still(torch.isinf, unwanted=torch.isnan)
    if numbers:
        tiers[4] = masks
    tiers = {t: ms for t, ms in tiers.items() if any(m is not None and m.any() for m in ms)}
    first = min(tiers, default=0)
    if first == 1 and 2 in tiers:
        pairs = zip(tiers[1], tiers[2], strict=True)
        return 1, [a if b is None else b if a is None else a | b for a, b in pairs]
    return first, tiers.get(first, masks)


def _put_finite(tensor, mask):
    """The intervention: +-1, because 0 makes new divisions by zero and the largest overflows."""
    ones = torch.where(tensor == -math.inf, -1.0, 1.0).to(tensor.dtype)
    tensor.copy_(torch.where(mask, ones, tensor))


class FailedStep:
    """A context in which a step is replayed; on leaving, all is as it was on entering."""

    def __init__(self, model, forward, micro_batches, buffers, optimizers=()):
        self.model, self.forward, self.optimizers = model, forward, optimizers
        self.micro_batches, self.buffers, self.replays = micro_batches, buffers, 0
        self.inputs = [pair for micro in micro_batches for pair in micro.tensors]
        groups = [group["params"] for o in optimizers for group in o.param_groups]
        self.params = {p: f"optimizer parameter {i}" for i, p in enumerate(sum(groups, []))}
        self.params |= {p: name for name, p in model.named_parameters()}
        self.leaves = [*self.params, *(t for _, t in self.inputs if t.is_leaf and t.requires_grad)]

    def __enter__(self):
        tensors = [*self.leaves, *self.model.buffers(), *(t for _, t in self.inputs)]
        tensors += [buffer for _, _, buffer, _ in self.buffers]
        self.snapshot = Snapshot(self.model, self.leaves, dict.fromkeys(tensors))
        return self

    def __exit__(self, *error):
        self.snapshot.restore()

    def rewind(self):
        """Back to the moment of `begin`. (The parameters have not moved since.)"""
        self.snapshot.restore()
        for hooks, _ in self.snapshot.hooks:  # they may step an optimizer, or record the run
            hooks.clear()
        for leaf in self.leaves:
            leaf.grad = None
        for m in self.model.modules():
            if isinstance(m, torch.nn.parallel.DistributedDataParallel):
                m.forward = m.module.forward  # ranks replay apart: no collective operations
        copies = [pair for micro in self.micro_batches for pair in micro.copies]
        for owner, name, buffer, copy in self.buffers:
            owner._buffers[name] = buffer
            copies.append((buffer, copy))
        for tensor, copy in copies:
            tensor.data.copy_(copy)

    def replay(self, patch=(), heal=(), scale=1.0, trace=True):
        """Run the step from its beginning; the Tracer says how it went. Raises nothing."""
        self.replays += 1
        self.rewind()
        for t in heal:  # small numbers, not all alike
            numbers = 0.05 * (1.1 + torch.arange(t.numel()).cos()).view(t.shape).to(t)
            t.data.copy_(torch.where(t.isfinite(), t, numbers).detach())
        tracer = Tracer(self.model, [*self.params, *(t for _, t in self.inputs)], patch)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            try:
                with tracer if trace else contextlib.nullcontext():
                    self._run_micro_batches(scale)
                tracer.bad = self.symptom()
            except FloatingPointError:
                tracer.bad = "loss"
            except Exception as error:
                tracer.bad, tracer.error = "error", f"{type(error).__name__}: {error}"
        return tracer

    def _run_micro_batches(self, scale):
        for micro in self.micro_batches:
            set_rng_state(micro.rng)
            with contextlib.ExitStack() as stack:
                for device, dtype, on in micro.autocast:
                    stack.enter_context(torch.autocast(device, dtype, enabled=on))
                loss = self.forward(micro.batch)
            is_tensor = isinstance(loss, torch.Tensor)
            if not (is_tensor and loss.is_floating_point() and loss.numel() == 1):
                got = f"{loss.dtype} {tuple(loss.shape)}" if is_tensor else type(loss).__name__
                raise TypeError(f"forward(batch) must return one floating-point loss, got {got}")
            if not loss.isfinite():
                raise FloatingPointError
            if loss.requires_grad:
                (loss if scale == 1 else loss * scale).backward()

    def symptom(self):
        if any(leaf.grad is not None and non_finite(leaf.grad) is not None for leaf in self.leaves):
            return "gradient"
        return "buffer" if self.spoiled_buffers() else ""

    def spoiled_buffers(self):
        """The buffers that are not finite now, and were when the step began."""
        now = [(owner._buffers.get(name), copy) for owner, name, _, copy in self.buffers]
        now = [(b, copy) for b, copy in now if b is not None and non_finite(b) is not None]
        return [buffer for buffer, copy in now if non_finite(copy) is None]

    # ----------------------------------------------------------------- from replays to a report

    def find(self, phase, scale=1.0):
        """The Report of this step; `phase` is its name in case that the replay shows nothing."""
        run = self.replay(scale=scale)
        if not run.bad:
            report = self._norm() or Report(phase=phase, note=NOT_REPRODUCED)
        else:
            report = self._bad_from_the_start(run, scale) or self._birth(run, phase, scale)
        report.replays = self.replays
        return report

    def _norm(self):
        """Finite gradients whose norm is not."""
        grads = {name: p.grad for p, name in self.params.items() if p.grad is not None}
        if not grads or torch.nn.utils.get_total_norm(grads.values()).isfinite():
            return None
        name = max(grads, key=lambda name: grads[name].abs().max().item())
        exact = torch.nn.utils.get_total_norm([g.double() for g in grads.values()])
        report = Report(phase="norm", op="linalg_vector_norm", module=name.rpartition(".")[0])
        report.tensor, report.kind = f"gradient of {name}: {describe(grads[name])}", "inf"
        report.note = f"in float64 the norm is {exact:.4g}; clip_grad_norm_ would write zeros"
        report.confirmed = bool(exact.isfinite())
        return report

    def _bad_from_the_start(self, run, scale, masks=False):
        """Were weights, batch or buffers bad before the first operation? Heal them and see.

        A tensor whose only bad value is -inf passes for a mask, unless `masks` are meant too.
        """
        self.rewind()
        params = [(name, p) for p, name in self.params.items()]
        groups = {"optimizer": params, "input": self.inputs}
        groups["buffer"] = list(self.model.named_buffers())
        for phase, tensors in groups.items():
            bad = [(name, t) for name, t in tensors if non_finite(t) is not None]
            bad = [(name, t) for name, t in bad if masks or (t.isnan() | (t == math.inf)).any()]
            if not bad:
                continue
            name, tensor = bad[0]
            site = run.first_use.get(id(tensor)) if phase == "input" else None
            report = site.report() if site else Report(module=name.rpartition(".")[0])
            report.phase, report.op, report.confirmed = phase, "", True
            report.kind, report.tensor = kind_of(tensor), f"{name}: {describe(tensor)}"
            if phase == "optimizer":
                report.op, report.note = _update(self.optimizers, tensor)
            if not self.replay(heal=[t for _, t in bad], scale=scale).bad:
                return report
            self.rewind()
        return None

    def _birth(self, run, phase, scale):
        """The earliest birth that is needed; without a proof the earliest likely one, as a hint."""
        needed = self._prove(run, scale)
        births = needed or ([] if run.error else list(run.births.values()))
        if not births:
            note = f"the replay stopped: {run.error}" if run.error else NO_BIRTH
            return Report(phase=phase, note=note)
        first = births[0] if needed else min(births, key=lambda b: (b.tier, b.call))
        if first.tier > 1 and first.site.op not in TAKES_MASKS:
            report = self._bad_from_the_start(run, scale, masks=True)
            if report:
                return report
        report = first.report
        report.confirmed = bool(needed)
        report.note = "" if needed else "no intervention made the step finite: this is only a hint"
        report.also_needed = [f"{b.site.op} at {b.site.line}" for b in needed[1:]]
        if run.bad == "buffer":
            report.phase = "buffer"
        return report

    def _prove(self, run, scale):
        """The births without which the step is finite, earliest first; [] if none are found."""
        chosen = {}
        while run.bad:
            new = [b for site, b in run.births.items() if site not in chosen]
            if not new or self.replays >= MAX_REPLAYS:
                return []
            best = min(birth.tier for birth in new)
            chosen |= {b.site: b for b in new if b.tier == best}
            run = self.replay(patch=chosen, scale=scale)
        # Drop what is not needed, the latest first: in halves, then quarters, then one by one.
        needed = sorted(chosen.values(), key=lambda birth: birth.call)
        size = len(needed) // 2
        while size:
            for end in range(len(needed), 0, -size):
                rest = needed[: max(end - size, 0)] + needed[end:]
                if rest and not self.replay({b.site for b in rest}, scale=scale).bad:
                    needed = rest
            size //= 2
        return needed


def _update(optimizers, param):
    """The operation with which the optimizer spoiled `param`, and why, if its state tells."""
    states = [(o.state[param], o.defaults.get("eps", 1)) for o in optimizers if param in o.state]
    for state, eps in states:
        squares = [state[k] for k in ("exp_avg_sq", "square_avg", "sum") if k in state]
        if squares:
            zeros = (squares[0][non_finite(param)] == 0).sum().item()
            if zeros and squares[0].new_tensor(eps) == 0:
                dtype = str(param.dtype).removeprefix("torch.")
                return (
                    "addcdiv_",
                    f"in {zeros} bad entries exp_avg_sq is 0, and eps={eps} in {dtype} too",
                )
            return "addcdiv_", ""
    return "add_", ""


def locate(model, forward, batch, loss_scale=1.0):
    """Replay a step that failed, before its optimizer step, and return its Report.

    `forward(batch)` returns the scalar loss, its autocast inside. Random numbers start from where
    the generators stand now. Nothing of the model, the batch or the generators changes.
    """
    buffers = [(m, name, b) for m in model.modules() for name, b in m._buffers.items()]
    buffers = [(m, name, b, b.detach().clone()) for m, name, b in buffers if b is not None]
    with FailedStep(model, forward, [MicroBatch.keep(batch)], buffers) as step:
        return step.find("", loss_scale)

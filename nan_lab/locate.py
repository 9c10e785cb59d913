"""Find the operation that made the first inf or NaN of a failed step, and prove it.

The step runs again under a mode that sees every ATen operation. Each *birth* (finite operands,
non-finite result) is a suspect. The proof is an intervention: put finite numbers in the place of
the suspect's result, run again, and see whether the symptom is gone.
"""

import contextlib
import math
import sys

import torch

from nan_lab.report import NO_BIRTH, NOT_REPRODUCED, Report, describe, kind_of
from nan_lab.snapshot import MicroBatch, Snapshot, put, set_rng_state
from nan_lab.tracer import Tracer, non_finite

MAX_REPLAYS = 60
# To these operations -inf is a value like any other: it is how a mask is written.
TAKES_MASKS = {"_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "amax", "max"}


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
        for leaf in self.leaves:
            leaf.grad = None
            # These hooks may step an optimizer, or record the run.
            (leaf._post_accumulate_grad_hooks or {}).clear()
        for m in self.model.modules():
            if isinstance(m, torch.nn.parallel.DistributedDataParallel):
                m.forward = m.module.forward  # ranks replay apart: no collective operations
        copies = [pair for micro in self.micro_batches for pair in micro.copies]
        for owner, name, buffer, copy in self.buffers:
            owner._buffers[name] = buffer
            copies.append((buffer, copy))
        for tensor, copy in copies:
            put(tensor, copy)

    def replay(self, patch=(), heal=(), scale=1.0, trace=True):
        """Run the step from its beginning; the Tracer says how it went. Raises nothing."""
        self.replays += 1
        self.rewind()
        for t in heal:  # small numbers, not all alike
            numbers = 0.05 * (1.1 + torch.arange(t.numel()).cos()).view(t.shape).to(t)
            put(t, torch.where(t.isfinite(), t, numbers).detach())
        patch = {birth.site: birth.tier for birth in patch}
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
        report.note = f"the norm is {exact:.4g}; clip_grad_norm_ turns such gradients into zeros"
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
            best = min((birth.tier for birth in run.births.values()), default=0)
            if not best or self.replays >= MAX_REPLAYS:
                return []
            for site, birth in run.births.items():
                if birth.tier == best:
                    chosen[site] = chosen.get(site, birth)._replace(tier=best)
            run = self.replay(chosen.values(), scale=scale)
        # Drop what is not needed, the latest first: in halves, then quarters, then one by one.
        needed = sorted(chosen.values(), key=lambda birth: birth.call)
        size = len(needed) // 2
        while size:
            for end in range(len(needed), 0, -size):
                rest = needed[: max(end - size, 0)] + needed[end:]
                if rest and self.replays < MAX_REPLAYS and not self.replay(rest, scale=scale).bad:
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
                return "addcdiv_", f"in {zeros} bad entries exp_avg_sq is 0, and so is eps={eps}"
            return "addcdiv_", ""
    return "add_", ""


def locate(model, forward, batch, loss_scale=1.0):
    """Replay a step that failed, before its optimizer step, and return its Report.

    `forward(batch)` returns the scalar loss, its autocast inside. Random numbers start from where
    the generators stand now. Nothing of the model, the batch or the generators changes.
    """
    buffers = [(m, name, b) for m in model.modules() for name, b in m._buffers.items()]
    buffers = [(m, name, b, b.detach().clone()) for m, name, b in buffers if b is not None]
    with FailedStep(model, forward, [MicroBatch(batch)], buffers) as step:
        return step.find("", loss_scale)

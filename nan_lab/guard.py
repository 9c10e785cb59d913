"""Stop a training run at the step that makes the first inf or NaN, and say where it was made."""

import math
from collections import deque

import torch
import torch.distributed as dist

from nan_lab.locate import FailedStep, non_finite
from nan_lab.report import BATCH_WRITTEN, PARAMETERS_MOVED, Report
from nan_lab.snapshot import MicroBatch

MAX_SKIPS = 50  # in a row. After 144 the scale's reciprocal is inf: the next good step is poisoned.


class NonFiniteStep(RuntimeError):
    """A step is not finite. `report` is a nan_lab.report.Report, and the message its text."""

    def __init__(self, report):
        super().__init__(str(report))
        self.report = report


class StepGuard:
    """Watch a training loop with one host read a step, in the place of `loss.item()`.

        guard.begin(step, batch)                     # right before the forward pass
        loss = forward(batch)                        # then backward, unscale_, clip
        loss, norm = guard.check(loss, grad_norm)    # before optimizer.step

    `forward(batch)` returns the loss and can be run again: autocast is inside it. For gradient
    accumulation call `begin` for each micro-batch, with the same step, and `check` once.
    `optimizer` may be a list. `skipped` counts the steps that GradScaler skips for its scale's
    sake; they raise nothing. Training is bitwise the same with the guard as without it.
    """

    def __init__(self, model, forward, optimizer=None, scaler=None):
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not callable(forward):
            raise TypeError(f"forward must be a function of the batch, got {forward!r}")
        optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        self.optimizers = [each for each in optimizers if each is not None]
        self.model, self.forward = model, forward
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        distributed = dist.is_available() and dist.is_initialized()
        self.ranks = dist.get_world_size() if distributed else 1
        self.skipped = self.skips_in_a_row = 0
        self.last = deque(maxlen=5)  # (loss, gradient norm)
        self.step = self.previous_step = None
        self.micro_batches, self.checked, self.writes_batch = [], False, False
        self.params = list(model.parameters())
        self.owners = [(m, name) for m in model.modules() for name in m._buffers]
        self.buffers = []  # (owner, name, buffer, its copy from before the step)
        self.masks = set()  # (owner, name) of buffers that hold inf on purpose

    def begin(self, step, batch):
        """Keep how the step starts: references to the batch, random state, a copy of buffers."""
        if step != self.step or self.checked:
            self.previous_step = self.step
            self.step, self.checked, self.micro_batches = step, False, []
            self.versions = [p._version for p in self.params]
            if self.owners:
                self._keep_buffers()
        self.micro_batches.append(MicroBatch(batch, with_copies=self.writes_batch))

    def _keep_buffers(self):
        now = [(m, name, m._buffers.get(name)) for m, name in self.owners]
        now = [entry for entry in now if entry[2] is not None]
        if [id(b) for _, _, b in now] != [id(b) for _, _, b, _ in self.buffers]:
            self.buffers = [(m, name, b, b.detach().clone()) for m, name, b in now]
        elif now:
            torch._foreach_copy_([copy for *_, copy in self.buffers], [b for _, _, b in now])

    def check(self, loss, grad_norm=None):
        """(loss, grad_norm) as floats; raises NonFiniteStep.

        `grad_norm` is what clip_grad_norm_ returned; without it the norm is computed here.
        """
        if not self.micro_batches:
            raise RuntimeError("check() without begin(): call begin(step, batch) before forward")
        loss, norm, *others = self._read(loss, grad_norm)
        self.checked = True
        self.last.append((loss, norm))
        wrote = any([micro.is_written() for micro in self.micro_batches])
        if math.isfinite(loss + norm + sum(others)):
            self.skips_in_a_row = 0
        else:
            report = self._judge(loss, norm, replayable=self.writes_batch or not wrote)
            self._raise_on_every_rank(report, loss, norm)
        self.writes_batch |= wrote
        return loss, norm

    def _read(self, loss, grad_norm):
        """[loss, gradient norm, what else must be finite] in the step's one host read."""
        if isinstance(loss, float):
            loss = torch.tensor(loss)
        if not (isinstance(loss, torch.Tensor) and loss.is_floating_point() and loss.numel() == 1):
            got = (loss.dtype, tuple(loss.shape)) if isinstance(loss, torch.Tensor) else loss
            raise TypeError(f"loss must be one floating-point number, as a tensor, got {got}")
        if grad_norm is None:
            grad_norm = _norm([p.grad for p in self.model.parameters() if p.grad is not None])
        if not isinstance(grad_norm, torch.Tensor):
            grad_norm = torch.full((), grad_norm, device=loss.device)
        values = [loss if loss.dim() == 0 else loss.reshape(()), grad_norm]
        if self.owners:
            values += self._largest_of_buffers()
        values = torch.stack([value.to(loss.device) for value in values])
        if self.ranks > 1:  # what is inf or NaN on one rank stops all of them at the same step
            bad = torch.where(values.isfinite().all(), 0.0, math.inf)
            values = torch.cat([values, self._on_every_rank(bad, loss.device)])
        return values.tolist()

    def _largest_of_buffers(self):
        buffers = [m._buffers.get(name) for m, name in self.owners if (m, name) not in self.masks]
        buffers = [b for b in buffers if b is not None and b.is_floating_point() and b.numel()]
        return torch._foreach_norm(buffers, math.inf) if buffers else []

    def _judge(self, loss, norm, replayable):
        """The Report of a step that looks bad, or None when it may go on."""
        phase = "forward" if not math.isfinite(loss) else "backward"
        if math.isfinite(loss) and math.isfinite(norm):
            phase = "buffer"
        step = (self.model, self.forward, self.micro_batches, self.buffers, self.optimizers)
        try:
            with FailedStep(*step) as failed:
                return self._look(failed, phase, replayable)
        except Exception as error:  # out of memory, say: even so the step is known
            return Report(phase=phase, note=f"the location stopped: {error!r}")

    def _look(self, failed, phase, replayable):
        if phase == "buffer" and not failed.spoiled_buffers():
            self.masks |= {(m, n) for m, n, b, _ in self.buffers if non_finite(b) is not None}
            return None
        if self.scaler and phase == "backward" and failed.symptom() == "gradient":
            if not replayable or not failed.replay(trace=False).bad:
                return self._skip()
        if not replayable:
            return Report(phase=phase, note=BATCH_WRITTEN)
        moved = [p._version for p in self.params] != self.versions
        if moved and any(non_finite(p) is not None for p in self.params):
            return Report(phase=phase, note=PARAMETERS_MOVED)
        report = failed.find(phase)
        if moved:
            report.note = f"{report.note} (parameters changed between begin and check)".strip()
        if report.phase == "optimizer" and self.previous_step is None:
            report.op, report.note = "", "so it was before the first step that was guarded"
        return report

    def _skip(self):
        """GradScaler's normal business, unless the scale can no longer be the reason."""
        self.skipped += 1
        self.skips_in_a_row += 1
        if self.scaler.get_scale() >= 1 and self.skips_in_a_row < MAX_SKIPS:
            return None
        note = f"{self.skips_in_a_row} skips in a row: the scale is not what makes it overflow"
        return Report(phase="scaler", confirmed=True, replays=1, note=note)

    def _raise_on_every_rank(self, report, loss, norm):
        ranks = []
        if self.ranks > 1:
            sure = 0 if report is None else 2 if report.confirmed else 1
            flags = self._on_every_rank(sure, self.params[0].device).tolist()
            ranks = [rank for rank, flag in enumerate(flags) if flag and flag == max(flags)]
            if ranks and dist.get_rank() not in ranks:
                report = Report(phase="backward", note="made on another rank, see there")
        if report is None:
            return
        before = report.phase == "optimizer" and self.previous_step is not None
        report.step = self.previous_step if before else self.step
        report.loss, report.grad_norm, report.last, report.ranks = loss, norm, [*self.last], ranks
        report.scale = self.scaler.get_scale() if self.scaler else None
        raise NonFiniteStep(report)

    def _on_every_rank(self, flag, device):
        """A vector with the flags of all ranks."""
        flags = torch.zeros(self.ranks, device=device)
        flags[dist.get_rank()] = flag
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return flags


def _norm(grads):
    """The global norm, in float32 at least: in float16 the squares would overflow early."""
    grads = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    if not grads:
        return 0.0
    exact = any(grad.dtype == torch.float64 for grad in grads)
    norms = torch._foreach_norm(grads, 2, dtype=torch.float64 if exact else torch.float32)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))

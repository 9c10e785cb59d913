"""The tools people use to find a NaN, each behind one interface, run as its users run it.

A tool is made for a `Run` and has begin(step, batch) and check(loss, grad_norm), like StepGuard;
it raises `Found` when it flags a step. What it prints, warns or raises itself is read by `read`.
"""

import contextlib
import importlib.util
import re
import sys

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Found(Exception):
    """A tool's claim. Empty fields are what the tool does not say."""

    def __init__(self, op="", line="", module="", node="", phase="", step=None, confirmed=None):
        super().__init__(f"{op or node or module or 'not finite'} at {line or '?'}")
        self.op, self.line, self.module, self.node = op, line, module, node
        self.phase, self.step, self.confirmed = phase, step, confirmed


def bad(tree) -> bool:
    """True when a floating or complex tensor in `tree` holds an inf or NaN (reads the device)."""
    tensors = [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
    numbers = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    return any(not bool(torch.isfinite(t).all()) for t in numbers)


def user_line() -> str:
    """ "file:number" of the innermost frame outside installed packages and this file."""
    frame = sys._getframe(1)
    while frame:
        name = frame.f_code.co_filename
        if "site-packages" not in name and name != __file__ and not name.startswith("<"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Tool:
    """Does nothing; the others override what they need. `open` holds what must be left again."""

    title, needs = "", ""
    names_modules = False
    told_the_step = False  # looks at one step only, so that it has no cost a step

    def __init__(self, run):
        self.run, self.model, self.step = run, run.model, 0
        self.open = contextlib.ExitStack()
        self.entered = False

    @classmethod
    def missing(cls) -> str:
        return cls.needs if cls.needs and importlib.util.find_spec(cls.needs) is None else ""

    def contexts(self):
        """Context managers to hold open from begin to check."""
        return []

    def begin(self, step, batch):
        self.step, self.batch = step, batch
        if not self.entered:
            for context in self.contexts():
                self.open.enter_context(context)
            self.entered = True

    def check(self, loss, norm):
        self.leave()

    def leave(self):
        self.open.close()
        self.entered = False

    def close(self):
        self.leave()

    def read(self, error, warned, printed):
        """The claim in an exception of the tool's own, or None when it is a crash."""
        return None


class Ours(Tool):
    title = "StepGuard (ours)"
    names_modules = True

    def __init__(self, run):
        super().__init__(run)
        from nan_lab.guard import StepGuard

        optimizers = run.optimizers if len(run.optimizers) > 1 else run.optimizers[0]
        self.guard = StepGuard(run.model, run.forward, optimizers, run.scaler)
        self.begin = self.guard.begin
        self.check = self.guard.check

    def read(self, error, warned, printed):
        report = getattr(error, "report", None)
        if report is None:
            return None
        fields = ("op", "line", "module", "node", "phase", "step", "confirmed")
        return Found(**{name: getattr(report, name) for name in fields})


class LossCheck(Tool):
    title = "loss check (Keras, fastai style)"

    def check(self, loss, norm):
        value = loss.item()
        if value != value or value in (float("inf"), -float("inf")):
            raise Found()
        return value, norm


class ClipErrorIfNonfinite(Tool):
    title = "clip_grad_norm_(error_if_nonfinite=True)"

    def check(self, loss, norm):
        limit = float("inf") if norm is None else self.run.clip
        nn.utils.clip_grad_norm_(self.model.parameters(), limit, error_if_nonfinite=True)

    def read(self, error, warned, printed):
        return Found() if "is non-finite, so it cannot be clipped" in str(error) else None


class GradScan(Tool):
    title = "scan every .grad"
    names_modules = True

    def check(self, loss, norm):
        for name, p in self.model.named_parameters():
            if p.grad is not None and bad(p.grad):
                raise Found(module=name.rpartition(".")[0])


class DetectAnomaly(Tool):
    title = "torch.autograd.set_detect_anomaly"

    def contexts(self):
        return [torch.autograd.detect_anomaly()]

    def read(self, error, warned, printed):
        node = re.search(r"Function '(\w+)' returned nan values", str(error))
        lines = re.findall(r'File "([^"]+)", line (\d+)', "\n".join(warned))
        own = [f"{name}:{number}" for name, number in lines if "site-packages" not in name]
        return node and Found(node=node[1], line=own[-1] if own else "")


class HuggingFace(Tool):
    title = "Hugging Face DebugUnderflowOverflow"
    names_modules = True
    needs = "transformers"

    def __init__(self, run):
        super().__init__(run)
        from transformers.debug_utils import DebugUnderflowOverflow

        self.debug = DebugUnderflowOverflow(run.model)

    def read(self, error, warned, printed):
        if not str(error).startswith("DebugUnderflowOverflow: inf/nan detected"):
            return None
        frames = re.findall(r"^ {18}(\S*) \w+$", printed, flags=re.MULTILINE)
        return Found(module=frames[-1] if frames else "")


class ModuleHooks(Tool):
    """Written from the description of fairseq's NanDetector: hooks on every module look at its
    output in the forward pass and at its input gradient in the backward pass, and keep the name
    of the first that is not finite."""

    title = "module hooks, fairseq style"
    names_modules = True

    def __init__(self, run):
        super().__init__(run)
        self.first = ""
        for name, module in run.model.named_modules():
            module.register_forward_hook(lambda m, i, out, name=name: self.look(name, out))
            module.register_full_backward_hook(lambda m, i, out, name=name: self.look(name, i))

    def look(self, name, values):
        if not self.first and bad(values):
            self.first = f"{name} "

    def check(self, loss, norm):
        if self.first or bad(loss):
            raise Found(module=self.first.strip())


class RaisingMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if bad(out):
            raise Found(op=func._schema.name.split("::")[1], line=user_line())
        return out


class DispatchMode(Tool):
    title = "NaN + Inf dispatch mode"

    def contexts(self):
        return [RaisingMode()]


class TorchDebugMode(Tool):
    """DebugMode with stack traces (in backward: of the forward call) and a hook on every output."""

    title = "torch DebugMode + own hook"
    needs = "torch.utils._debug_mode"

    def contexts(self):
        from torch.utils._debug_mode import DebugMode

        hooks = DebugMode.dispatch_hooks(log_hook=self.look, pre_log_hook=self.remember)
        return [DebugMode(record_stack_trace=True), hooks]

    def remember(self, func, types, args, kwargs, call):
        self.call = call

    def look(self, func, types, args, kwargs, result):
        if not bad(result):
            return {}
        lines = re.findall(r'File "([^"]+)", line (\d+)', self.call.fwd_stack_trace or "")
        own = [f"{name}:{number}" for name, number in lines if "site-packages" not in name]
        line = own[-1] if own else user_line()
        raise Found(op=func._schema.name.split("::")[1], line=line)


class Sherlorch(Tool):
    title = "sherlorch"
    names_modules = True
    needs = "sherlorch"

    def contexts(self):
        import sherlorch

        self.tracker = sherlorch.trace(capture_stack=True)
        return [self.tracker]

    def begin(self, step, batch):
        super().begin(step, batch)
        self.tracker.watch(self.model, name="model")

    def check(self, loss, norm):
        if not self.tracker.has_issue(loss):
            return self.leave()
        first = min(self.tracker.diagnose(loss).culprits, key=lambda node: node.seq)
        module = (first.module_path or "").removeprefix("model").removeprefix(".")
        raise Found(op=first.op_name, line=first.location or "", module=module)


class Torchlens(Tool):
    """Looks at one given step, so it is told which: the first with a bad loss or gradient."""

    title = "torchlens (told the step)"
    needs = "torchlens"
    names_modules = True
    told_the_step = True

    def check(self, loss, norm):
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if bad(loss) or bad([g.coalesce().values() if g.is_sparse else g for g in grads]):
            raise self.look()

    def look(self):
        import torchlens

        run, batch = self.run, self.batch

        class Step(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = run.model

            def forward(self, unused):
                return run.forward(batch)

        def claim(op, line, module):
            module = (module or "").removeprefix("inner").removeprefix(".")
            return Found(op=op or "", line=line or "", module=module)

        found = torchlens.debug.find_nan(Step(), torch.zeros(1))
        if found.found:
            return claim(found.func_name, found.source_line, found.module_address)
        options = torchlens.options.CaptureOptions(save_grads=True)
        trace = torchlens.trace(Step(), torch.zeros(1), capture=options)
        trace.log_backward(trace[trace.output_layers[0]].out)
        try:
            birth = torchlens.debug.bisect_nan_backward(trace).birth
        except ValueError:  # a gradient inside the loss was a backward pass of its own
            birth = torchlens.debug.bisect_nan_backward(trace, bwd=2).birth
        if birth is None:
            return Found()
        # Its own source_line is the outermost call; the stack behind it knows the innermost.
        stack = trace[birth.op_label].code_context if birth.op_label else []
        lines = [f"{f.file}:{f.line_number}" for f in stack if f.func_name == "forward"]
        op = re.sub(r"_\d.*$", "", birth.op_label or "")
        return claim(op, lines[-1] if lines else birth.source_line, birth.module)


TOOLS = {
    "ours": Ours,
    "loss": LossCheck,
    "clip": ClipErrorIfNonfinite,
    "grads": GradScan,
    "anomaly": DetectAnomaly,
    "huggingface": HuggingFace,
    "hooks": ModuleHooks,
    "mode": DispatchMode,
    "debugmode": TorchDebugMode,
    "sherlorch": Sherlorch,
    "torchlens": Torchlens,
}

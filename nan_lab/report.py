"""The words of a report on a step that was not finite."""

import dataclasses
import math

import torch

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
    "std": "a spread needs two values: leave it out for a single one",
}
ADVICE |= {
    name: "the product does not fit its dtype: scale the operands first, or use bfloat16"
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")
}
PROOF = {
    "norm": "each gradient is finite, and so is their norm in float64",
    "scaler": "at scale 1 the step is finite",
}
NOT_REPRODUCED = (
    "the replay is finite, so no operation is named. The cause is not in what the step computes "
    "from its batch, weights and torch's random numbers: look for randomness of Python or NumPy, "
    "a counter in the model, autocast outside of forward, a gradient hook, or a kernel's fault"
)
NO_BIRTH = "no operation made it: a non-finite constant in the code, or data that is no tensor"
BATCH_WRITTEN = (
    "this step wrote into its batch, so it cannot be run again and no operation is named; from "
    "the next step on the guard keeps a copy"
)
PARAMETERS_MOVED = (
    "the parameters changed between begin and check, so this is not the step that failed and no "
    "operation is named: call check before optimizer.step"
)


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
    tensor: str = ""  # the batch tensor, parameter or gradient that is to blame
    operands: list = ()
    first_bad: str = ""
    also_needed: list = ()
    note: str = ""
    ranks: list = ()
    loss: float = math.nan
    grad_norm: float = math.nan
    scale: float | None = None
    last: list = ()  # (loss, gradient norm)

    def __str__(self):
        step = "" if self.step is None else f"step {self.step}, "
        scale = "" if self.scale is None else f", loss scale {self.scale:g}"
        proof = PROOF.get(self.phase, "with finite numbers in its place the step is finite")
        sure = proof if self.confirmed else "no"
        # Backward, the forward operation is the one to change: SqrtBackward0 -> sqrt.
        op = self.node.removesuffix("Backward0").lower() or self.op.rstrip("_")
        rows = {
            f"{step}phase {self.phase or 'unknown'}": self.kind or "not finite",
            "loss": f"{self.loss:g}, gradient norm {self.grad_norm:g}{scale}" if step else "",
            "tensor": self.tensor,
            "operation": self.op + (self.node and f", run by {self.node}"),
            "module": self.module,
            "line": f"{self.line}  {self.source}".strip(),
            **{f"operand {i}": text for i, text in enumerate(self.operands)},
            "first bad": self.first_bad,
            "confirmed": f"{sure} (replays: {self.replays})",
            "also needed": "; ".join(self.also_needed),
            "note": self.note,
            "ranks": ", ".join(map(str, self.ranks)),
            "last steps": ", ".join(f"({loss:.4g}, {norm:.4g})" for loss, norm in self.last),
            "next": ADVICE.get(self.phase, ADVICE.get(op, "")),
        }
        return "\n  ".join(f"{key}: {text}" for key, text in rows.items() if text)


def describe(x):
    """One line: dtype, shape, range of the finite entries, and how many are 0, NaN, inf."""
    if not isinstance(x, torch.Tensor):
        return repr(x)
    text = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    finite = x[x.isfinite()]
    if finite.numel() and not x.is_complex():
        text += f", {finite.min().item():.4g} to {finite.max().item():.4g}"
    counts = {"zero": x == 0, "nan": x.isnan(), "inf": x.isinf()}
    return text + "".join(f", {n.sum().item()} {name}" for name, n in counts.items() if n.any())


def kind_of(values):
    return "+".join(["inf"] * bool(values.isinf().any()) + ["nan"] * bool(values.isnan().any()))

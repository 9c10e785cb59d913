"""Grades a training loop by what it does in situations it has not seen; never by its source.

The rows of a `Grade`, in the order a person would mend them; their names do not change:

contract: a generator that draws each batch once, trains on it, yields one loss tensor with one
    element for it, raises nothing on a healthy start and ends with the loader.
loss value: the yielded loss is the float64 cross entropy within 1e-3, at logit gaps 0, 5, 20, 110
    and 300, for right and for wrong predictions; no step is left out in silence.
loss gradient: the gradient with respect to the logits is (p - y) / B in the same situations.
clipping: a spike is clipped by the global norm of all parameters (max_norm 0.1 to 5), or left out
    with a report, and a small gradient passes unchanged.
loss scale: the size of the update does not depend on the loss scale, and in float16 a gradient
    too small for float16 still arrives, because the loss is scaled.
step order: each batch moves the weights once, along its own gradient alone, and after an
    overflow the scaler lowers its scale.
bad input: a NaN or inf in x is reported at the very step, and the weights are still finite.
overflow: an overflow in the forward pass, whether the loss is NaN or inf, is reported at the very
    step, and the weights are still finite.
non-finite gradient: a NaN or inf gradient under a finite loss leaves the weights finite; where no
    scaler skips the step (bfloat16), it is reported at the very step as well.
false alarm: nothing is reported on a healthy run, nor when the scaler skips a step as it should.
mixed precision: the forward pass runs in float16 or bfloat16 under autocast; parameters stay
    float32.
architecture: the model's modules, the names and the shapes in its state_dict stay as they were.
learning: at least 85 % of the digits are right after three ordinary epochs.
global state: default dtype, grad mode, autocast, seeds, warning filters are left as found.

Bonus rows, not needed to pass: "gradient reported" (a non-finite gradient under a finite loss is
reported even where the scaler skips it) and "soft labels" (the loss is right for labels that are
not one-hot, too).

"Reported at the very step" is an exception raised while that step's batch is in hand, whose text
or attribute carries the step's number (from 0, over the whole run), or a `warnings.warn` that
names it, for a loop that skips the step and goes on.

Each fault fails the row that it belongs to. A row that another fault keeps from being judged has
`passed=None`: the gradient where the loss value is wrong, the accuracy where anything is. A loop
that cannot be graded at all (it breaks the contract, alters the model, stops a healthy start with
an alarm or calls the scaler in an order that the scaler refuses) gets that one row only.
"""

from dataclasses import dataclass

from nan_lab import exam_criteria as criteria
from nan_lab import exam_situations as situations
from nan_lab.exam_containment import contained
from nan_lab.exam_criteria import Row
from nan_lab.exam_mysteries import check_mystery, mystery

__all__ = ["Grade", "Row", "check_mystery", "grade", "mystery"]

GAUGE = {True: "yes", False: "NO", None: "not judged"}


@dataclass(frozen=True)
class Grade:
    """What `grade` found. JupyterLab shows it as a table, `print` as text."""

    rows: tuple

    @property
    def passed(self):
        return all(row.passed for row in self.rows if not row.bonus)

    @property
    def _headline(self):
        if self.passed:
            return "Passed: nothing is left open."
        count = sum(row.passed is False for row in self.rows if not row.bonus)
        return f"Not passed: {count} to mend, from the top."

    def _cells(self):
        for row in self.rows:
            name = f"{row.name} (bonus)" if row.bonus else row.name
            yield name, GAUGE[row.passed], row.why, row.see if row.passed is False else ""

    def __str__(self):
        lines = [self._headline]
        for name, gauge, why, see in self._cells():
            lines.append(f"{name:<25} {gauge:<10} {why}" + (f" See {see}." if see else ""))
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_markdown_(self):
        lines = [f"**{self._headline}**", "", "| criterion | passed | why | see |", "|-|-|-|-|"]
        for cells in self._cells():
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return "\n".join(lines)


def grade(loop):
    """Run `loop` in every situation, on the CPU in about 3 s, and return its `Grade`.

    Raises nothing for anything that the loop does, and leaves the global state as it was; a
    KeyboardInterrupt is the user's and passes.
    """
    try:
        with contained():
            return Grade(tuple(_rows(loop)))
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        why = f"It leaves the model or the loss in a state that cannot be graded ({said})."
        return Grade((Row("contract", False, why),))


def _rows(loop):
    start = situations.healthy(loop, 6)
    gate = _gate(start)
    if gate:
        return [gate]
    runs = {
        "healthy": situations.healthy(loop, 168),
        "skips": situations.healthy(loop, 8, scale=2.0**24),
        "small": situations.updates(loop, situations.SMALL_SCALE),
        "large": situations.updates(loop, situations.LARGE_SCALE),
    }
    runs |= {kind: situations.bad_input(loop, kind) for kind in ("nan", "inf", "overflow")}
    runs["inf loss"] = situations.inf_loss(loop)
    runs |= {f"{kind} gradient": situations.bad_gradient(loop, kind) for kind in ("nan", "inf")}
    losses = {policy: situations.losses(loop, policy) for policy in ("cuda", "native")}
    everything = [start, *runs.values(), *(run for run, _ in losses.values())]
    for run in everything:
        if run.problem:
            return [Row("contract", False, run.problem)]
    if runs["healthy"].ended and runs["healthy"].yields < 168:
        return [Row("contract", False, "It ends before the loader does.")]

    order = criteria.step_order(runs["small"], runs["skips"])
    value, gradient, soft, factor = criteria.loss_rows(losses, order.passed)
    fair = {"loss": value.passed and gradient.passed, "order": order.passed}
    rows = [
        Row("contract", True, "One batch, one step, one loss."),
        value,
        gradient,
        criteria.clipping(
            runs["small"], losses["cuda"][0], factor, order.passed, all(fair.values())
        ),
        criteria.loss_scale(runs["small"], runs["large"], losses["cuda"], factor, fair),
        order,
        criteria.bad_input(runs),
        criteria.overflow(runs, value.passed),
        criteria.bad_gradient(runs, factor),
        criteria.false_alarm(runs),
        criteria.mixed_precision(everything),
        criteria.architecture(everything),
    ]
    rows.append(criteria.learning(runs["healthy"], all(row.passed for row in rows)))
    rows += [criteria.global_state(everything), criteria.gradient_reported(runs), soft]
    return rows


def _gate(run):
    """The one row of a loop that cannot be graded, or None."""
    if run.problem:
        return Row("contract", False, run.problem)
    if not run.same_model:
        return criteria.architecture([run])
    if not run.float32:
        return criteria.mixed_precision([run])
    if run.error is not None:
        if run.last >= 0 and run.from_scaler():
            why = f"The scaler refuses the order of its calls at step {run.last}: {run.said}"
            return Row("step order", False, why)
        if run.last >= 0 and run.reports(run.last):
            return Row("false alarm", False, f"A healthy step {run.last} was stopped: {run.said}")
        at = f"at step {run.last} of a healthy run" if run.last >= 0 else "before the first batch"
        return Row("contract", False, f"It raised {at}: {run.said}")
    if run.yields < 6 or len(run.steps) < 6:
        why = f"Of 6 batches it drew {len(run.steps)}, and it yielded {run.yields} losses."
        return Row("contract", False, why)
    if not all(step.forwards for step in run.steps):
        return Row("contract", False, "The model it was given is never called.")
    if not all(criteria.is_of(step.x, step.forwards) for step in run.steps):
        return Row("contract", False, "The model sees other data than the loader's batch.")
    return None

"""The criteria of the exam: what a run in a situation says about the loop. `exam` lists them."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nan_lab.exam_situations import (
    BAD_STEPS,
    LOSS_SCALE,
    MEDIUM,
    PEAK,
    SMALL,
    SPIKE,
    accuracy,
    reference_gradient,
)

SEE = {
    "contract": "01_the_logarithm_of_zero",
    "loss value": "01_the_logarithm_of_zero",
    "loss gradient": "01_the_logarithm_of_zero",
    "clipping": "02_missing_clipping",
    "loss scale": "05_the_loss_scaler",
    "step order": "05_the_loss_scaler",
    "bad input": "07_the_bad_batch",
    "overflow": "04_fp16_range_against_bf16",
    "non-finite gradient": "03_no_guard",
    "false alarm": "05_the_loss_scaler",
    "mixed precision": "04_fp16_range_against_bf16",
    "architecture": "04_fp16_range_against_bf16",
    "learning": "06_learning_rate_and_warm_up",
    "global state": "03_no_guard",
    "gradient reported": "03_no_guard",
    "soft labels": "01_the_logarithm_of_zero",
}
BONUS = ("gradient reported", "soft labels")


@dataclass(frozen=True)
class Row:
    """One criterion: `passed` is True, False, or None where another fault hides the answer."""

    name: str
    passed: bool | None
    why: str

    @property
    def see(self):
        """The notebook that treats it."""
        return SEE[self.name]

    @property
    def bonus(self):
        return self.name in BONUS


def loss_rows(losses, ordered):
    """Judge `{policy: (run, names)}`: rows for value, gradient, soft labels; the loss factor.

    ordered: whether each batch has its own step; if not, the gradient's size is not known.

    The factor is what the loop multiplies the loss by before backward: 1, the loss scale, another
    number, or None where no gradient was seen.
    """
    value, gradient, soft, factor = "", "", True, None
    for policy, (run, names) in losses.items():
        for i, (step, (gap, kind)) in enumerate(zip(run.steps, names, strict=False)):
            if step.loss is None and run.error is None and not (value or run.reports(i)):
                value = f"{_where(gap, kind, policy)} it yields no loss: the step is left out."
            if value or not step.forwards or not step.before.isfinite().all():
                continue
            where = _where(gap, kind, policy)
            logits = torch.cat([call[1].double() for call in step.forwards])[-len(step.y) :]
            target = step.y.double()
            if step.loss is not None and not _close(step, logits, target, policy):
                if kind == "soft labels" and math.isfinite(step.loss):
                    # One-hot labels are the contract: nll_loss and kl_div are right there.
                    soft = False
                    continue
                expected = abs(F.cross_entropy(logits, target).item())
                value = f"{where} the loss is {step.loss:.1f}, cross entropy {expected:.1f}."
                continue
            found = step.with_gradient
            if found is None or len(found[2]) != len(target):
                continue
            wanted = (logits.softmax(-1) - target) / len(target)
            if factor is None:  # gap 0 comes first, where every entry is far from 0
                factor = (found[2] * wanted).sum().item() / (wanted**2).sum().item()
                factor = next((f for f in (1.0, LOSS_SCALE) if abs(factor / f - 1) < 0.02), factor)
            if not gradient and not _close_gradient(found[2], logits, target, factor):
                gradient = f"{where} the gradient is not (p - y) / B, though the loss is right."
        if run.error is not None and not value and run.steps[-1].before.isfinite().all():
            gap, kind = names[max(run.last, 0)]
            value = f"{_where(gap, kind, policy)} it raised {run.said}"
    if not gradient and factor is None:
        gradient = "No gradient reaches the logits."
    if (
        not gradient
        and ordered
        and factor not in (1.0, LOSS_SCALE)
        and losses["cuda"][0].used_scaler
    ):
        gradient = f"Its size is wrong: {factor / LOSS_SCALE:.1f} times (p - y) / B."
    judged = None if value else not gradient
    return (
        Row("loss value", not value, value or "Cross entropy at every logit gap from 0 to 300."),
        Row("loss gradient", judged, MEND if value else gradient or "(p - y) / B."),
        Row("soft labels", None if value else soft, MEND if value else SOFT[soft]),
        factor,
    )


SOFT = {
    True: "Right for labels that are not one-hot, too.",
    False: "Of labels that are not one-hot the loss is not the cross entropy.",
}
MEND = "Mend the rows above first, then grade again."


def _where(gap, kind, policy):
    return f"At a logit gap of {gap} ({kind}, {policy} autocast policy)"


def _close(step, logits, target, policy):
    expected = F.cross_entropy(logits, target).item()
    tolerance = 1e-3 * expected + 1e-5
    if policy == "native":
        # The CPU's own policy leaves log_softmax in the half dtype: bfloat16 keeps 8 bits of
        # the largest logit and of the loss. A missing fused loss is NaN here, or off by 2 and more.
        tolerance = 2**-8 * (logits.abs().max().item() + 3)
    return abs(step.loss - expected) <= tolerance


def _close_gradient(found, logits, target, factor):
    if not factor:
        return False
    p, count = logits.softmax(-1), len(target)
    error = (found / factor - (p - target) / count).norm().item()
    # p and y may reach the logits on two ways, each rounded to bfloat16 (2^-8), twice; half a unit
    # of float16's smallest number in each entry of the scaled gradient; float32's 2^-24 in p.
    least = math.sqrt(p.numel()) * (2**-24 / abs(factor) + 2**-23 / count)
    return error <= 2**-7 * (p + target).norm().item() / count + least


def _unreadable(step):
    """Whether the loop's own lr (0.125 was given) makes a step as small as float32's rounding."""
    return step.lr is not None and step.lr < 2**-12


def _size(step):
    """The gradient norm that a step of plain SGD stands for, or None where the lr is too small."""
    if _unreadable(step):
        return None
    return (step.after - step.before).norm().item() / (step.lr or 0.125)


def _along(run, step):
    """Cosine between a step and the downhill direction of its own batch; nan where none."""
    reference = reference_gradient(run, step)
    moved = step.before - step.after
    if reference is None or not moved.any():
        return math.nan
    return F.cosine_similarity(reference, moved, dim=0).item()


def step_order(small, skips):
    name = "step order"
    for i in (MEDIUM, SMALL):
        if i > small.last:
            return Row(name, None, MEND)
        step = small.steps[i]
        if step.moves > 1:
            return Row(name, False, f"The optimizer stepped {step.moves} times for one batch.")
        calls = [call for call in step.calls if call in ("step", "update")]
        if "step" in calls and calls != ["step", "update"]:
            return Row(name, False, f"The scaler's calls were {', '.join(step.calls)}.")
        if _unreadable(step):
            continue
        if not (step.after - step.before).any():
            return Row(name, False, f"Step {i} did not move the weights at all.")
        if not _along(small, step) > 0.98:  # gradients left over from the batch before: 0.82
            why = f"Step {i} went another way than the gradient of its own batch."
            return Row(name, False, why)
    first = skips.steps[0]
    if "update" in first.calls and len(skips.steps) > 1 and first.with_gradient is not None:
        overflowed = not first.with_gradient[2].isfinite().all()
        if overflowed and skips.steps[1].scale >= first.scale:
            return Row(name, False, "After an overflow the loss scale did not fall.")
    return Row(name, True, "Each batch moved the weights once, along its own gradient.")


def clipping(small, losses, factor, ordered, fair):
    """Unclipped, the spike's norm is 170; the largest max_norm allowed is 5, times 1.5.

    ordered: the step order is right. fair: the loss is, too, so that the gradients' own sizes and
    directions are known.
    """
    name = "clipping"
    if small.last < SPIKE:
        return Row(name, None, MEND)
    for step in small.steps[SPIKE:]:
        size = _size(step)
        if step.finite and (size or 0) <= 7.5:
            continue
        grown = (
            f"like one of norm {2 ** math.floor(math.log2(size))} or more"
            if step.finite
            else "away"
        )
        why = f"A spike (gradient norm over 100) moved the weights {grown}; at most 5 is allowed."
        return Row(name, False, why)
    if any(bool(s.before.isfinite().all()) and not s.finite for s in losses.steps):
        return Row(name, False, "A gradient of 0 turns the weights into NaN (0 / 0).")
    step = small.steps[SPIKE]
    own_scale = factor not in (None, 1.0, LOSS_SCALE)  # may overflow where the given one does not
    dropped = _size(step) == 0 and not small.reports(SPIKE)
    if ordered and dropped and not own_scale and _spike_is_finite(small):
        return Row(name, False, "A finite spike is thrown away without a word, not clipped.")
    if _size(step) and fair:
        if not _along(small, step) > 0.98:
            return Row(
                name, False, "A spike is cut, but not by the global norm: its direction changed."
            )
        if small.last >= PEAK and _by_another_norm(step, small.steps[PEAK]):
            return Row(name, False, "Spikes are cut by another norm than the global L2 norm.")
        pair = [small.steps[i] for i in (MEDIUM, SMALL)]
        if all(_size(step) for step in pair):
            ratio = _size(pair[0]) / _size(pair[1])
            expected = [reference_gradient(small, step).norm().item() for step in pair]
            # Both are under every max_norm, one is twice the other; always rescaled they are equal.
            if not 0.8 < ratio / (expected[0] / expected[1]) < 1.25:
                why = "Small gradients are changed, too; a norm under 2^-4 must pass as it is."
                return Row(name, False, why)
    return Row(name, True, "A spike with a gradient norm over 100 moves the weights by at most 5.")


def _spike_is_finite(small):
    """Whether the spike's gradient was there to be clipped: a NaN one is rightly skipped."""
    reference = reference_gradient(small, small.steps[SPIKE])
    return reference is not None and bool(reference.isfinite().all())


def _by_another_norm(*spikes):
    """Whether two spikes are cut to the same L1 or largest entry, and to different L2 norms."""
    moves = [(step.after - step.before) / (step.lr or 1) for step in spikes]
    ratio = {p: (moves[0].norm(p) / moves[1].norm(p)).item() for p in (1, 2, math.inf)}
    same = any(abs(ratio[p] - 1) < 0.05 for p in (1, math.inf))
    return same and not 0.8 < ratio[2] < 1.25


def loss_scale(small, large, losses, factor, fair):
    name = "loss scale"
    for i in (MEDIUM, SMALL):
        if i > min(small.last, large.last):
            return Row(name, None, MEND)
        if not fair["order"]:
            return Row(name, None, MEND)
        sizes = [_size(run.steps[i]) for run in (small, large)]
        if sizes[0] and sizes[1] is not None and not 0.8 < sizes[1] / sizes[0] < 1.25:
            power = round(math.log2(sizes[1] / sizes[0])) if sizes[1] else None
            change = f"2^{power} times as large" if power is not None else "zero"
            why = f"At a loss scale of 2^15 the update is {change}, compared with a scale of 1."
            return Row(name, False, why)
    run, names = losses
    tiny = next((i for i, name in enumerate(names) if name == (16, "right prediction")), None)
    if fair["loss"] and tiny <= run.last and run.steps[tiny].forwards:
        found, half = run.steps[tiny].with_gradient, run.steps[tiny].forwards[0][1].dtype
        if found is not None and half == torch.float16 and not found[2].any():
            why = "A gradient of 2^-28 arrives as 0: float16 needs the scaled loss."
            return Row(name, False, why)
        if half == torch.float16 and factor not in (None, LOSS_SCALE) and not run.used_scaler:
            return Row(name, False, "The scaler that the loop is given is not used, in float16.")
    return Row(name, True, "The update is the same at a loss scale of 1 and of 2^15.")


def _unreported(run, step, what):
    """What is wrong with the report of a bad step: a sentence, or "" if nothing is."""
    if step > run.last:
        return None
    if not all(s.finite for s in run.steps[step:]):
        return f"After {what} at step {step} the weights are not finite."
    if run.reports(step):
        return ""
    if run.error is None:
        return f"{what} at step {step} was not reported: no exception, no warning names the step."
    if run.last > step:
        return f"{what} at step {step} was reported late, at step {run.last}: {run.said}"
    return (
        f"{what} at step {step} was reported without that number (steps count from 0): {run.said}"
    )


def _report_row(name, problems, good):
    failed = [problem for problem in problems if problem]
    if failed:
        return Row(name, False, failed[0][0].upper() + failed[0][1:])
    if None in problems:
        return Row(name, None, MEND)
    return Row(name, True, good)


def bad_input(runs):
    problems = [_unreported(runs[kind], BAD_STEPS[kind], what) for kind, what in INPUTS]
    steps = " and ".join(str(BAD_STEPS[kind]) for kind, _ in INPUTS)
    return _report_row("bad input", problems, f"Reported at the very steps, {steps}.")


INPUTS = (("nan", "a NaN in x"), ("inf", "an inf in x"))


def overflow(runs, right_loss):
    """Judge the reports of an overflow; one that makes the right loss inf needs the right loss."""
    kinds = OVERFLOWS if right_loss else OVERFLOWS[:1]
    problems = [_unreported(runs[kind], BAD_STEPS[kind], what) for kind, what in kinds]
    steps = " and ".join(str(BAD_STEPS[kind]) for kind, _ in kinds)
    return _report_row("overflow", problems, f"Reported at the very steps, {steps}.")


OVERFLOWS = (
    ("overflow", "an overflow in the forward pass"),
    ("inf loss", "an overflow that makes the loss inf, not NaN,"),
)


def bad_gradient(runs, factor):
    scaled = factor not in (None, 1.0)  # by the scaler or by one of the loop's own
    problems = []
    if not all(step.finite for step in runs["skips"].steps):
        problems.append("an overflow of the scaled gradient went into the weights.")
    for kind, what in GRADIENTS:
        run, at = runs[f"{kind} gradient"], BAD_STEPS[f"{kind} gradient"]
        if at > run.last:
            problems.append(None)
            continue
        step = run.steps[at]
        if not step.finite:
            problems.append(f"{what} at step {at} went into the weights.")
        elif run.reports(at):
            problems.append("")
        elif (step.after - step.before).any():
            problems.append(f"the optimizer stepped on {what} at step {at}: masked, not skipped.")
        elif not (scaled or run.used_scaler):
            problems.append(_unreported(run, at, what))
        else:
            problems.append("")
    return _report_row("non-finite gradient", problems, "It never reaches the weights.")


GRADIENTS = (("nan", "a NaN gradient"), ("inf", "an inf gradient"))


def gradient_reported(runs):
    steps = {kind: BAD_STEPS[f"{kind} gradient"] for kind, _ in GRADIENTS}
    if all(runs[f"{kind} gradient"].reports(step) for kind, step in steps.items()):
        return Row("gradient reported", True, "Under a finite loss, too.")
    return Row("gradient reported", False, "The scaler skips it without a word.")


def false_alarm(runs):
    name, healthy, skips = "false alarm", runs["healthy"], runs["skips"]
    for run in (healthy, skips):
        if run.error is not None and not run.steps[-1].before.isfinite().all():
            return Row(name, None, MEND)  # an alarm, and a true one
    if healthy.error is not None:
        return Row(name, False, f"A healthy step {healthy.last} was stopped: {healthy.said}")
    if skips.error is not None:
        why = f"The scaler's normal skip at step {skips.last} was taken for a failure: {skips.said}"
        return Row(name, False, why)
    # Two, so that a library's warning with a number in it is no alarm.
    if sum(skips.reports(i) for i in range(len(skips.steps))) > 1:
        return Row(name, False, "The scaler's normal skips are reported like failures.")
    if sum(healthy.reports(i) for i in range(len(healthy.steps))) > 1:
        return Row(name, False, "Healthy steps are reported.")
    small = runs["small"]
    if small.error is not None and small.last < SPIKE:
        return Row(name, False, f"A small, finite gradient was taken for a failure: {small.said}")
    return Row(name, True, "Silent on a healthy run and on the scaler's normal skips.")


def mixed_precision(runs):
    name = "mixed precision"
    if not all(run.float32 for run in runs):
        return Row(name, False, "The parameters do not stay float32.")
    half = [on for step in runs[0].steps for on in step.half]
    if 2 * sum(half) < len(half) or not half:
        return Row(name, False, "The forward pass does not run in half precision under autocast.")
    return Row(name, True, "Half precision under autocast, parameters in float32.")


def architecture(runs):
    name = "architecture"
    if not all(run.same_model for run in runs):
        return Row(name, False, "The modules or the state_dict are not what they were.")
    return Row(name, True, "As it was.")


def learning(run, rest):
    """Judge the accuracy; a low one counts only where nothing else (`rest`) explains it."""
    name = "learning"
    if run.error is None and all(step.finite for step in run.steps) and accuracy(run) >= 0.85:
        return Row(name, True, "More than 85 % of the digits are right after three epochs.")
    if not rest:
        return Row(name, None, MEND)
    return Row(name, False, "Less than 85 % of the digits are right after three ordinary epochs.")


def global_state(runs):
    changed = sorted(set().union(*(run.changed for run in runs)))
    if changed:
        why = f"It leaves changed: {', '.join(changed)}. (The exam has put it back.)"
        return Row("global state", False, why)
    return Row("global state", True, "As it was found.")


def is_of(x, forwards):
    """Whether an input is this batch, perhaps normalised: another batch correlates at 0."""
    rows = torch.cat([call[0].double() for call in forwards])
    for given in (rows, *(call[0].double() for call in forwards)):
        if given.shape == x.shape:
            pair = [(t - t.mean(0)).flatten() for t in (given, x.double())]
            if F.cosine_similarity(*pair, dim=0) > 0.4:
                return True
    return False

"""Six recorded runs whose loops are not shown, and the questions that their plots answer."""

from dataclasses import dataclass, replace

import torch

from nan_lab import figures, loops, record, triggers

QUESTIONS = ("step", "phase", "cause", "cure")
LATE = 30.0  # mystery 5's learning rate from step 100 on, a thousand times the one before


@dataclass(frozen=True)
class _NowAndThen:
    """Every `every`-th batch from `cause_step` on is changed as `trigger` says."""

    trigger: triggers.Trigger
    cause_step: int
    every: int

    def apply(self, step, x, y):
        due = step >= self.cause_step and (step - self.cause_step) % self.every == 0
        return self.trigger.change(x, y) if due else (x, y)


# The runs as record.run takes them; the tests rerun them with probes and assert the margins.
RUNS = {
    1: {"loop": loops.broken, "trigger": triggers.raw_pixels(140)},
    2: {
        "loop": loops.without_clipping,
        "trigger": triggers.mislabelled_spike(97),
        "init_scale": 1024.0,
    },
    3: {
        "loop": loops.bfloat16_without_guard,
        "trigger": triggers.nan_pixel(150),
        "dtype": torch.bfloat16,
    },
    4: {"loop": loops.clip_before_unscale},
    5: {
        "loop": loops.fixed,
        "dtype": torch.float32,
        "lr": lambda step: 0.03 if step < 100 else LATE,
    },
    6: {"loop": loops.without_guard, "trigger": _NowAndThen(triggers.huge_pixels(), 40, 20)},
}

FLOAT16 = "float16 under autocast, GradScaler(init_scale={}), SGD(lr=0.03, momentum=0.9)"
OUTSIDE = {
    1: FLOAT16.format(65536) + ". x is finite in every batch; no logit is above 1000.",
    2: FLOAT16.format(1024) + ". The loss is F.cross_entropy; x is finite in every batch.",
    3: "bfloat16 under autocast, no scaler, SGD(lr=0.03, momentum=0.9), gradients clipped to norm "
    "1. The loss is F.cross_entropy.",
    4: FLOAT16.format(65536) + ", max_norm 1. The loss is F.cross_entropy; x is finite in every "
    "batch.",
    5: "float32, no scaler, SGD with momentum 0.9 and a learning-rate schedule, gradients clipped "
    "to norm 1. The loss is F.cross_entropy; every batch has been checked.",
    6: FLOAT16.format(65536) + ", gradients clipped to norm 1. The loss is F.cross_entropy; x is "
    "finite, in float32, in every batch.",
}


# (mystery, question): the right choice, then each wrong one with what speaks against it.
ANSWERS = {
    (1, "step"): (
        140,
        {
            139: "The loss of step 139 is finite and low: the line still runs there.",
            141: "Step 141 is bad, too, but the marks begin one step earlier.",
            "none": "The upper edge of the loss panel is full of NaN marks, up to the end.",
        },
    ),
    (1, "phase"): (
        "loss",
        {
            "input": "x is finite in every batch, as the outside says.",
            "forward": "No logit is above 1000; float16 goes up to 65504. The logits are finite.",
            "backward": "The loss is NaN at the same step, and it is computed before backward.",
            "optimizer": "Every bad step is skipped, so no update can have done it.",
        },
    ),
    (1, "cause"): (
        "log of a zero",
        {
            "spike, not clipped": "The gradient norm is calm up to step 139. A spike would be a "
            "finite, high point before the NaN.",
            "NaN in the batch": "x is finite in every batch, as the outside says.",
            "float16 overflow": "It would take logits above 65504, and none is above 1000.",
            "learning rate too high": "The loss falls for two epochs and does not rise before the "
            "NaN.",
        },
    ),
    (1, "cure"): (
        "F.cross_entropy on the logits",
        {
            "add clipping": "There is nothing to clip: the gradient is calm, then NaN, and a NaN "
            "stays one under clipping.",
            "a larger init_scale": "The scale falls because the steps are bad, and not the other "
            "way round.",
            "skip the bad batches": "Every batch from step 140 on is bad: nothing would be left to "
            "train on.",
        },
    ),
    (2, "step"): (
        97,
        {
            96: "Loss and gradient norm of step 96 are as low as before.",
            98: "The loss is high there because of the update before it: the norm's peak is "
            "one step earlier.",
            "none": "All values are finite, yet the gradient norm jumps to more than 100 times its "
            "usual size at one step.",
        },
    ),
    (2, "phase"): (
        "backward",
        {
            "input": "x is finite in every batch; what hits the weights is the gradient.",
            "forward": "The loss is high at that step, but finite: nothing overflowed.",
            "loss": "The loss is high, but finite, and F.cross_entropy is right; what hits the "
            "weights is the gradient.",
        },
    ),
    (2, "cause"): (
        "spike, not clipped",
        {
            "log of a zero": "That makes NaN, and no value in this run is NaN.",
            "NaN in the batch": "No value in this run is NaN.",
            "float16 overflow": "An overflow is inf or NaN and a skipped step: there is none.",
            "learning rate too high": "The run is calm for 97 steps at this very learning rate.",
        },
    ),
    (2, "cure"): (
        "add clipping after unscale_",
        {
            "F.cross_entropy on the logits": "It is in use already, as the outside says.",
            "a smaller init_scale": "A smaller scale lets even larger spikes through. At 65536 "
            "this one would have overflowed and been skipped.",
            "an assert on the loss": "It would not fire: the loss is finite in all steps.",
        },
    ),
    (3, "step"): (
        150,
        {
            149: "Loss and gradient norm of step 149 are finite and low.",
            151: "Step 151 is NaN because the weights are: the marks begin one step earlier.",
            "none": "Loss and gradient norm are NaN from one step on to the end.",
        },
    ),
    (3, "phase"): (
        "input",
        {
            "forward": "bfloat16 reaches 3e38, and loss and gradient norm are calm before: nothing "
            "was growing.",
            "loss": "F.cross_entropy of finite logits is finite.",
            "backward": "The loss is NaN at the same step, and it is computed before backward.",
            "optimizer": "The loss of step 150 comes before its update, and the update before was "
            "of ordinary size.",
        },
    ),
    (3, "cause"): (
        "NaN in the batch",
        {
            "log of a zero": "The loss is F.cross_entropy, as the outside says.",
            "spike, not clipped": "No peak in the gradient norm comes before the NaN, and the loop "
            "clips.",
            "float16 overflow": "The run is in bfloat16, with the range of float32.",
            "learning rate too high": "Loss and gradient norm are calm up to the NaN.",
        },
    ),
    (3, "cure"): (
        "check the batch before the step",
        {
            "add clipping": "The loop clips. A NaN makes the norm NaN, and so every gradient.",
            "a GradScaler": "It would save the weights by skipping the step, without a word about "
            "the batch.",
            "lower the learning rate": "A NaN times any learning rate is a NaN.",
        },
    ),
    (4, "step"): (
        "none",
        {
            0: "Step 0 is an ordinary one: finite, at the loss of a guess among ten classes, 2.3.",
            56: "Nothing happens there but the start of the second epoch.",
            140: "Nothing changes there: the loss is as flat before it as after it.",
        },
    ),
    (4, "phase"): (
        "optimizer",
        {
            "input": "x is finite, and the gradient norm is of ordinary size.",
            "loss": "The loss is right for a model that guesses: log(10) = 2.3.",
            "backward": "The gradient norm is of ordinary size. The gradients are there; they do "
            "not arrive.",
        },
    ),
    (4, "cause"): (
        "clipping before unscale_",
        {
            "log of a zero": "That makes NaN, and no value in this run is NaN.",
            "spike, not clipped": "There is no peak in the gradient norm.",
            "float16 overflow": "No step is skipped and the scale does not fall.",
            "learning rate too high": "Then the loss would jump about. This one does not move.",
        },
    ),
    (4, "cure"): (
        "call unscale_ before the clipping",
        {
            "raise the learning rate": "It would have to be 65536 times higher, and wrong again as "
            "soon as the scale moves.",
            "train for more epochs": "The loss has not fallen in four of them: `applied_norm` is "
            "1/65536 at most.",
            "F.cross_entropy on the logits": "It is in use already, as the outside says.",
        },
    ),
    (5, "step"): (
        101,
        {
            99: "The loss of step 99 is low.",
            "none": "All values are finite, yet from one step to the next the loss jumps.",
        },
    ),
    (5, "phase"): (
        "optimizer",
        {
            "input": "Every batch has been checked, and the damage stays when it has gone.",
            "forward": "Nothing is inf or NaN, and float32 has room up to 3e38.",
            "backward": "The gradient norm before the jump is ordinary: the gradient was right, "
            "the step along it too long.",
        },
    ),
    (5, "cause"): (
        "learning rate too high",
        {
            "spike, not clipped": "The gradient norm of the step before the jump is ordinary, and "
            "the loop clips.",
            "log of a zero": "That makes NaN, and no value in this run is NaN.",
            "float16 overflow": "The run is in float32.",
            "NaN in the batch": "No value in this run is NaN.",
        },
    ),
    (5, "cure"): (
        "lower the learning rate",
        {
            "add clipping": "It clips. The update is the learning rate times the norm: a clipped "
            "norm of 1 is too long, too.",
            "bfloat16": "It has less precision and the same range: the steps stay as long.",
            "check the batch before the step": "Every batch has been checked, as the outside says.",
        },
    ),
    (6, "step"): (
        40,
        {
            39: "Loss and gradient norm of step 39 are finite.",
            60: "Step 60 is bad, but it is the second one: the first mark is 20 steps earlier.",
            "none": "Some steps have a NaN loss, and the scale falls at each of them.",
        },
    ),
    (6, "phase"): (
        "forward",
        {
            "input": "x is finite in every batch, as the outside says.",
            "backward": "The loss is NaN at those steps, and it is computed before backward.",
            "optimizer": "The bad steps are skipped, and the next loss is as low as before: the "
            "weights are fine.",
        },
    ),
    (6, "cause"): (
        "float16 overflow in a few batches",
        {
            "log of a zero": "The loss is F.cross_entropy, as the outside says.",
            "NaN in the batch": "x is finite in every batch, as the outside says.",
            "spike, not clipped": "The loop clips, and the gradient norm has no finite peak.",
            "learning rate too high": "Between the bad steps the loss goes on falling.",
        },
    ),
    (6, "cure"): (
        "find these batches and normalise them",
        {
            "a larger init_scale": "It adds a few stairs at the top. The staircase goes down as "
            "long as the bad batches come.",
            "a smaller growth_interval": "It lets the scale climb between the stairs, and hides "
            "that each of these batches is lost.",
            "lower the learning rate": "The logits of these batches overflow because their pixels "
            "are huge, whatever the weights' steps.",
        },
    ),
}


# Where two answers are right: what is said to each.
BOTH_RIGHT = {
    (5, "step"): {
        100: "Its update did the harm; the loss of step 101 is the first to show it.",
        101: "Its loss is the first to show the harm, which the update of step 100 did.",
    },
}


@dataclass(frozen=True)
class Mystery:
    """A run to explain: its `history`, its `outside`, and the `choices` to each question."""

    number: int
    history: record.History
    outside: str

    @property
    def choices(self):
        """The choices to each question, in an order that gives nothing away."""
        return {question: _choices(self.number, question) for question in QUESTIONS}

    def picture(self):
        """The run's timeline; its caption does not tell what there is to find."""
        history = self.history
        shown = [
            ("NaN or inf in the loss", history.first_bad_step is not None),
            ("in the gradient norm", history.first_bad_grad_step is not None),
            ("skipped steps", any(history.skipped)),
        ]
        facts = "; ".join(f"{what}: {'yes' if there else 'no'}" for what, there in shown)
        caption = (
            f"Mystery {self.number} over {len(history.loss)} steps. {facts[0].upper()}{facts[1:]}."
        )
        return figures.Picture(figures.timeline(history).figure, caption)

    def _repr_markdown_(self):
        lines = [
            f"**Mystery {self.number}.** {self.outside}",
            "",
            "| question | choices |",
            "|-|-|",
        ]
        for question, choices in self.choices.items():
            lines.append(f"| `{question}` | " + " · ".join(f"`{c!r}`" for c in choices) + " |")
        return "\n".join(lines)

    def __repr__(self):
        lines = [f"Mystery {self.number}: {self.outside}"]
        for question, choices in self.choices.items():
            lines.append(f"  {question}: " + " | ".join(map(repr, choices)))
        return "\n".join(lines)


def mystery(number):
    """Make mystery run 1 to 6, on the CPU, the same every time, and return the `Mystery`."""
    _check_number(number)
    history = record.run(**RUNS[number], seed=1, device="cpu")
    return Mystery(
        number, replace(history, name=f"mystery {number}", cause_step=None), OUTSIDE[number]
    )


@dataclass(frozen=True)
class Verdict:
    """What `check_mystery` says to each question: (question, given, right or None, reason)."""

    number: int
    lines: tuple

    @property
    def passed(self):
        return all(right for _, _, right, _ in self.lines)

    def __repr__(self):
        out = []
        for question, given, right, reason in self.lines:
            mark = {True: "correct", False: "not this", None: "not attempted"}[right]
            out.append(f"{question}: {mark}" + ("" if right is None else f", {given!r}") + reason)
        return "\n".join(out)


def check_mystery(number, *, step=..., phase=..., cause=..., cure=...):
    """Check the answers to mystery 1 to 6; a wrong one is told what speaks against it.

    step: an integer, or "none" where every step is as it should be. A question that is left out is
    not attempted. Raises ValueError for a phase, cause or cure that is not among the choices.
    """
    _check_number(number)
    given = {"step": step, "phase": phase, "cause": cause, "cure": cure}
    return Verdict(number, tuple(_judge(number, q, answer) for q, answer in given.items()))


def _judge(number, question, answer):
    right, wrong = ANSWERS[number, question]
    if answer is ...:
        return question, answer, None, ""
    if answer in BOTH_RIGHT.get((number, question), ()):
        return question, answer, True, f". {BOTH_RIGHT[number, question][answer]}"
    if answer == right:
        return question, answer, True, "."
    if answer in wrong:
        return question, answer, False, f". {wrong[answer]}"
    if question == "step" and isinstance(answer, int):
        where = "late" if right != "none" and answer > right else "early"
        reason = {
            "late": "Something is wrong at an earlier step already.",
            "early": "Loss and gradient norm of that step are as they should be.",
        }[where]
        return question, answer, False, f". {reason}"
    choices = ", ".join(map(repr, _choices(number, question)))
    raise ValueError(f"{question} must be one of {choices}; got {answer!r}")


def _choices(number, question):
    right, wrong = ANSWERS[number, question]
    choices = {right, *wrong, *BOTH_RIGHT.get((number, question), ())}
    return sorted(choices, key=lambda choice: (isinstance(choice, str), choice))


def _check_number(number):
    if number not in RUNS:
        raise ValueError(f"there are the mysteries 1 to {len(RUNS)}, got {number!r}")

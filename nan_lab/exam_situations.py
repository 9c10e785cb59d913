"""The situations of the exam: models and batches of which the right answer is known beforehand."""

import copy
import math

import torch
import torch.nn.functional as F

from nan_lab import data
from nan_lab.exam_runner import drive, flat
from nan_lab.model import classifier

GAPS = (0, 5, 16, 20, 110, 300)  # exact in float16 and bfloat16
LOSS_BATCH = 24  # no power of two, so that a sum cannot look like a mean with a loss scale
LOSS_SCALE = 8192.0
HUGE = 3e38  # finite in float32 and bfloat16; the sum of a few of them is not
# One early, one after the first epoch of 56; none a number that shapes or losses may have.
BAD_STEPS = {
    "nan": 3,
    "inf": 61,
    "overflow": 67,
    "inf loss": 7,
    "nan gradient": 14,
    "inf gradient": 18,
}
SMALL_SCALE, LARGE_SCALE = 1.0, 2.0**15
MEDIUM, SMALL, SPIKE, PEAK = (
    1,
    2,
    3,
    4,
)  # the steps of `updates`; step 0 is for a warm-up that starts at 0


def seeded(build):
    """Build a model from a fixed seed, whatever the state of the generator."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return build()


def healthy_batches(count, seed=0):
    """`count` batches of 32 from as many epochs as that takes."""
    generator, found = torch.Generator().manual_seed(seed), []
    while len(found) < count:
        found += data.batches(32, generator)
    return found[:count]


def healthy(loop, steps, scale=1024.0):
    """The series' classifier on the digits; at lr 0.1 even max_norm 0.1 learns in three epochs."""
    return drive(
        loop, seeded(classifier), healthy_batches(steps), lr=0.1, momentum=0.9, scale=scale
    )


def bad_input(loop, kind):
    """A run with one NaN or inf in the batch of step BAD_STEPS[kind], or one that overflows."""
    model, batches = seeded(classifier), healthy_batches(BAD_STEPS[kind] + 4)
    x = batches[BAD_STEPS[kind]][0]
    if kind == "overflow":
        # One hidden unit adds up all pixels: 64 * HUGE / 8 is inf in every dtype, and so, with
        # either sign, are all logits of that digit: their softmax is NaN.
        model[0].weight.data[0] = 1 / 8
        x[5] = HUGE
    else:
        x[5, 20] = float(kind)
    return drive(loop, model, batches, lr=0.05, momentum=0.9)


def bad_gradient(loop, kind):
    """A run with one NaN or inf in the gradient of the hidden layer, under a finite loss."""
    return _faulty(loop, BAD_STEPS[f"{kind} gradient"], float(kind))


def inf_loss(loop):
    """A forward overflow that makes a loss of inf, and no NaN: a target's logit is -inf.

    The gradient of the hidden layer is bad, too, so that a loop that checks gradients sees it.
    """
    step = BAD_STEPS["inf loss"]
    target = healthy_batches(step + 1)[step][1][5].bool()

    def change(logits):
        row = torch.arange(len(logits), device=logits.device).eq(5).unsqueeze(1)
        return logits.masked_fill(row & target, -math.inf)

    return _faulty(loop, step, math.inf, change)


def _faulty(loop, step, value, logits=None):

    def change(gradient):
        gradient = gradient.clone()
        gradient[5, 20] = value
        return gradient

    batches = healthy_batches(step + 4)
    return drive(
        loop, seeded(classifier), batches, lr=0.05, momentum=0.9, fault=(step, change, logits)
    )


def losses(loop, policy):
    """Batches whose logits are known: `(run, names)`, one (gap, kind) for each step.

    Pixel 10 * i + c alone is lit, and the weights from it are 0 but for GAPS[i] at class c.
    """
    model = torch.nn.Sequential(torch.nn.Linear(data.PIXELS, data.CLASSES))
    weight = torch.zeros(data.PIXELS, data.CLASSES)
    for i, gap in enumerate(GAPS):
        weight[10 * i : 10 * i + 10] = gap * torch.eye(10)
    model[0].weight.data, model[0].bias.data = weight.T.contiguous(), torch.zeros(10)

    row = torch.arange(LOSS_BATCH)
    chosen, wrong = row % 10, (row + 1 + row // 10) % 10
    batches, names = [], []

    def add(gap, kind, level, target):
        x = torch.zeros(LOSS_BATCH, data.PIXELS)
        x[row, 10 * level + chosen] = 1
        batches.append((x, target))
        names.append((gap, kind))

    def hot(index):
        return F.one_hot(index, 10).float()

    for i, gap in enumerate(GAPS):
        add(gap, "right prediction", i, hot(chosen))
        add(gap, "wrong prediction", i, hot(wrong))
    add(300, "mixed batch", row % len(GAPS), hot(torch.where(row % 4 < 2, chosen, wrong)))
    for i in (1, 3):
        add(GAPS[i], "soft labels", i, 0.75 * hot(chosen) + 0.25 * hot(wrong))
    run = drive(loop, model, batches, lr=0.0, scale=LOSS_SCALE, policy=policy)
    return run, names


def updates(loop, scale):
    """Small gradients, global norms 0.05 and 0.025, then two spikes over 100, finite in float16.

    The norm of the first spike is 6 times its largest entry, that of the second, all of whose
    pixels but one are dark, twice.

    SGD without momentum: a step moves the weights by lr times the gradient it was given. The
    spike's logit gap is 42, so that a loss written by hand still has a gradient there.
    """

    def build():
        first, last = torch.nn.Linear(data.PIXELS, 16), torch.nn.Linear(16, data.CLASSES)
        for layer in (first, last):
            torch.nn.init.zeros_(layer.bias)
            layer.weight.data /= 2
        return torch.nn.Sequential(first, torch.nn.ReLU(), last)

    batches = [
        _balanced(3, 0.25),
        _balanced(1, 0.25),
        _balanced(0, 0.05),
        _balanced(2, 320, roll=1),
        _balanced(2, 1000, roll=1),
    ]
    pixels, labels = batches[PEAK]
    batches[PEAK] = torch.zeros_like(pixels), labels
    batches[PEAK][0][:, 28] = 1000
    return drive(loop, seeded(build), batches, lr=0.125, scale=scale)


def _balanced(seed, factor, roll=0):
    """Three digits of each class, pixels times `factor`, labels moved on by `roll` classes."""
    x, y = data.digits()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    rows = torch.cat([order[y[order] == digit][:3] for digit in range(10)])
    return x[rows] * factor, F.one_hot(y[rows], 10).float().roll(roll, dims=1)


def reference_gradient(run, step):
    """What the gradient that reached the logits makes of the parameters: float64 (n,), or None."""
    found = step.with_gradient
    if found is None:
        return None
    inputs, _, gradient = found
    model = copy.deepcopy(run.model).double()
    _load(model, step.before)
    with torch.enable_grad():
        model(inputs).backward(gradient)
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def _load(model, vector):
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    for p in model.parameters():
        p.grad = None


def accuracy(run):
    """Share of all digits that the run's last weights get right, in float64."""
    model = copy.deepcopy(run.model).double()
    _load(model, flat(run.model))
    x, y = data.digits()
    with torch.no_grad():
        return (model(x.double()).argmax(-1) == y).double().mean().item()

"""Training runs that go non-finite in a known way, and healthy runs that only look as if.

Each case is a small, deterministic training run. Its function builds the run, its docstring says
what goes wrong, and the line that makes the first inf or NaN carries the marker `# <- origin`.
The expected line number is read from this source, so code can move without breaking a test.
Most cases fail at step 3 (counted from 0) and are healthy before it.

`train` is the loop that all of them run in; `PlainCheck` looks at a run with isfinite alone.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

MARK = "# <- origin"
INF = float("inf")
NAN = float("nan")
FP16 = {"device_type": "cpu", "dtype": torch.float16}
BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


@dataclass
class Run:
    """What a user's script holds: a model, forward(batch) -> loss, batches, optimizers, scaler.

    With `accumulate`, each batch is a list of micro-batches, all run before one optimizer step.
    `clip=None` is a loop that neither clips nor computes a gradient norm.
    """

    model: nn.Module
    forward: Callable[[Any], torch.Tensor]
    batches: list
    optimizers: list = field(default_factory=list)
    scaler: torch.amp.GradScaler | None = None
    clip: float | None = 1.0
    accumulate: bool = False

    def __post_init__(self):
        if not self.optimizers:
            self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.01)]


@dataclass(frozen=True)
class Case:
    """A run and the right answer about it; None means "any answer will do".

    `steps` holds the right step (several only where the text says why), `phases` and `ops` the
    right phase and aten names, `modules` the right qualified names ("" is loss code or the root),
    `node` the backward node. An op "" means that "no suspect" is a right answer. `seen` is the
    symptom that isfinite shows without any tool: loss, gradient, norm, buffer, parameter or
    skips. A control has no steps: nothing may be flagged.
    """

    name: str
    build: Callable[[], Run]
    steps: range | tuple[int, ...]
    phases: tuple[str, ...]
    ops: tuple[str, ...] | None
    modules: tuple[str, ...] | None
    node: str
    seen: str

    @property
    def about(self) -> str:
        return inspect.getdoc(self.build)

    @property
    def lines(self) -> set[int]:
        """Line numbers in this file that carry the marker, inside this case's function."""
        source, first = inspect.getsourcelines(self.build)
        return {first + i for i, text in enumerate(source) if MARK in text}

    def run(self) -> Run:
        torch.manual_seed(0)
        return self.build()


CASES: list[Case] = []
CONTROLS: list[Case] = []


def case(phases, ops, *, seen="loss", steps=(3,), modules=("",), node=""):
    """Register the decorated build function as a failing case."""

    def register(build):
        as_tuple = [(v,) if isinstance(v, str) else v for v in (phases, ops, modules)]
        CASES.append(Case(build.__name__, build, steps, *as_tuple, node, seen))
        return build

    return register


def control(build):
    """Register the decorated build function as a healthy run."""
    CONTROLS.append(Case(build.__name__, build, (), (), None, None, "", ""))
    return build


def train(run: Run, guard=None) -> list[float]:
    """The plain loop; `guard` is anything with begin(step, batch) and check(loss, grad_norm)."""
    scaler = run.scaler or torch.amp.GradScaler("cpu", enabled=False)
    losses = []
    for step, batch in enumerate(run.batches):
        for optimizer in run.optimizers:
            optimizer.zero_grad()
        for part in batch if run.accumulate else [batch]:
            if guard is not None:
                guard.begin(step, part)
            loss = run.forward(part)
            scaler.scale(loss).backward()
        for optimizer in run.optimizers:
            scaler.unscale_(optimizer)
        norm = run.clip and nn.utils.clip_grad_norm_(run.model.parameters(), run.clip)
        read = guard.check(loss, norm) if guard is not None else None
        for optimizer in run.optimizers:
            scaler.step(optimizer)
        scaler.update()
        losses.append(read[0] if read else loss.item())
    return losses


def state_of(run: Run, losses: list[float]) -> list:
    """All that training left behind, byte for byte: weights, buffers, optimizers, RNG, losses."""
    scaler = run.scaler.state_dict() if run.scaler else {}
    optimizers = [optimizer.state_dict() for optimizer in run.optimizers]
    grads = [p.grad if p.grad is None else p.grad.to_dense() for p in run.model.parameters()]
    everything = (run.model.state_dict(), grads, optimizers, scaler, torch.get_rng_state(), losses)

    def as_bytes(leaf):
        if isinstance(leaf, torch.Tensor):
            return leaf.dtype, leaf.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        return repr(leaf)

    return [as_bytes(leaf) for leaf in tree_leaves(everything)]


class Symptom(Exception):
    """Raised by PlainCheck with the step and what is not finite there."""

    def __init__(self, step, what):
        super().__init__(f"step {step}: {what} not finite")
        self.step, self.what = step, what


class PlainCheck:
    """isfinite on everything, every step: slow, names no operation, and cannot be wrong."""

    def __init__(self, run: Run):
        self.model = run.model
        self.masks = {k for k, v in run.model.named_buffers() if not torch.isfinite(v).all()}
        self.weights_were_bad = self._parameters_bad()

    def _parameters_bad(self):
        return not all(torch.isfinite(p).all() for p in self.model.parameters())

    def begin(self, step, batch):
        self.step = step
        if self._parameters_bad() and not self.weights_were_bad:
            raise Symptom(step - 1, "parameter")

    def check(self, loss, norm):
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        grads = [g.coalesce().values() if g.is_sparse else g for g in grads]
        buffers = [v for k, v in self.model.named_buffers() if k not in self.masks]
        if not torch.isfinite(loss):
            raise Symptom(self.step, "loss")
        if not all(torch.isfinite(g).all() for g in grads):
            raise Symptom(self.step, "gradient")
        if norm is not None and not torch.isfinite(norm):
            raise Symptom(self.step, "norm")
        if not all(torch.isfinite(b).all() for b in buffers):
            raise Symptom(self.step, "buffer")


# --- what the cases are made of -------------------------------------------------------------


def batches(good, bad, at=3, count=5, stay=False):
    """`count` batches, each built anew: `bad()` at step `at` (and after it, with `stay`)."""
    return [bad() if i == at or (stay and i > at) else good() for i in range(count)]


def rows(n=8, d=4, low=0.1, seed=0):
    """(n, d) float32 in [low, 1), from a CPU generator: the same on every machine."""
    return low + (1 - low) * torch.rand(n, d, generator=torch.Generator().manual_seed(seed))


def with_zero_row(n=8, d=4):
    return rows(n, d).index_fill(0, torch.tensor([1]), 0.0)


def labels(n=8, classes=3):
    return torch.arange(n) % classes


def positive(layer):
    """All weights 0.25, so that a positive input gives a positive output."""
    nn.init.constant_(layer.weight, 0.25)
    return layer


def rare_row(values, **options):
    """An embedding whose row 3 is `values`, and batches that first look it up at step 3.

    The row is untouched by training until then: an exact value, at an exact step.
    """
    table = nn.Embedding(4, len(values), **options)
    with torch.no_grad():
        table.weight.copy_(rows(4, len(values), low=0.5))
        table.weight[3] = torch.tensor(values)
    return table, batches(lambda: torch.tensor([0, 1, 2]), lambda: torch.tensor([0, 1, 3]))


class Experts(nn.Module):
    """Two layers, of which the batch chooses one; the second is first chosen at step 3."""

    def __init__(self, first, second):
        super().__init__()
        self.experts = nn.ModuleList([first, second])

    def forward(self, x, chosen):
        return self.experts[chosen](x)


# --- forward: logarithms, exponentials, divisions in the loss code ---------------------------


@case("forward", "log")
def log0_nll():
    """log(softmax(x)) by hand; one batch arrives un-normalised and the softmax underflows to 0."""
    model = nn.Linear(4, 3)

    def forward(batch):
        x, y = batch
        p = torch.softmax(model(x), dim=-1)
        log_p = p.log()  # <- origin
        return -log_p[torch.arange(len(y)), y].mean()

    data = batches(lambda: (rows(), labels()), lambda: (rows() * 1e4, labels()))
    return Run(model, forward, data)


@case("forward", "log")
def entropy_plogp():
    """Entropy bonus -sum p log p with a probability of exactly 0: 0 * -inf."""
    model = nn.Linear(4, 3)

    def forward(x):
        p = torch.softmax(model(x), dim=-1)
        log_p = p.log()  # <- origin
        return (p * log_p).sum(-1).mean()

    return Run(model, forward, batches(rows, lambda: rows() * 1e4))


@case("forward", "exp")
def exp_overflow():
    """A softmax written by hand without subtracting the maximum: exp(100) is inf."""
    model = positive(nn.Linear(4, 3, bias=False))

    def forward(x):
        e = model(x).exp()  # <- origin
        return -(e[:, 0] / e.sum(-1)).mean()

    return Run(model, forward, batches(rows, lambda: rows() * 1e3))


@case("forward", "exp")
def vae_logvar():
    """KL of a VAE; an unbounded log-variance of about 100 overflows its exp."""
    mean, logvar = nn.Linear(4, 2), positive(nn.Linear(4, 2, bias=False))

    def forward(x):
        m, v = mean(x), logvar(x)
        return 0.5 * (m.pow(2) + v.exp() - 1 - v).sum(-1).mean()  # <- origin

    return Run(nn.ModuleList([mean, logvar]), forward, batches(rows, lambda: rows() * 1e3))


@case("forward", "div")
def kl_by_hand():
    """sum p log(p / q) where the model's q underflowed to 0."""
    model = nn.Linear(4, 3)

    def forward(x):
        q = torch.softmax(model(x), dim=-1)
        p = torch.full_like(q, 1 / 3)
        ratio = p / q  # <- origin
        return (p * ratio.log()).sum(-1).mean()

    return Run(model, forward, batches(rows, lambda: rows() * 1e4))


@case("forward", "log")
def sac_tanh_correction():
    """log(1 - tanh(u)^2), the density correction of a squashed policy; tanh saturates to 1."""
    model = positive(nn.Linear(4, 2, bias=False))

    def forward(x):
        action = torch.tanh(model(x))
        slack = 1 - action.pow(2)
        return slack.log().sum(-1).mean()  # <- origin

    return Run(model, forward, batches(rows, lambda: rows() * 1e3))


@case("forward", "log")
def gan_two_optimizers():
    """log(1 - D(G(z))) with a discriminator that is certain; two optimizers in one loop."""
    generator, critic = nn.Linear(4, 4), positive(nn.Linear(4, 1, bias=False))

    def forward(batch):
        real, z = batch
        fake = critic(generator(z) * 0.1)
        sure = torch.sigmoid(critic(real))
        return -torch.log(1 - sure).mean() - torch.log(torch.sigmoid(-fake)).mean()  # <- origin

    optimizers = [
        torch.optim.SGD(generator.parameters(), lr=0.01),
        torch.optim.Adam(critic.parameters(), lr=1e-3),
    ]
    data = batches(lambda: (rows(), rows(seed=1)), lambda: (rows() * 1e3, rows(seed=1)))
    return Run(nn.ModuleDict({"g": generator, "d": critic}), forward, data, optimizers)


@case("forward", ("nll_loss_forward", "nll_loss", "cross_entropy_loss"))
def ce_all_ignored():
    """cross_entropy with every label ignored: a mean over nothing. The gradients are finite."""
    model = nn.Linear(4, 3)

    def forward(batch):
        x, y = batch
        return F.cross_entropy(model(x), y)  # <- origin

    ignored = torch.full((8,), -100)
    return Run(model, forward, batches(lambda: (rows(), labels()), lambda: (rows(), ignored)))


@case("forward", "std")
def std_one():
    """Advantages divided by their std; the last batch holds one sample."""
    model = nn.Linear(4, 1)

    def forward(x):
        value = model(x)
        spread = value.std()  # <- origin
        return ((value - value.mean()) / spread).pow(2).mean() + value.mean()

    return Run(model, forward, batches(rows, lambda: rows(1)))


@case("forward", "div")
def masked_mean_empty():
    """Mean over the unmasked tokens; one completion is masked everywhere: 0 / 0."""
    model = nn.Linear(4, 1)

    def forward(batch):
        x, mask = batch
        loss = model(x).squeeze(-1).pow(2)
        return ((loss * mask).sum(-1) / mask.sum(-1)).mean()  # <- origin

    x = rows(6).view(2, 3, 4)
    mask = torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    empty = torch.tensor([[1.0, 1, 0], [0, 0, 0]])
    return Run(model, forward, batches(lambda: (x, mask), lambda: (x, empty)))


@case("forward", "mean")
def empty_mean():
    """The mean of a selection that is empty: 0 / 0 without any bad input. Gradients are finite."""
    model = nn.Linear(4, 1)

    def forward(batch):
        x, chosen = batch
        out = model(x).squeeze(-1)
        extra = out[chosen].mean()  # <- origin
        return out.mean() + extra

    some, none = torch.arange(8) < 3, torch.arange(8) < 0
    return Run(model, forward, batches(lambda: (rows(), some), lambda: (rows(), none)))


@case("forward", "exp", modules=None)
def frozen_teacher():
    """Distillation from a teacher that is not part of the model and runs without gradients."""

    class Teacher(nn.Module):
        def forward(self, x):
            e = x.exp()  # <- origin
            return e / e.sum(-1, keepdim=True)

    model, teacher = nn.Linear(4, 4), Teacher()

    def forward(x):
        with torch.no_grad():
            target = teacher(x)
        return F.cross_entropy(model(x), target)

    return Run(model, forward, batches(rows, lambda: rows() * 1e3))


@case("forward", "div")
def lr_scaled_aux():
    """An auxiliary loss divided by a schedule's factor, a Python float that reaches 0."""
    model = nn.Linear(4, 2)

    def forward(batch):
        x, factor = batch
        h = model(x)
        aux = h.pow(2).mean() / factor  # <- origin
        return h.mean() + 0.1 * aux

    return Run(model, forward, [(rows(), f) for f in (1.0, 0.66, 0.33, 0.0, 0.0)])


@case("forward", "_ctc_loss")
def ctc_too_short():
    """CTC whose target is longer than its input can spell: probability 0, loss inf."""
    model = nn.Linear(4, 5)

    def forward(batch):
        x, target = batch
        log_p = model(x).log_softmax(-1)
        lengths = torch.full((2,), 6), torch.full((2,), target.shape[1])
        return F.ctc_loss(log_p, target, *lengths)  # <- origin

    x = rows(12).view(6, 2, 4)
    short, long = torch.tensor([[1, 2], [3, 4]]), torch.arange(14).view(2, 7) % 4 + 1
    return Run(model, forward, batches(lambda: (x, short), lambda: (x, long)))


@case("forward", "expm1")
def inverse_softplus():
    """log(expm1(x)), the inverse of softplus, without the branch for a large x."""
    model = positive(nn.Linear(4, 1, bias=False))

    def forward(x):
        raw = torch.expm1(model(x))  # <- origin
        return raw.log().mean()

    return Run(model, forward, batches(rows, lambda: rows() * 1e3))


@case("forward", "pow")
def gamma_of_negative():
    """Gamma correction x ** (1 / 2.2) of a pixel that a layer made negative."""
    model = positive(nn.Linear(4, 4, bias=False))

    def forward(x):
        return (model(x) ** (1 / 2.2)).mean()  # <- origin

    return Run(model, forward, batches(rows, lambda: -rows()))


@case("forward", "logit")
def logit_of_one():
    """torch.logit of a sigmoid that rounded to exactly 1."""
    model = positive(nn.Linear(4, 1, bias=False))

    def forward(x):
        p = torch.sigmoid(model(x))
        return torch.logit(p).mean()  # <- origin

    return Run(model, forward, batches(rows, lambda: rows() * 1e3))


@case("forward", "_to_copy")
def float64_to_float32():
    """A likelihood computed in float64 (e^200 fits), then cast to float32 (it does not)."""
    model = positive(nn.Linear(4, 1, bias=False))

    def forward(x):
        odds = model(x).double().exp()
        return odds.float().mean()  # <- origin

    return Run(model, forward, batches(rows, lambda: torch.full((8, 4), 200.0)))


@case("forward", "linalg_vector_norm")
def norm_of_large():
    """The norm of a vector of 1e20 squares past float32, although each entry fits."""
    model = positive(nn.Linear(4, 4, bias=False))

    def forward(x):
        return model(x).norm(dim=-1).log().mean()  # <- origin

    return Run(model, forward, batches(rows, lambda: torch.full((8, 4), 1e20)))


@case("forward", "div")
def complex_phase():
    """The phase spec / |spec| of a silent signal: a complex 0 / 0."""
    model = nn.Linear(4, 4, bias=False)

    def forward(x):
        spec = torch.fft.rfft(model(x))
        phase = spec / spec.abs()  # <- origin
        return (phase.real**2).mean() + spec.abs().mean()

    return Run(model, forward, batches(rows, with_zero_row))


@case("forward", "div")
def cosine_zero_vector():
    """Cosine similarity by hand with a vector of zeros."""
    model = nn.Linear(4, 3, bias=False)

    def forward(batch):
        a, b = model(batch["left"]), model(batch["right"])
        cosine = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))  # <- origin
        return 1 - cosine.mean()

    def pair(left):
        return {"left": left, "right": rows(seed=1)}

    return Run(model, forward, batches(lambda: pair(rows()), lambda: pair(with_zero_row())))


@case("forward", "log")
def sparse_embedding():
    """Sparse gradients, for which no norm exists; then the log of a row of zeros."""
    table, data = rare_row([0.0, 0.0], sparse=True)

    def forward(index):
        return table(index).log().mean()  # <- origin

    return Run(table, forward, data, clip=None)


@case("forward", "log_")
def inplace_log():
    """x.log_() overwrites its own input: a tool that looks after the call sees -inf on both."""
    model = positive(nn.Linear(4, 2, bias=False))

    def forward(x):
        h = model(x)
        h.log_()  # <- origin
        return h.mean()

    return Run(model, forward, batches(rows, with_zero_row))


# --- forward: inside a module ----------------------------------------------------------------


@case("forward", "div", modules="1")
def norm_div0():
    """Unit vectors h / |h|; one row is all zero."""

    class Unit(nn.Module):
        def forward(self, h):
            return h / h.norm(dim=-1, keepdim=True)  # <- origin

    model = nn.Sequential(nn.Linear(4, 4, bias=False), Unit(), nn.Linear(4, 3))

    def forward(x):
        return F.cross_entropy(model(x), labels())

    return Run(model, forward, batches(rows, with_zero_row))


@case("forward", "div", modules="norm")
def layernorm_by_hand():
    """(h - mean) / sqrt(var) without eps; the entries of one row are all equal."""

    class Norm(nn.Module):
        def forward(self, h):
            centred = h - h.mean(-1, keepdim=True)
            width = h.var(-1, unbiased=False, keepdim=True).sqrt()
            return centred / width  # <- origin

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Norm()
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.norm(x))

    model = Net()

    def forward(x):
        return F.cross_entropy(model(x), labels())

    return Run(model, forward, batches(rows, with_zero_row))


@case("forward", "reciprocal", modules="whiten")
def reciprocal_of_variance():
    """Whitening by var.reciprocal(); one feature is constant over the batch."""

    class Whiten(nn.Module):
        def forward(self, h):
            precision = h.var(0).reciprocal()  # <- origin
            return (h - h.mean(0)) * precision

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.whiten = Whiten()
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.whiten(x))

    model = Net()

    def forward(x):
        return F.cross_entropy(model(x), labels())

    def constant():
        return rows().index_fill(1, torch.tensor([2]), 0.5)

    return Run(model, forward, batches(rows, constant))


@case("forward", "div_", modules="1")
def inplace_module():
    """A module that scales its input in place, h /= max|h|, and meets a row of zeros."""

    class Scale(nn.Module):
        def forward(self, h):
            h = h.clone()
            h /= h.detach().abs().amax(-1, keepdim=True)  # <- origin
            return h

    model = nn.Sequential(nn.Linear(4, 4, bias=False), Scale(), nn.Linear(4, 3))

    def forward(x):
        return F.cross_entropy(model(x), labels())

    return Run(model, forward, batches(rows, with_zero_row))


@case("forward", "_softmax", modules="attention")
def masked_row():
    """Attention in which one query may look at nothing: softmax over -inf only."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qk = nn.Linear(4, 8)

        def forward(self, x, keep):
            q, k = self.qk(x).chunk(2, dim=-1)
            scores = (q @ k.T).masked_fill(~keep, -INF)
            return torch.softmax(scores, dim=-1) @ x  # <- origin

    model = nn.ModuleDict({"attention": Attention(), "head": nn.Linear(4, 3)})

    def forward(batch):
        return F.cross_entropy(model["head"](model["attention"](*batch)), labels())

    causal = torch.ones(8, 8).tril().bool()
    empty = causal.clone().index_fill(0, torch.tensor([5]), False)
    return Run(model, forward, batches(lambda: (rows(), causal), lambda: (rows(), empty)))


@case("forward", "_softmax", modules="mha")
def mha_all_padding():
    """nn.MultiheadAttention with its weights asked for, and a sequence that is all padding."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mha = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x, padding):
            return self.mha(x, x, x, key_padding_mask=padding)[0]  # <- origin

    model = Net()

    def forward(batch):
        return model(*batch).pow(2).mean()

    x = rows(6).view(2, 3, 4)
    padding = torch.tensor([[False, False, True], [False, True, True]])
    every = torch.tensor([[False, False, True], [True, True, True]])
    return Run(model, forward, batches(lambda: (x, padding), lambda: (x, every)))


PRUNED = ("experts.1", "experts.1.parametrizations.weight", "experts.1.parametrizations.weight.0")


@case("forward", "_weight_norm_interface", modules=PRUNED)
def weight_norm_dead_row():
    """weight_norm of a pruned layer, g * v / |v| with v = 0. The parametrization is a module of
    its own, but the layer that owns it is as good a name."""
    pruned = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    nn.init.zeros_(pruned.parametrizations.weight.original1)

    class Net(Experts):
        def forward(self, x, chosen):
            return self.experts[chosen](x)  # <- origin

    model = Net(nn.Linear(4, 3), pruned)

    def forward(batch):
        return F.cross_entropy(model(*batch), labels())

    return Run(model, forward, batches(lambda: (rows(), 0), lambda: (rows(), 1)))


@case("forward", "mm", modules="cell")
def rnn_explodes():
    """One line runs once a time step; a sequence eight times longer than the others overflows."""

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(500 * torch.eye(4))

        def forward(self, h):
            return h @ self.weight  # <- origin

    model = nn.ModuleDict({"cell": Cell()})

    def forward(batch):
        h, length = batch
        for _ in range(length):
            h = model["cell"](h)
        return h.mean()

    return Run(model, forward, batches(lambda: (rows(), 2), lambda: (rows(), 16)))


@case("forward", "log", modules=("block", ""))
def checkpoint_log():
    """The log of 0 inside a checkpointed block (the kind that is not re-entrant)."""

    class Block(nn.Module):
        def forward(self, h):
            return h.log()  # <- origin

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = positive(nn.Linear(4, 3, bias=False))
            self.block = Block()

        def forward(self, x):
            return checkpoint(self.block, self.body(x), use_reentrant=False)

    model = Net()
    return Run(model, lambda x: model(x).mean(), batches(rows, with_zero_row))


@case("forward", "log", modules="1")
def custom_function_forward():
    """The log of 0 inside the forward of a custom autograd.Function."""

    class Log(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.log()  # <- origin

        @staticmethod
        def backward(ctx, grad):
            return grad / ctx.saved_tensors[0].clamp(min=1e-6)

    class LogLayer(nn.Module):
        def forward(self, x):
            return Log.apply(x)

    model = nn.Sequential(positive(nn.Linear(4, 2, bias=False)), LogLayer())
    return Run(model, lambda x: model(x).mean(), batches(rows, with_zero_row))


@case("forward", "div", modules="1")
def dropout_div():
    """Inverse of what dropout kept. Whether all is dropped depends on the generator's state."""

    class KeepMean(nn.Module):
        def forward(self, h):
            kept = F.dropout(torch.ones(4), 0.5)
            return (h * kept).sum(-1) / kept.sum()  # <- origin

    model = nn.Sequential(nn.Linear(4, 4), KeepMean())

    def all_dropped(seed):
        torch.manual_seed(seed)
        return [not F.dropout(torch.ones(4), 0.5).any() for _ in range(5)]

    seed = next(s for s in range(1000) if all_dropped(s) == [False, False, False, True, False])
    run = Run(model, lambda x: model(x).mean(), batches(rows, rows))
    torch.manual_seed(seed)
    return run


# --- forward: an innocent inf is near --------------------------------------------------------


@case("forward", "div")
def benign_inf_then_bug():
    """A harmless 1 / 0, masked by where, in every step; a real 0 / 0 at step 3."""
    model = nn.Linear(4, 2, bias=False)

    def forward(batch):
        x, count = batch
        weight = torch.where(count > 0, 1 / count, torch.zeros(()))
        h = model(x)
        unit = h / h.detach().abs().amax(-1, keepdim=True)  # <- origin
        return (unit.sum(-1) * weight).sum() + h.mean()

    count = torch.tensor([1.0, 1, 0, 2, 0, 1, 2, 1])
    return Run(model, forward, batches(lambda: (rows(), count), lambda: (with_zero_row(), count)))


@case("forward", "log")
def consumed_inf_then_bug():
    """At step 3 a hand-written sigmoid overflows first, and harmlessly: 1 / (1 + inf) is 0.
    The log of 0 comes later in the same step; only an intervention can tell them apart."""
    model = positive(nn.Linear(4, 2, bias=False))

    def forward(batch):
        x, shift = batch
        h = model(x)
        gate = 1 / (1 + torch.exp(shift - h.detach()))
        return (gate * h).mean() - h.prod(-1).log().mean()  # <- origin

    return Run(model, forward, batches(lambda: (rows(), 0.0), lambda: (with_zero_row(), 1e3)))


@case("forward", "add", modules="")
def finfo_min_mask():
    """A mask of finfo(float16).min was chosen to stay finite; adding a score of -40 overflows."""
    model = nn.Linear(4, 4, bias=False)
    nn.init.eye_(model.weight)

    def forward(batch):
        x, mask = batch
        with torch.autocast(**FP16):
            q = model(x)
            scores = -(q @ x.T)
            biased = scores + mask  # <- origin
        return torch.softmax(biased.float(), dim=-1)[:, 0].mean() + q.float().mean()

    def mask(masked_rows):
        m = torch.zeros(8, 8, dtype=torch.float16)
        m[masked_rows] = torch.finfo(torch.float16).min
        return m

    data = batches(lambda: (rows(), mask([])), lambda: (rows(low=0.5) * 9, mask([1])))
    return Run(model, forward, data)


@case("forward", "log")
def masks_in_batch_then_bug():
    """Every batch carries a mask of -inf and labels marked missing by NaN, both handled rightly;
    the log of 0 at step 3 has nothing to do with them."""
    model = positive(nn.Linear(4, 4, bias=False))

    def forward(batch):
        h = model(batch["x"])
        weights = torch.softmax(h + batch["mask"], dim=-1)
        known = ~batch["y"].isnan()
        y = torch.where(known, batch["y"], torch.zeros(()))
        rate = h.sum(-1)
        nll = rate - y * rate.log()  # <- origin
        return (nll * known).sum() / known.sum() + weights[:, 0].mean()

    def sample(x):
        y = torch.tensor([1.0, 2, 0, NAN, 1, NAN, 3, 1])
        return {"x": x, "mask": torch.full((8, 4), -INF).triu(1), "y": y}

    return Run(model, forward, batches(lambda: sample(rows()), lambda: sample(with_zero_row())))


@case("forward", "log")
def two_bugs():
    """Two wrong lines in one step, either of which ruins the loss: the first one is the origin."""
    model = positive(nn.Linear(4, 2, bias=False))

    def forward(x):
        h = model(x)
        first = h[:, 0].log().mean()  # <- origin
        second = (h[:, 1] / h[:, 1].detach()).mean()
        return first + second

    return Run(model, forward, batches(rows, with_zero_row))


@case("forward", ("amax", "masked_fill"))
def masked_maxpool_empty():
    """Max-pooling over unmasked tokens of a sequence that has none: the -inf of the mask itself
    reaches the loss. The fill and the maximum are both right to name."""
    model = nn.Linear(4, 1)

    def forward(batch):
        x, keep = batch
        scores = model(x).squeeze(-1).masked_fill(~keep, -INF)  # <- origin
        pooled = scores.amax(-1)  # <- origin
        return pooled.mean()

    x = rows(6).view(2, 3, 4)
    some = torch.tensor([[True, True, False], [True, False, False]])
    none = torch.tensor([[True, True, False], [False, False, False]])
    return Run(model, forward, batches(lambda: (x, some), lambda: (x, none)))


@case("forward", ("logsumexp", "masked_fill"))
def contrastive_no_positive():
    """A contrastive loss whose anchor has no positive pair: logsumexp over -inf only. The fill
    and the logsumexp are both right to name."""
    model = nn.Linear(4, 2)

    def forward(batch):
        x, y = batch
        h = model(x)
        same = (y[:, None] == y[None]) & ~torch.eye(len(y)).bool()
        positive_pairs = (h @ h.T).masked_fill(~same, -INF)  # <- origin
        return -torch.logsumexp(positive_pairs, dim=-1).mean()  # <- origin

    rare = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    return Run(model, forward, batches(lambda: (rows(), labels()), lambda: (rows(), rare)))


@case("forward", "mul")
def mask_by_multiplying():
    """log-probabilities masked with -inf, as they should be, then averaged by multiplying with
    the mask: -inf * 0. Here the explicit -inf is part of the cause."""
    model = nn.Linear(4, 6)

    def forward(batch):
        x, keep = batch
        log_p = model(x).masked_fill(keep == 0, -INF).log_softmax(-1)
        kept = log_p * keep  # <- origin
        return -kept.sum(-1).mean()

    every, some = torch.ones(6), torch.tensor([1.0, 1, 1, 1, 0, 0])
    return Run(model, forward, batches(lambda: (rows(), every), lambda: (rows(), some)))


@case("forward", "div")
def batch_mutated():
    """Each step shifts its batch in place after use: a replay needs the batch as it was."""
    model = nn.Linear(4, 1)

    def forward(x):
        scaled = x / x.abs().amax()  # <- origin
        x.add_(0.5)
        return model(scaled).mean()

    return Run(model, forward, batches(rows, lambda: torch.zeros(8, 4)))


@case("forward", "log", seen="gradient")
def accumulated_first():
    """Gradient accumulation: the first micro-batch is bad, the last one's loss is fine."""
    model = positive(nn.Linear(4, 2, bias=False))

    def forward(x):
        return model(x).log().mean()  # <- origin

    data = batches(lambda: [rows(), rows(seed=1)], lambda: [with_zero_row(), rows(seed=1)])
    return Run(model, forward, data, accumulate=True)


# --- forward: half precision -----------------------------------------------------------------


@case("forward", "addmm", modules="0")
def fp16_linear():
    """A Linear under fp16 autocast whose output passes 65504."""
    model = nn.Sequential(positive(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 3))

    def forward(x):
        with torch.autocast(**FP16):
            logits = model(x)  # <- origin
        return logits.float().pow(2).mean()

    data = batches(lambda: rows(8, 16), lambda: torch.full((8, 16), 3e4))
    return Run(model, forward, data, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))


@case("forward", ("bmm", "matmul"), modules="attention")
def fp16_attn():
    """q @ k^T overflows fp16, because the scaling by d^-0.5 comes after it."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
            nn.init.eye_(self.q.weight)
            nn.init.eye_(self.k.weight)

        def forward(self, x):
            scores = (self.q(x) @ self.k(x).transpose(-1, -2)) * 16**-0.5  # <- origin
            return torch.softmax(scores, dim=-1) @ x.to(scores.dtype)

    model = nn.ModuleDict({"attention": Attention()})

    def forward(x):
        with torch.autocast(**FP16):
            out = model["attention"](x)
        return out.float().pow(2).mean()

    def sequences(size):
        return rows(8, 16, low=0.5).view(2, 4, 16) * size

    return Run(model, forward, batches(lambda: sequences(1.0), lambda: sequences(300.0)))


@case("forward", ("bmm", "einsum"), modules="attention")
def einsum_attention():
    """The same overflow written as an einsum, which becomes a bmm."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(16, 16, bias=False)
            nn.init.eye_(self.q.weight)

        def forward(self, x):
            scores = torch.einsum("bqd,bkd->bqk", self.q(x), x)  # <- origin
            return torch.softmax(scores * 16**-0.5, dim=-1) @ x.to(scores.dtype)

    model = nn.ModuleDict({"attention": Attention()})

    def forward(x):
        with torch.autocast(**FP16):
            out = model["attention"](x)
        return out.float().pow(2).mean()

    def sequences(size):
        return rows(8, 16, low=0.5).view(2, 4, 16) * size

    return Run(model, forward, batches(lambda: sequences(1.0), lambda: sequences(300.0)))


@case("forward", "rsqrt", modules="norm")
def fp16_eps():
    """rsqrt(var + 1e-8) in fp16, where 1e-8 is 0, on a row without spread."""

    class Norm(nn.Module):
        def forward(self, h):
            centred = h - h.mean(-1, keepdim=True)
            var = centred.pow(2).mean(-1, keepdim=True)
            return centred * torch.rsqrt(var + 1e-8)  # <- origin

    model = nn.ModuleDict({"body": nn.Linear(4, 4, bias=False), "norm": Norm()})

    def forward(x):
        with torch.autocast(**FP16):
            h = model["norm"](model["body"](x))
        return h.float().pow(2).mean()

    return Run(model, forward, batches(rows, with_zero_row))


@case("forward", "div")
def normalize_half():
    """F.normalize guards with eps = 1e-12, which is 0 in half: 0 / 0 on a row of zeros."""
    model = nn.Linear(4, 4, bias=False).half()

    def forward(x):
        return F.normalize(model(x), dim=-1).float().sum(-1).mean()  # <- origin

    return Run(model, forward, batches(lambda: rows().half(), lambda: with_zero_row().half()))


@case("forward", "sum")
def dice_sum_half():
    """Soft Dice on half masks: 300 * 300 ones sum to 90000, past 65504."""
    model = nn.Linear(1, 1)

    def forward(batch):
        p = torch.sigmoid(model(batch[:1, :1])).half()
        area = (p * batch.half()).sum()  # <- origin
        return 1 - 2 * area / (area + batch.sum() + 1)

    def ones(size):
        return torch.ones(size, size) * 0.99

    return Run(model, forward, batches(lambda: ones(30), lambda: ones(600)))


@case("forward", "copy_")
def half_cache():
    """float32 values of 1e5 written into a slice of a half tensor: the copy overflows."""
    model = positive(nn.Linear(4, 2, bias=False))

    def forward(x):
        cache = torch.zeros(8, 4, dtype=torch.float16)
        cache[:, :2] = model(x)  # <- origin
        return cache.float().mean()

    return Run(model, forward, batches(rows, lambda: torch.full((8, 4), 1e5)))


@case("forward", "_to_copy", modules="experts.1")
def weight_cast():
    """A weight of 1e5 fits float32; autocast casts it to fp16 and it is inf."""

    class Net(Experts):
        def forward(self, x, chosen):
            return self.experts[chosen](x)  # <- origin

    model = Net(nn.Linear(4, 3), nn.Linear(4, 3))
    with torch.no_grad():
        model.experts[1].weight[0, 0] = 1e5

    def forward(batch):
        with torch.autocast(**FP16):
            out = model(*batch)
        return out.float().pow(2).mean()

    return Run(model, forward, batches(lambda: (rows(), 0), lambda: (rows(), 1)))


@case("forward", "exp")
def bf16_exp():
    """bfloat16 has float32's range and no more: exp(100) overflows it just the same."""
    model = positive(nn.Linear(4, 3, bias=False))

    def forward(x):
        with torch.autocast(**BF16):
            e = model(x).exp()  # <- origin
            return (e[:, 0] / e.sum(-1)).float().mean()

    return Run(model, forward, batches(rows, lambda: rows(low=0.9) * 200))


# --- forward: the step before did it ---------------------------------------------------------


@case("forward", "exp", steps=(4,))
def outlier_sgd():
    """An outlier of 1e6 gives a huge, finite gradient at step 3; without clipping the weights
    jump and the next forward pass overflows."""
    model = nn.Linear(4, 1)

    def forward(batch):
        x, y = batch
        z = model(x).squeeze(-1)
        return (z.exp() - y * z).mean()  # <- origin

    count = torch.ones(8)
    data = batches(lambda: (rows(), count), lambda: (rows(), 1e6 * count))
    return Run(model, forward, data, clip=None)


@case("forward", "pow")
def lr_high():
    """Each update overshoots by 1e7: w is 1, -1e7, 1e14, and the square of 1e21 overflows."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)

    def forward(x):
        return (model(x) ** 2).mean()  # <- origin

    optimizer = torch.optim.SGD(model.parameters(), lr=5e6)
    return Run(model, forward, [torch.ones(4, 1) for _ in range(5)], [optimizer], clip=None)


# --- backward: the loss is finite, the gradient is not ---------------------------------------


@case("backward", "div", seen="gradient", node="SqrtBackward0")
def sqrt0_bwd():
    """The distance of two equal embeddings: sqrt has an infinite slope at 0."""
    model = nn.Linear(4, 3)

    def forward(batch):
        a, b = batch
        squared = ((model(a) - model(b)) ** 2).sum(-1)
        return squared.sqrt().mean()  # <- origin

    def twins():
        a, b = rows(), rows(seed=1)
        b[0] = a[0]
        return a, b

    return Run(model, forward, batches(lambda: (rows(), rows(seed=1)), twins))


@case("backward", "div", seen="gradient", node="LogBackward0")
def where_log():
    """where(h > 0, log(h), 0): the value is right, the gradient is 0 / 0 behind the mask."""
    table, data = rare_row([0.0, 1.0])

    def forward(index):
        h = table(index)
        logs = h.log()  # <- origin
        return torch.where(h > 0, logs, torch.zeros(())).mean()

    return Run(table, forward, data)


@case("backward", "rsqrt", seen="gradient", node="AcosBackward0")
def acos_at_one():
    """acos(clamp(cos, -1, 1)): the clamp protects the value, not the slope at 1."""
    table, data = rare_row([2.0, 0.0])

    def forward(index):
        h = table(index)
        cos = (h / h.norm(dim=-1, keepdim=True))[:, 0]
        return torch.acos(cos.clamp(-1, 1)).mean()  # <- origin

    return Run(table, forward, data)


@case("backward", "pow", seen="gradient", node="PowBackward0")
def focal_at_one():
    """Focal weight (1 - p)^0.5 with p exactly 1: the model is punished for being right."""
    model = positive(nn.Linear(4, 1, bias=False))

    def forward(x):
        z = model(x)
        weight = (1 - torch.sigmoid(z)) ** 0.5  # <- origin
        return -(weight * F.logsigmoid(z)).mean()

    return Run(model, forward, batches(rows, lambda: rows() * 1e3))


@case("backward", ("div", "xlogy"), seen="gradient", node="XlogyBackward0")
def xlogy_at_zero():
    """xlogy(p, p) is 0 at p = 0, as it should; its gradient is 0 / 0 (the second argument's)
    and log 0 (the first's): either may be named."""
    table, data = rare_row([0.0, 1.0])

    def forward(index):
        p = table(index)
        return torch.xlogy(p, p).mean()  # <- origin

    return Run(table, forward, data)


@case("backward", ("sub", "add"), seen="gradient", node="LogcumsumexpBackward0")
def logcumsumexp_masked():
    """logcumsumexp over a prefix masked with -inf: right in the forward pass, but its backward
    computes inf - inf. The subtraction makes the inf, the addition the NaN: either is right."""
    model = nn.Linear(4, 6)

    def forward(batch):
        x, hidden = batch
        mask = torch.zeros(6).masked_fill(torch.arange(6) < hidden, -INF)
        running = torch.logcumsumexp(model(x) + mask, dim=-1)  # <- origin
        return running[:, -1].mean()

    return Run(model, forward, batches(lambda: (rows(), 0), lambda: (rows(), 2)))


@case("backward", ("div_", "div"), seen="gradient", node="LinalgEighBackward0")
def eigh_degenerate():
    """Eigenvectors of a matrix with equal eigenvalues: the gradient has 1 / (l_i - l_j)."""
    experts = nn.ParameterList([torch.diag(torch.tensor([1.0, 2, 3])), torch.eye(3)])

    def forward(chosen):
        w = experts[chosen]
        vectors = torch.linalg.eigh(w @ w.T)[1]  # <- origin
        return (vectors * torch.arange(9.0).view(3, 3)).mean()

    return Run(experts, forward, batches(lambda: 0, lambda: 1))


@case("backward", "div", seen="gradient")
def custom_fn_bwd():
    """A custom autograd.Function whose own backward divides by 0."""

    class Root(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.sqrt()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return grad / (2 * y)  # <- origin

    model = positive(nn.Linear(4, 2, bias=False))
    return Run(model, lambda x: Root.apply(model(x)).mean(), batches(rows, with_zero_row))


@case("backward", "div", seen="gradient")
def hook_normalises():
    """A tensor hook divides the gradient by its norm, and one batch has no gradient at all."""
    model = nn.Linear(4, 2)

    def unit(grad):
        return grad / grad.norm()  # <- origin

    def forward(batch):
        x, weight = batch
        h = model(x)
        h.register_hook(unit)
        return (h * weight).mean()

    return Run(model, forward, batches(lambda: (rows(), 1.0), lambda: (rows(), 0.0)))


@case("backward", "div", seen="gradient", node="SqrtBackward0")
def gradient_penalty():
    """WGAN-GP: the penalty takes the norm of an inner gradient, which is 0 for a dead layer."""
    model = nn.Sequential(positive(nn.Linear(4, 4)), nn.ReLU(), positive(nn.Linear(4, 1)))

    def forward(x):
        x = x.clone().requires_grad_()
        (inner,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        length = inner.pow(2).sum(-1).sqrt()  # <- origin
        return (length - 1).pow(2).mean() + model[0](x).mean()

    return Run(model, forward, batches(rows, lambda: -1e3 * rows()))


@case("backward", "div", seen="gradient", modules=("block", ""), node="SqrtBackward0")
def checkpoint_sqrt():
    """sqrt at 0 in a re-entrant checkpoint: its graph exists only while backward runs."""

    class Block(nn.Module):
        def forward(self, h):
            return h.sqrt()  # <- origin

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = positive(nn.Linear(4, 3, bias=False))
            self.block = Block()

        def forward(self, x):
            return checkpoint(self.block, self.body(x), use_reentrant=True)

    model = Net()
    return Run(model, lambda x: model(x).mean(), batches(rows, with_zero_row))


@case("backward", "div", seen="gradient", steps=(15,), node="SqrtBackward0")
def scale_collapse_amp():
    """fp16 with a scaler started at 2^24: its first steps overflow and are skipped, as they
    should; a real sqrt at 0 comes at step 15."""
    model = nn.Linear(4, 3)

    def forward(batch):
        a, b = batch
        with torch.autocast(**FP16):
            difference = model(a) - model(b)
        return (difference.float() ** 2).sum(-1).sqrt().mean()  # <- origin

    def twins():
        a, b = rows(), rows(seed=1)
        b[0] = a[0]
        return a, b

    data = batches(lambda: (rows(), rows(seed=1)), twins, at=15, count=17)
    return Run(model, forward, data, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**24))


@case("backward", "_to_copy", seen="gradient", node="ToCopyBackward0")
def sum_reduction_fp16():
    """A loss summed, not averaged: its gradient passes fp16's range at any scale, even 1.
    The overflow is in the cast back to fp16, the backward of `.float()`."""
    model = nn.Linear(4, 3)

    def forward(batch):
        x, weight = batch
        with torch.autocast(**FP16):
            out = model(x)
        out = out.float()  # <- origin
        return (out * weight).sum()

    data = batches(lambda: (rows(), 1.0), lambda: (rows(), 1e6))
    return Run(model, forward, data, scaler=torch.amp.GradScaler("cpu", init_scale=16.0))


# --- neither forward nor backward ------------------------------------------------------------


@case("input", None, modules=None)
def nan_input():
    """A NaN in x, the first tensor of the batch."""
    model = nn.Linear(4, 3)

    def forward(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def dirty():
        x = rows()
        x[2, 1] = NAN
        return x, labels()

    return Run(model, forward, batches(lambda: (rows(), labels()), dirty))


@case("input", None, modules=None)
def nan_in_dict():
    """A NaN deep in a batch of dicts and lists, next to strings and None."""
    model = nn.Linear(4, 1)

    def forward(batch):
        return (model(batch["image"]) * batch["meta"]["ages"][0]).mean()

    def sample(age):
        ages = [torch.full((8, 1), age), None]
        return {"image": rows(), "meta": {"id": "a17", "ages": ages}}

    return Run(model, forward, batches(lambda: sample(0.4), lambda: sample(NAN)))


@case("input", None, modules=None)
def inf_in_dataclass():
    """An inf in the target of a batch that is a dataclass."""

    @dataclass
    class Sample:
        x: torch.Tensor
        target: torch.Tensor

    model = nn.Linear(4, 1)

    def forward(batch):
        return F.mse_loss(model(batch.x), batch.target)

    def infinite():
        return Sample(rows(), torch.full((8, 1), INF))

    return Run(model, forward, batches(lambda: Sample(rows(), torch.ones(8, 1)), infinite))


@case(("optimizer", "forward"), None, steps=(2, 3), modules=None)
def embedding_nan_row():
    """A row of NaN in an embedding, there from the start (a loaded checkpoint), first looked up
    at step 3. "Step 3, embedding" is right, and so is "bad weights when step 3 began", reported
    as the step before: from inside step 3 nobody can tell when the row was written."""
    table, data = rare_row([NAN, NAN])
    return Run(table, lambda index: table(index).mean(), data)


@case("optimizer", ("addcdiv_", "addcdiv", "_foreach_addcdiv_"), seen="parameter", modules=None)
def adam_half_eps():
    """Half parameters with Adam's eps of 1e-8, which is 0 in half: the first tiny gradient of
    the head, at step 3, is divided by 0. Loss and gradients are finite."""
    body, head = nn.Linear(2, 1).half(), nn.Linear(1, 1).half()

    def forward(batch):
        x, use_head = batch
        out = body(x)
        loss = (out.float() - 3).pow(2).mean()
        return loss + 1e-4 * head(out.detach()).float().mean() if use_head else loss

    model = nn.ModuleDict({"body": body, "head": head})
    x = rows(8, 2, low=0.5).half()
    data = batches(lambda: (x, False), lambda: (x, True), stay=True)
    return Run(model, forward, data, [torch.optim.Adam(model.parameters(), eps=1e-8)], clip=None)


@case("optimizer", None, seen="parameter", modules=None)
def lr_nan():
    """A schedule hands out a learning rate of NaN for step 3 (0 / 0 at the end of its warm-up);
    loss and gradients are finite, and the update ruins every weight."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = iter([0.1, 0.1, NAN, NAN, NAN])

    def next_lr(optimizer, args, kwargs):
        optimizer.param_groups[0]["lr"] = next(schedule)

    optimizer.register_step_post_hook(next_lr)
    return Run(model, lambda x: model(x).pow(2).mean(), batches(rows, rows), [optimizer])


@case("norm", None, seen="norm", modules=None)
def norm_overflow():
    """Each gradient is finite, about 1e20; their norm is inf, and clipping by it zeroes them."""
    model = nn.Linear(4, 3)

    def forward(batch):
        x, weight = batch
        return model(x).mean() * weight

    return Run(model, forward, batches(lambda: (rows(), 1.0), lambda: (rows(), 1e20)))


@case("buffer", "var", seen="buffer", modules="norm")
def buffer_nan():
    """A running variance updated from a batch of one; loss and gradients stay finite."""

    class RunningVariance(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("var", torch.ones(4))

        def forward(self, x):
            with torch.no_grad():
                self.var.lerp_(x.var(0), 0.1)  # <- origin
            return x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = RunningVariance(), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.norm(x))

    model = Net()
    return Run(model, lambda x: model(x).pow(2).mean(), batches(rows, lambda: rows(1)))


@case("scaler", None, seen="skips", steps=range(1, 144), modules=None)
def static_scale():
    """A fixed loss scale that never sinks, with gradients that never fit under it: each skip
    looks normal, and no step is ever taken. Any step before 144 skips is early enough."""

    class StaticScaler(torch.amp.GradScaler):
        def update(self, new_scale=None):
            super().update(65536.0)

    model = nn.Linear(4, 3)

    def forward(x):
        with torch.autocast(**FP16):
            out = model(x)
        return out.float().sum()

    data = [rows() * 10 for _ in range(150)]
    return Run(model, forward, data, scaler=StaticScaler("cpu", init_scale=65536.0))


# --- what a replay cannot see: the honest answer is "no suspect" -----------------------------


@case(("forward", "backward"), ("", "log"), modules=None)
def mutated_once():
    """The bad step, and no step before it, repairs its own batch after use. The replay is
    healthy; only a tool that watched the step itself could name the log."""
    model = nn.Linear(4, 4)

    def forward(batch):
        x, repair = batch
        loss = (model(x / 2) * x.log()).mean()  # <- origin
        if repair:
            x.clamp_(min=0.1)
        return loss

    return Run(model, forward, batches(lambda: (rows(), False), lambda: (with_zero_row(), True)))


@case(("forward", "backward"), ("", "div"), modules=None)
def python_state():
    """The model counts its own calls and fails at the fourth: a replay is the fifth."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.calls = nn.Linear(4, 2), 0

        def forward(self, x):
            self.calls += 1
            return self.body(x) / (0.0 if self.calls == 4 else 1.0)  # <- origin

    model = Counting()
    return Run(model, lambda x: model(x).mean(), batches(rows, rows))


# --- healthy: nothing may be flagged, and training must not change by a bit ------------------


@control
def causal_mask():
    """Causal attention: the mask is a buffer full of -inf."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qk = nn.Linear(4, 8)
            self.register_buffer("mask", torch.full((8, 8), -INF).triu(1))

        def forward(self, x):
            q, k = self.qk(x).chunk(2, dim=-1)
            return torch.softmax(q @ k.T + self.mask, dim=-1) @ x

    model = nn.Sequential(Attention(), nn.Linear(4, 3))
    return Run(model, lambda x: F.cross_entropy(model(x), labels()), batches(rows, rows))


@control
def scaler_warm_up():
    """fp16 with a scaler started at 2^24: its first steps overflow and are skipped."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(x):
        with torch.autocast(**FP16):
            logits = model(x)
        return F.cross_entropy(logits.float(), labels())

    data = batches(rows, rows, count=14)
    return Run(model, forward, data, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**24))


@control
def scaler_skips_a_spike():
    """One large batch overflows at scale 65536 and not at scale 1: a skip, and on."""
    model = nn.Linear(4, 3)

    def forward(batch):
        x, weight = batch
        with torch.autocast(**FP16):
            out = model(x)
        return (out.float() * weight).mean()

    data = batches(lambda: (rows(), 0.1), lambda: (rows(), 100.0))
    return Run(model, forward, data, scaler=torch.amp.GradScaler("cpu", init_scale=65536.0))


@control
def where_heals_inf():
    """1 / 0 in the forward pass, replaced by where before it can do harm."""
    model = nn.Linear(4, 1)

    def forward(batch):
        x, count = batch
        weight = torch.where(count > 0, 1 / count, torch.zeros(()))
        return (model(x).squeeze(-1) * weight).mean()

    count = torch.tensor([1.0, 1, 0, 2, 0, 1, 2, 1])
    return Run(model, forward, [(rows(), count) for _ in range(5)])


@control
def logsumexp_masked():
    """logsumexp over scores of which some are -inf."""
    model = nn.Linear(4, 6)
    mask = torch.arange(6) % 2 == 0

    def forward(x):
        return torch.logsumexp(model(x).masked_fill(mask, -INF), dim=-1).mean()

    return Run(model, forward, batches(rows, rows))


@control
def logcumsumexp_masked_fill():
    """The backward of logcumsumexp is NaN where masked_fill wrote -inf; its backward drops it."""
    model = nn.Linear(4, 6)
    mask = torch.arange(6) < 2

    def forward(x):
        return torch.logcumsumexp(model(x).masked_fill(mask, -INF), dim=-1)[:, -1].mean()

    return Run(model, forward, batches(rows, rows))


@control
def minimum_from_inf():
    """A running minimum starts at inf; the module keeps its best loss so far in a buffer."""

    class Nearest(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 2)
            self.register_buffer("lowest", torch.tensor(INF))

        def forward(self, x):
            best = torch.full((len(x),), INF)
            for centre in (0.0, 0.5, 1.0):
                best = torch.minimum(best, (self.body(x) - centre).pow(2).sum(-1))
            self.lowest = torch.minimum(self.lowest, best.detach().min())
            return best.mean()

    model = Nearest()
    return Run(model, model, batches(rows, rows))


@control
def nearest_neighbour():
    """Distances with inf written on the diagonal, so that no point is its own neighbour."""
    model = nn.Linear(4, 2)

    def forward(x):
        h = model(x)
        distance = (h[:, None] - h[None]).pow(2).sum(-1)
        return distance.masked_fill(torch.eye(len(x)).bool(), INF).min(-1).values.mean()

    return Run(model, forward, batches(rows, rows))


@control
def nan_marks_missing():
    """NaN marks a missing label in the batch and is replaced before any arithmetic."""
    model = nn.Linear(4, 1)

    def forward(batch):
        x, y = batch
        known = ~y.isnan()
        y = torch.where(known, y, torch.zeros(()))
        return ((model(x).squeeze(-1) - y).pow(2) * known).sum() / known.sum()

    y = torch.tensor([1.0, NAN, 0.0, 1.0, NAN, 0.0, 1.0, 0.0])
    return Run(model, forward, [(rows(), y.clone()) for _ in range(5)])


@control
def std_of_equal_values():
    """The backward of std divides by 0 for equal values, and masks it since torch 2.x."""
    table, data = rare_row([0.7, 0.7])
    return Run(table, lambda index: table(index).std(-1).mean(), data)


@control
def overflow_consumed():
    """A gate from detached scores: exp overflows to inf, and 1 / (1 + inf) is 0, as wanted."""
    model = nn.Linear(4, 2)

    def forward(batch):
        x, shift = batch
        h = model(x)
        gate = 1 / (1 + torch.exp(shift - h.detach()))
        return (gate * h).mean()

    return Run(model, forward, batches(lambda: (rows(), 0.0), lambda: (rows(), 1e3)))


@control
def nan_metric():
    """A metric over an empty set is NaN; it is kept for the log and never enters the loss."""
    model = nn.Linear(4, 3)
    log = []

    def forward(x):
        out = model(x)
        log.append(out.detach()[:0].mean())
        return F.cross_entropy(out, labels())

    return Run(model, forward, batches(rows, rows))


@control
def batchnorm_dropout_checkpoint():
    """Buffers, randomness and recomputation, with AdamW: each must be left as it was found."""
    block = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU())
    model = nn.Sequential(nn.Linear(4, 4), block, nn.Linear(8, 3))

    def forward(x):
        h = checkpoint(model[1], model[0](x), use_reentrant=False)
        return F.cross_entropy(model[2](h), labels())

    return Run(model, forward, batches(rows, rows), [torch.optim.AdamW(model.parameters())])


@control
def mutating_accumulation():
    """Each micro-batch is standardised in place; frozen layer, two optimizers, no clipping."""
    body, head = nn.Linear(4, 4), nn.Linear(4, 3)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    model = nn.Sequential(frozen, body, head)

    def forward(x):
        x.sub_(x.mean()).div_(x.std())
        return F.cross_entropy(model(x), labels())

    optimizers = [
        torch.optim.SGD(body.parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(head.parameters()),
    ]
    data = [[rows(seed=i), rows(seed=i + 9)] for i in range(5)]
    return Run(model, forward, data, optimizers, clip=None, accumulate=True)


@control
def sparse_gradients():
    """An embedding with sparse gradients, for which torch has no norm."""
    table, data = rare_row([0.5, 0.5], sparse=True)
    return Run(table, lambda index: table(index).pow(2).mean(), data, clip=None)

"""locate: the operation, module and line of a failed step, and whether the proof is one."""

import inspect
import random
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nan_lab.autocast import cuda_autocast_policy
from nan_lab.locate import locate


def line_of(function, marker="# here"):
    """`file.py:number` of the line of `function` that carries the marker."""
    lines, start = inspect.getsourcelines(function)
    (offset,) = (i for i, line in enumerate(lines) if marker in line)
    return f"{__file__.rpartition('/')[2]}:{start + offset}"


class Net(nn.Module):
    """4 -> 4 with a place for a bug."""

    def __init__(self, bug=None):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.bug = bug() if bug else nn.Identity()

    def forward(self, x):
        return self.bug(self.first(x))


X = torch.tensor([[0.5, -1.0, 2.0, 0.1], [1.0, 0.0, -0.5, 0.3]])
Y = torch.tensor([0, 2])


def log_of_softmax(net, x):
    p = net(x * 1e4).softmax(-1)
    return -(F.one_hot(Y, 4) * p.log()).sum(-1).mean()  # here


def entropy(net, x):
    p = net(x * 1e4).softmax(-1)
    return -(p * p.log()).sum()  # here


def sqrt_of_zero(net, x):
    h = net(x)
    return ((h - h.detach()) ** 2).sum().sqrt()  # here


def where_log(net, x):
    h = net(x) * torch.tensor([0.0, 1.0, 1.0, 1.0])
    return torch.where(h > 0, torch.log(h), 0.0).sum()  # here


def acos_at_one(net, x):
    h = net(x)
    return torch.acos((h / h.detach()).clamp(-1, 1)).sum()  # here


def harmless_then_bug(net, x):
    h = net(x)
    h = torch.where(h > -1e9, h, 1 / torch.zeros(4))
    return h.sum() + (h - h).sum() / (h - h).sum()  # here


def all_ignored(net, x):
    return F.cross_entropy(net(x), torch.full((2,), -100))  # here


def std_of_one(net, x):
    return net(x)[:1, :1].std()  # here


def exp_overflow(net, x):
    return (net(x) * 1e3).exp().sum()  # here


def in_place_log(net, x):
    h = net(x).relu()
    h = h * 1
    h[:, 1:].log_()  # here
    return h.sum()


class Normalise(nn.Module):
    def forward(self, h):
        h = h * torch.tensor([[1.0], [0.0]])
        return h / h.norm(dim=-1, keepdim=True)  # here


class Attention(nn.Module):
    def forward(self, h):
        scores = h @ h.T
        scores = scores.masked_fill(torch.tensor([[False, True], [True, True]]), -torch.inf)
        return F.softmax(scores, dim=-1) @ h  # here


class CausalThenBug(nn.Module):
    def forward(self, h):
        scores = (h @ h.T) + torch.full((2, 2), -torch.inf).triu(1)
        h = scores.softmax(-1) @ h
        return h / (h - h)  # here


class DividesByZero(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 / (grad - grad)  # here


class Custom(nn.Module):
    def forward(self, h):
        return DividesByZero.apply(h)


class DropsAll(nn.Module):
    def forward(self, h):
        kept = F.dropout(torch.ones(8), 0.5, True)
        return h * kept.sum() / (kept[:2].sum())  # here


CASES = {
    # name: (loss or module, phase, op, node, module)
    "log_of_softmax": (log_of_softmax, "forward", "log", "", ""),
    "entropy": (entropy, "forward", "log", "", ""),
    "sqrt_of_zero": (sqrt_of_zero, "backward", "div", "SqrtBackward0", ""),
    "where_log": (where_log, "backward", "div", "LogBackward0", ""),
    "acos_at_one": (acos_at_one, "backward", "rsqrt", "AcosBackward0", ""),
    "harmless_then_bug": (harmless_then_bug, "forward", "div", "", ""),
    "all_ignored": (all_ignored, "forward", "nll_loss_forward", "", ""),
    "std_of_one": (std_of_one, "forward", "std", "", ""),
    "exp_overflow": (exp_overflow, "forward", "exp", "", ""),
    "in_place_log": (in_place_log, "forward", "log_", "", ""),
    "zero_row": (Normalise, "forward", "div", "", "bug"),
    "masked_row": (Attention, "forward", "_softmax", "", "bug"),
    "causal_mask_is_innocent": (CausalThenBug, "forward", "div", "", "bug"),
    "own_backward": (Custom, "backward", "div", "DividesByZeroBackward", "bug"),
}


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("name", CASES)
def test_names_operation_and_line(name):
    bug, phase, op, node, module = CASES[name]
    torch.manual_seed(0)
    if isinstance(bug, type):
        net, forward = Net(bug), lambda x: net(x).sum()
    else:
        net, forward = Net(), lambda x: bug(net, x)
    report = locate(net, forward, X)
    print(report)
    marked = DividesByZero.backward if bug is Custom else getattr(bug, "forward", bug)
    assert (report.phase, report.op, report.node) == (phase, op, node)
    assert report.line == line_of(marked)
    assert report.module == module
    assert report.confirmed


class Log(nn.Module):
    def forward(self, h):
        return (h * 0).log()  # here


class Sqrt(nn.Module):
    def forward(self, h):
        return h + (h * 0).square().sum(-1, keepdim=True).sqrt()  # here


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("bug", [Log, Sqrt])
def test_inside_activation_checkpointing(bug, reentrant):
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), bug())
    x = X.clone().requires_grad_()
    report = locate(net, lambda x: checkpoint(net, x, use_reentrant=reentrant).sum(), x)
    expected = ("forward", "log", "") if bug is Log else ("backward", "div", "SqrtBackward0")
    assert (report.phase, report.op, report.node) == expected
    assert (report.line, report.module) == (line_of(bug.forward), "2")
    assert report.confirmed and x.grad is None


def test_under_torch_compile():
    net = Net(Normalise)
    compiled = torch.compile(net, backend="eager")
    assert not compiled(X).sum().isfinite()
    report = locate(compiled, lambda x: compiled(x).sum(), X)
    assert (report.op, report.module) == ("div", "bug")
    assert report.line == line_of(Normalise.forward)


def test_in_place_root_on_a_view_has_its_own_line():
    net = Net()

    def forward(x):
        h = net(x) * 0
        h = h * h
        h[:, 1:].sqrt_()  # here
        return h.sum()

    report = locate(net, forward, X)
    assert (report.phase, report.op, report.line) == ("backward", "div", line_of(forward))


def test_gradient_penalty_and_tensor_hook():
    net = Net()

    def penalty(x):
        x = x.clone().requires_grad_()
        h = net(x)
        distance = (h - h.detach()).square().sum().sqrt()  # here
        return torch.autograd.grad(distance, x, create_graph=True)[0].sum()

    def hook(x):
        h = net(x)
        h.register_hook(lambda grad: grad / (grad - grad))  # here
        return h.sum()

    report = locate(net, penalty, X)
    assert (report.node, report.line) == ("SqrtBackward0", line_of(penalty))
    report = locate(net, hook, X)
    assert (report.phase, report.op, report.line) == ("backward", "div", line_of(hook))


@pytest.mark.parametrize(
    "op, module, change",
    [("addmm", "first", 3e4), ("_to_copy", "bug.0", 1.0), ("mm", "", 1e3)],
)
def test_half_precision_under_the_cuda_policy(op, module, change):
    net = Net(lambda: nn.Sequential(nn.Linear(4, 4)))
    net.first.weight.data.mul_(10)
    if op == "_to_copy":
        net.bug[0].weight.data[0, 0] = 1e5

    def forward(x):
        with torch.autocast("cpu", torch.float16):
            h = net(x * change)
            return (h @ h.T / 100).float().mean() if op == "mm" else h.float().mean()

    with cuda_autocast_policy():
        report = locate(net, forward, X)
    assert (report.phase, report.op, report.module) == ("forward", op, module)
    assert report.confirmed


def test_an_operation_that_the_policy_casts_keeps_its_line():
    net = Net()

    def forward(x):
        with torch.autocast("cpu", torch.float16):
            return net(x * 1e3).softmax(-1).log().mean()  # here

    with cuda_autocast_policy():
        report = locate(net, forward, X)
    assert (report.op, report.line) == ("log", line_of(forward))


INF = -torch.inf
MASK = torch.tensor([[0, INF, INF, 0], [INF, INF, INF, INF]])


def test_masks_in_the_batch_are_not_bad_data_but_a_masked_row_is_found():
    net = Net()
    report = locate(net, lambda b: (net(b[0]) + b[1]).softmax(-1).sum(), (X, MASK))
    assert (report.phase, report.op, report.confirmed) == ("forward", "_softmax", True)
    bug = locate(net, lambda b: (net(b[0]) + b[1][:1]).softmax(-1).sum() / 0, (X, MASK))
    assert (bug.op, bug.confirmed) == ("div", True)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_bad_data_is_input(value):
    x = X.clone()
    x[1, 2] = value
    net = Net()
    report = locate(net, lambda b: net(b["x"]).sum(), {"x": x})
    assert (report.phase, report.confirmed) == ("input", True)
    assert report.tensor.startswith("batch['x']")


def test_what_does_not_reach_the_loss_is_not_blamed():
    x = X.clone()
    x[1, 2] = torch.nan
    net = Net()
    report = locate(net, lambda b: net(b)[:1].sum() / 0, x)
    assert (report.phase, report.op) == ("forward", "div")


def test_both_of_two_causes():
    net = Net()
    report = locate(net, lambda x: (net(x) * 0).log().sum() + net(x).mean() / 0, X)
    assert report.op == "log" and report.confirmed
    assert any(other.startswith("div") for other in report.also_needed)


def test_without_the_intervention_nothing_is_confirmed(monkeypatch):
    net = Net()
    assert locate(net, lambda x: exp_overflow(net, x), X).confirmed
    monkeypatch.setattr("nan_lab.tracer._put_finite", lambda tensor, mask: None)
    report = locate(net, lambda x: exp_overflow(net, x), X)
    assert not report.confirmed and report.op == "exp"
    assert "hint" in report.note


@pytest.mark.parametrize(
    "forward, words",
    [
        (lambda x: x.nothing, "AttributeError"),
        (lambda x: None, "NoneType"),
        (lambda x: 3, "int"),
        (lambda x: x.long().sum(), "torch.int64"),
        (lambda x: x, "(2, 4)"),
        (lambda x: x.sum(), "the replay is finite"),
        (
            lambda x: x.sum() * torch.frombuffer(b"\0\0\xc0\x7f", dtype=torch.float32)[0],
            "no tensor",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_where_it_stops_it_says_why_and_names_nobody(forward, words):
    report = locate(Net(), forward, X)
    assert words in report.note
    assert (report.op, report.line, report.confirmed) == ("", "", False)
    assert "confirmed: no" in str(report)


def test_no_batch_empty_batch_frozen_model():
    net = Net().requires_grad_(False)
    assert locate(net, lambda _: net(X).sum() / 0, None).op == "div"
    assert locate(net, lambda x: net(x).mean(), X[:0]).op == "mean"


def everything_of(net, x):
    """All state that a replay could touch."""
    state = [torch.get_rng_state(), torch.tensor(random.getstate()[1]), x.clone()]
    state += [t.clone() for t in net.state_dict().values()]
    state += [torch.zeros(()) if p.grad is None else p.grad.clone() for p in net.parameters()]
    flags = (
        net.training,
        net.calls,
        len(net.seen),
        net.average.tolist(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
    )
    hooks = [len(m._forward_hooks) for m in net.modules()]
    return [t.tolist() for t in state], flags, hooks


class Restless(nn.Module):
    """Changes as much as a forward pass can."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls_seen", torch.zeros(()))
        self.calls, self.seen, self.average = 0, [], torch.zeros(4)

    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        self.average.add_(1)
        self.first.weight.data.mul_(1.5)
        self.calls_seen = self.calls_seen + 1
        x.mul_(2)
        self.extra = F.dropout(self.norm(self.first(x.clone())), 0.5)
        random.random()
        return self.extra


@pytest.mark.parametrize("then", [lambda h: h.sum() / 0, lambda h: h.nothing])
def test_nothing_of_the_users_changes(then):
    net, x = Restless(), X.clone()
    net(x).sum().backward()
    fired = []
    net.first.weight.register_post_accumulate_grad_hook(fired.append)
    grads, buffer = [p.grad for p in net.parameters()], net.calls_seen
    before = everything_of(net, x)
    with torch.no_grad():
        report = locate(net, lambda x: then(net(x)), x)
        assert not torch.is_grad_enabled()
    assert str(everything_of(net, x)) == str(before)
    assert all(p.grad is grad for p, grad in zip(net.parameters(), grads, strict=True))
    assert net.calls_seen is buffer and fired == []
    assert report.confirmed == ("stopped" not in report.note)


def test_a_notebook_cell_has_a_readable_line(monkeypatch):
    file = "/tmp/ipykernel_1/123.py"
    shell = types.SimpleNamespace(compile=types.SimpleNamespace(_filename_map={file: 7}))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    scope = {}
    exec(compile("\n\ndef forward(x):\n    return x.sum() / 0\n", file, "exec"), scope)
    assert locate(Net(), scope["forward"], X).line == "cell 7:4"

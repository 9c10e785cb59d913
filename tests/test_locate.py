"""locate: the operation, module and line of a failed step, and whether the proof is one."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nan_lab.locate import locate


def line_of(function, marker="# here"):
    """`file.py:number` of the line of `function` that carries the marker."""
    lines, start = inspect.getsourcelines(function)
    (offset,) = (i for i, line in enumerate(lines) if marker in line)
    return f"{__file__.rpartition('/')[2]}:{start + offset}"


def weights(*shape):
    return nn.Parameter(torch.linspace(-0.3, 0.5, torch.Size(shape).numel()).view(shape))


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

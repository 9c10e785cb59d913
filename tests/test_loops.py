"""The loops keep the contract, and differ from `fixed` in the one thing that their name says."""

import difflib
import inspect

import pytest
import torch

from nan_lab import loops

LOOPS = [
    loops.broken, loops.fixed, loops.guarded, loops.without_fused_loss, loops.without_clipping,
    loops.without_guard, loops.clip_before_unscale, loops.bfloat16_without_guard,
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS)
def test_the_contract(loop):
    assert inspect.isgeneratorfunction(loop)
    names = ["model", "loader", "optimizer", "scaler", "device_type", "dtype"]
    parameters = inspect.signature(loop).parameters
    assert list(parameters) == names and parameters["device_type"].default == "cuda"
    assert len(inspect.getsource(loop).splitlines()) <= 20  # short enough to read in a cell


def code_of(loop):
    lines = inspect.getsource(loop).splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith("for "))
    return lines[start:]


@pytest.mark.parametrize(("loop", "removed", "added"), [
    (loops.without_fused_loss, ["cross_entropy"], ["torch.log(torch.softmax"]),
    (loops.without_clipping, ["unscale_", "clip_grad_norm_"], []),
    (loops.without_guard, ["enumerate", "isfinite(x)", "isfinite(loss)"], ["for x, y in loader"]),
])  # fmt: skip
def test_one_fix_is_missing_and_nothing_else(loop, removed, added):
    diff = difflib.ndiff(code_of(loops.fixed), code_of(loop))
    changed = [line for line in diff if line[0] in "+-"]
    for sign, wanted in (("-", removed), ("+", added)):
        lines = [line for line in changed if line[0] == sign]
        assert len(lines) == len(wanted)
        assert all(text in line for text, line in zip(wanted, lines, strict=True))


def test_show_source_is_markdown_for_jupyterlab_and_plain_text_for_nbval(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    loops.show_source(loops.broken)
    (data,) = shown
    assert data["text/plain"] == inspect.getsource(loops.broken).rstrip()
    assert data["text/markdown"] == f"```python\n{data['text/plain']}\n```"


def test_a_loop_yields_one_loss_a_batch_to_whoever_drives_it():
    model = torch.nn.Sequential(torch.nn.Linear(64, 10))
    batch = torch.rand(8, 64), torch.eye(10)[:8]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for loop in LOOPS:
        losses = list(loop(model, [batch] * 3, optimizer, scaler, "cpu"))
        assert len(losses) == 3 and all(loss.shape == () for loss in losses)

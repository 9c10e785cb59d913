"""Ours against the tools people use to find the first NaN: who names what, and at what price.

    python -m benchmarks.detection [--tools ours,anomaly] [--accuracy-only] [--markdown]

A tool that is not installed is left out of the table and named under it. Columns:

- step: cases flagged at the right step.
- exact: right operation and right line of the case's code; for a backward case the right node
  counts as the operation. Where no line exists (input, optimizer, norm, scaler), the right phase.
- module: right module, of the cases whose module is fixed; "-" for a tool that names none.
- false: healthy controls flagged, or crashed on.
- crash: failing cases on which the tool itself raised.
- bitwise: the controls end with the same bits as without the tool.
- transformer, mlp: CPU time with the tool / without it, median over interleaved blocks. CPU time
  of this process, so that other programs on the machine do not count.
- blocks: how many; a slow tool gets fewer (a minute for each model, five blocks at least).
- reads: extra device-to-host reads a step, on the transformer. On a GPU each one waits.
"""

import argparse
import contextlib
import io
import re
import statistics
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from benchmarks import cases
from benchmarks.cases import CASES, CONTROLS, Case, Run, state_of, train
from benchmarks.tools import TOOLS, Found, Tool

# What torch functions call the operations that aten calls otherwise.
ALIASES = {
    "truediv": "div",
    "rtruediv": "div",
    "itruediv": "div",
    "itruediv_": "div",
    "matmul": "bmm",
    "linear": "addmm",
    "float": "to_copy",
    "to": "to_copy",
    "norm": "linalg_vector_norm",
    "cross_entropy": "cross_entropy_loss",
    "setitem": "copy",
    "multi_head_attention_forward": "softmax",
}


@dataclass(frozen=True)
class Verdict:
    """What one tool said about one case."""

    found: Found | None
    step: bool = False
    exact: bool = False
    module: bool = False
    crash: str = ""


def plain_name(op: str) -> str:
    """One name for log, log_, __log__, LogBackward0."""
    op = re.sub(r"Backward\d*$", "", op)
    op = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", op).lower().strip("_")
    return ALIASES.get(op, op)


def on_line(case: Case, line: str) -> bool:
    name, _, number = line.rpartition(":")
    same_file = Path(name).name == Path(cases.__file__).name
    return same_file and number.isdigit() and int(number) in case.lines


def exact(case: Case, found: Found) -> bool:
    """True when the claim names the operation and the line, or, without a line, the phase."""
    if not case.lines:
        right_op = case.ops is None or found.op in case.ops
        return found.phase in case.phases and right_op
    if found.phase and not found.op:
        return "" in case.ops and not found.confirmed
    names = {plain_name(op) for op in case.ops} | {plain_name(case.node)} - {""}
    right_op = plain_name(found.op) in names or plain_name(found.node) in names
    if found.phase:  # ours states the phase and aten's own name, and is held to both
        right_op = found.op in case.ops and found.phase in case.phases
    return right_op and on_line(case, found.line)


def examine(case: Case, tool_class) -> Verdict:
    """Run one case under one tool, as its users would, and judge what it says."""
    run, printed = case.run(), io.StringIO()
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        tool = tool_class(run)
        try:
            train(run, tool)
            return Verdict(None)
        except Found as claim:
            found = claim
        except Exception as error:  # a tool may raise anything: its claim, or its own failure
            found = tool.read(error, [str(w.message) for w in warned], printed.getvalue())
            if found is None:
                return Verdict(None, crash=f"{type(error).__name__}: {error}"[:200])
        finally:
            tool.close()
    step = tool.step if found.step is None else found.step
    right_step = step in case.steps
    right_module = case.modules is None or found.module in case.modules
    return Verdict(found, right_step, right_step and exact(case, found), right_module)


def bitwise_equal(case: Case, tool_class) -> bool:
    """True when training a control under the tool ends in the same bits as without it."""
    run = case.run()
    expected = state_of(run, train(run))
    run = case.run()
    tool = tool_class(run)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return state_of(run, train(run, tool)) == expected
    finally:
        tool.close()


# --- what it costs ---------------------------------------------------------------------------


def transformer(steps: int) -> Run:
    """Four pre-norm layers of width 128, 16 sequences of 32."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
    model.append(nn.Linear(128, 10))
    data = [(torch.rand(16, 32, 128), torch.randint(10, (16, 32))) for _ in range(steps)]
    return _trained(model, data)


def mlp(steps: int) -> Run:
    """64-512-512-10 on batches of 256."""
    torch.manual_seed(0)
    hidden = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    model = nn.Sequential(*hidden, nn.Linear(512, 10))
    data = [(torch.rand(256, 64), torch.randint(10, (256,))) for _ in range(steps)]
    return _trained(model, data)


def _trained(model, data):
    def forward(batch):
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    return Run(model, forward, data, [torch.optim.AdamW(model.parameters(), lr=1e-4)])


def overhead(make, tool_class, blocks: int, steps: int) -> tuple[float, int]:
    """Median over blocks of time with the tool / time without, measured one after the other.

    Returns the median and the number of blocks, at most `blocks`.
    """
    plain, watched = make(steps), make(steps)
    tool = tool_class(watched)
    arms = [(plain, None), (watched, tool)]
    ratios = []
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        began = time.process_time()
        for block in range(-1, blocks):  # block -1 warms both up
            seconds = {}
            for run, guard in arms if block % 2 else arms[::-1]:
                start = time.process_time()
                train(run, guard)
                seconds[guard] = time.process_time() - start
            if block >= 0:
                ratios.append(seconds[tool] / seconds[None])
            if len(ratios) >= 5 and time.process_time() - began > 60:
                break
    tool.close()
    return statistics.median(ratios), len(ratios)


class _BulkReads(TorchFunctionMode):
    """Counts calls that copy a whole tensor to the host, which no operation shows on a CPU."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("tolist", "numpy", "cpu"):
            self.count += 1
        return func(*args, **(kwargs or {}))


def host_reads(make, tool_class=None, steps=3) -> float:
    """Device-to-host reads a step."""
    run = make(steps)
    tool = tool_class and tool_class(run)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        # A dispatch mode would not see what another mode's handler reads; the profiler does.
        with torch.autograd.profiler.profile() as profile, _BulkReads() as bulk:
            train(run, tool)
    if tool:
        tool.close()
    scalars = sum(event.name == "aten::_local_scalar_dense" for event in profile.function_events)
    return (scalars + bulk.count) / steps


# --- the table -------------------------------------------------------------------------------


def accuracy(tool_class) -> tuple[dict, dict[str, Verdict]]:
    verdicts = {case.name: examine(case, tool_class) for case in CASES}
    controls = {case.name: examine(case, tool_class) for case in CONTROLS}
    calm = [c for c in CONTROLS if not (controls[c.name].found or controls[c.name].crash)]
    fixed = [case.name for case in CASES if case.modules is not None]
    right_module = sum(verdicts[name].module and verdicts[name].step for name in fixed)
    scores = {
        "step": f"{sum(v.step for v in verdicts.values())}/{len(CASES)}",
        "exact": f"{sum(v.exact for v in verdicts.values())}/{len(CASES)}",
        "module": f"{right_module}/{len(fixed)}" if tool_class.names_modules else "-",
        "false": f"{len(CONTROLS) - len(calm)}/{len(CONTROLS)}",
        "crash": str(sum(bool(v.crash) for v in verdicts.values())),
        "bitwise": "yes" if all(bitwise_equal(case, tool_class) for case in calm) else "no",
    }
    return scores, verdicts | controls


def cost(tool_class, blocks, steps) -> dict:
    if tool_class.told_the_step:
        return dict.fromkeys(("transformer", "mlp", "blocks", "reads"), "-")
    large, large_blocks = overhead(transformer, tool_class, blocks, steps)
    small, small_blocks = overhead(mlp, tool_class, blocks, steps * 4)
    extra = host_reads(transformer, tool_class) - host_reads(transformer)
    return {
        "transformer": f"{large:.3f}",
        "mlp": f"{small:.3f}",
        "blocks": f"{large_blocks}, {small_blocks}",
        "reads": f"{extra:.0f}",
    }


def table(rows: list[dict], markdown: bool) -> str:
    columns = list(rows[0])
    lines = [columns, *[[row[column] for column in columns] for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    lines.insert(1, ["-" * width for width in widths])
    text = [" | ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(f"| {line} |" for line in text) if markdown else "\n".join(text)


def misses(verdicts: dict[str, Verdict]) -> list[str]:
    """One line for each case that a tool got wrong, and each control that it did not pass."""
    lines = []
    for case in CASES + CONTROLS:
        verdict = verdicts[case.name]
        if verdict.crash:
            lines.append(f"{case.name}: crashed, {verdict.crash}")
        elif verdict.found is None and case.steps:
            lines.append(f"{case.name}: silent")
        elif verdict.found is not None and not (verdict.exact and verdict.module):
            lines.append(f"{case.name}: said {vars(verdict.found)}, lines {sorted(case.lines)}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tools", default=",".join(TOOLS), help="comma-separated, default: all")
    parser.add_argument("--accuracy-only", action="store_true", help="no timing, no host reads")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--blocks", type=int, default=31, help="interleaved blocks, default 31")
    parser.add_argument("--steps", type=int, default=4, help="transformer steps a block; MLP 4x")
    parser.add_argument("--misses", action="store_true", help="list what each tool got wrong")
    options = parser.parse_args()
    unknown = set(options.tools.split(",")) - set(TOOLS)
    if unknown:
        parser.error(f"unknown tools {sorted(unknown)}; known: {', '.join(TOOLS)}")

    rows, absent = [], []
    for name in options.tools.split(","):
        tool_class = TOOLS[name]
        if tool_class.missing():
            absent.append(f"{tool_class.title} ({tool_class.missing()})")
            continue
        scores, verdicts = accuracy(tool_class)
        if not options.accuracy_only:
            scores |= cost(tool_class, options.blocks, options.steps)
        rows.append({"tool": tool_class.title} | scores)
        if options.misses:
            print(f"{tool_class.title}:", *misses(verdicts), sep="\n  ")
    print(table(rows, options.markdown))
    if not options.accuracy_only:
        noise = [overhead(m, Tool, options.blocks, options.steps)[0] for m in (transformer, mlp)]
        print(f"\ntorch {torch.__version__}, {torch.get_num_threads()} threads; the same two")
        print("ratios for a tool that does nothing: {:.3f}, {:.3f}".format(*noise))
    for title in absent:
        print(f"not installed: {title}")


if __name__ == "__main__":
    # In a thread of its own: `python -m` leaves a frame without a source file on the main one,
    # and a tool that reads the stack with inspect searches every module for it, at each operation.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(main).result()

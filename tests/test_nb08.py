"""The claims of notebook 08: what each way of looking finds, and who is innocent."""

import ast
import json
import re
import warnings
from functools import cache

import pytest
import torch

from nan_lab import data, exercises, loops, record, triggers
from nan_lab.exercises.nb08 import TRUTH, mystery
from nan_lab.guard import NonFiniteStep, StepGuard
from tests.notebook_code import NOTEBOOKS, definitions
from tests.wrong_answers.nb08 import RIGHT

NOTEBOOK = definitions("08")
BLANK = triggers.Trigger("blank picture", 4, 4, NOTEBOOK["blank_first"])
BIRTH = ("div.Tensor", "SqrtBackward0")
SEEDS = pytest.mark.parametrize("seed", range(3))
RUNS = pytest.mark.parametrize("name", "abc")


@cache
def train(loop, model="with_length", trigger=BLANK, dtype=torch.bfloat16, **options):
    options = {"model": NOTEBOOK.get(model), "epochs": 1, "device": "cpu"} | options
    return record.run(loop, trigger, dtype=dtype, **options)


@pytest.fixture
def step():
    """The notebook's step on the blank picture: a function that runs forward and backward."""
    torch.manual_seed(0)
    x, y = next(data.batches(32, torch.Generator().manual_seed(0)))
    NOTEBOOK["model"], batch = NOTEBOOK["with_length"](), NOTEBOOK["blank_first"](x, y)
    return lambda: NOTEBOOK["forward"](batch).backward()


def gradients_are_finite():
    return all(p.grad.isfinite().all() for p in NOTEBOOK["model"].parameters())


@SEEDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_is_nan_a_step_before_the_loss_and_the_guard_is_in_time(seed, dtype):
    run = train(loops.without_guard, seed=seed, dtype=dtype)
    assert (run.first_bad_grad_step, run.first_bad_step) == (4, 5) and not run.weights_finite
    stopped = train(loops.guarded, seed=seed, dtype=dtype)
    assert stopped.stopped_at == 4 and stopped.weights_finite
    assert isinstance(stopped.error, NonFiniteStep)
    report = stopped.error.report
    assert (report.step, report.phase, report.op, report.node) == (
        4,
        "backward",
        *("div", BIRTH[1]),
    )
    assert report.module == "1" and report.confirmed


@SEEDS
def test_the_librarys_norm_cures_it_and_is_the_same_number(seed):
    for loop in (loops.without_guard, loops.guarded):
        run = train(loop, "with_norm", seed=seed)
        assert run.error is None and run.first_bad_grad_step is None and run.weights_finite
    h = torch.rand(32, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = NOTEBOOK["WithLength"]()(h)
    torch.testing.assert_close(NOTEBOOK["WithNorm"]()(h.float()), expected.float())


def test_in_float16_the_bug_looks_like_one_of_the_scalers_skips():
    run = train(loops.without_guard, dtype=torch.float16, init_scale=1024.0, epochs=3)
    assert [i for i, skipped in enumerate(run.skipped) if skipped] == [4]
    assert run.first_bad_step is None and run.weights_finite
    # Far from an overflow: an entry of the gradient would have to pass 65504 / 1024 = 64.
    assert max(norm for i, norm in enumerate(run.grad_norm) if i != 4) < 64 / 1.5
    stopped = train(loops.guarded, dtype=torch.float16, init_scale=1024.0)
    assert stopped.stopped_at == 4 and stopped.error.report.node == BIRTH[1]


def test_anomaly_mode_names_the_square_and_the_mode_the_root(step):
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="'PowBackward0' returned nan values"):
            step()
    assert NOTEBOOK["births"](step) == [BIRTH]


def test_healing_the_root_makes_the_gradient_finite_and_healing_another_does_not(step):
    for name, finite in (("div.Tensor", True), ("addmm.default", False)):
        NOTEBOOK["model"].zero_grad()
        with NOTEBOOK["Heal"](name):
            step()
        assert gradients_are_finite() == finite


@SEEDS
def test_anomaly_mode_stops_a_healthy_search_for_the_scale_and_the_guard_does_not(seed):
    healthy = {"model": None, "trigger": None, "dtype": torch.float16, "seed": seed}
    search = train(NOTEBOOK["under_anomaly_mode"], init_scale=2.0**24, **healthy)
    assert search.stopped_at == 0 and "returned nan values" in str(search.error)
    guarded = train(loops.guarded, init_scale=2.0**24, **healthy)
    assert guarded.error is None and guarded.skipped[:3] == [True] * 3
    fixed = train(loops.fixed, init_scale=2.0**24, **healthy)
    assert (guarded.loss, guarded.skipped) == (fixed.loss, fixed.skipped)


def test_there_are_births_at_the_high_scale_and_none_at_1(step):
    x, y = next(data.batches(32, torch.Generator().manual_seed(0)))
    for scale, any_birth in ((2.0**24, True), (1.0, False)):
        scaled = NOTEBOOK["forward16"]((x, y)) * scale
        assert bool(NOTEBOOK["births"](scaled.backward)) == any_birth


def test_the_mask_is_a_birth_and_innocent():
    NOTEBOOK["attention"] = torch.nn.Linear(3, 3)
    attend, births, heal = (NOTEBOOK[name] for name in ("attend", "births", "Heal"))
    assert births(lambda: attend(4)) == [("full.default", "forward")]
    assert births(lambda: attend(0)) == [("full.default", "forward"), ("div.Tensor", "forward")]
    for name, finite in (("full.default", False), ("div.Tensor", True)):
        with heal(name):
            assert attend(0).isfinite() == finite


@SEEDS
def test_a_random_failure_is_found_only_with_its_random_state(seed, step):
    some_of_them, births = NOTEBOOK["some_of_them"], NOTEBOOK["births"]
    x, y = next(data.batches(4, torch.Generator().manual_seed(0)))
    torch.manual_seed(seed)
    for _ in range(400):
        rng = torch.get_rng_state()
        if not some_of_them((x, y)).isfinite():
            break
    torch.set_rng_state(rng)
    assert births(lambda: some_of_them((x, y))) == [("mean.default", "forward")]
    assert [] in [births(lambda: some_of_them((x, y))) for _ in range(16)]


def test_the_other_phases():
    report = train(loops.guarded, None, triggers.nan_pixel(2)).error.report
    assert (report.phase, report.kind, report.confirmed) == ("input", "nan", True)
    report = train(loops.guarded, None, triggers.huge_pixels(2), torch.float16).error.report
    assert (report.phase, report.op, report.module) == ("forward", "_to_copy", "0")
    assert train(loops.guarded, None, triggers.huge_pixels(2)).error is None  # bfloat16 holds them


@RUNS
def test_the_guard_names_what_the_exercise_holds_for_true(name):
    with pytest.raises(NonFiniteStep) as caught:
        NOTEBOOK["train"](*mystery(name))
    report, truth = caught.value.report, TRUTH[name]
    assert (report.step, report.phase, report.confirmed) == (truth.step, truth.phase, True)
    assert report.op in truth.ops


@RUNS
def test_without_its_bad_batch_a_mystery_run_is_healthy_and_the_guard_changes_nothing(name):
    weights = []
    for guarded in (True, False):
        run, step = mystery(name), TRUTH[name].step
        run.batches[step] = run.batches[step - 1]
        if guarded:
            NOTEBOOK["train"](*run)
        else:
            NOTEBOOK["StepGuard"], kept = Silent, NOTEBOOK["StepGuard"]
            try:
                NOTEBOOK["train"](*run)
            finally:
                NOTEBOOK["StepGuard"] = kept
        weights.append([p.clone() for p in run.model.parameters()])
    assert all(map(torch.equal, *weights))
    assert NOTEBOOK["StepGuard"] is StepGuard


class Silent:
    """Stands in for a guard and does nothing."""

    def __init__(self, *_): ...

    def begin(self, *_): ...

    def check(self, loss, grad_norm):
        return loss, grad_norm


@pytest.mark.parametrize("name, log", [("a", "." * 6 + "N" * 6), ("b", ".......N...."),
                                       ("c", ".........N..")])  # fmt: skip
def test_the_log_of_the_loss(name, log):
    run = mystery(name)
    assert NOTEBOOK["log_of"](*run) == log
    assert name != "c" or run.scaler.get_scale() < 2.0**24 / 4


@RUNS
def test_a_healthy_step_of_each_mystery_run_is_full_of_suspects(name):
    """So that the first birth, or the first skip, is a wrong answer."""
    run = mystery(name)
    step = 0 if name == "c" else 3
    loss = run.forward(run.batches[step])
    found = NOTEBOOK["births"](lambda: run.scaler.scale(run.forward(run.batches[step])).backward())
    assert found and loss.isfinite()


def test_other_names_of_the_same_operations_are_right_too():
    other = {
        "a": (5, "backward", "LogBackward0", "slope"),
        "b": [7, "forward", "_softmax.default", "empty"],
        "c": (9, "forward", "linear", "range"),
    }
    for answer in (RIGHT, other):
        assert exercises.check("three_runs", answer).outcome == "correct"
    stub = dict.fromkeys("abc")
    assert exercises.check("three_runs", stub).outcome == "not attempted"


def test_what_is_shown_for_other_trainers_is_python():
    (path,) = NOTEBOOKS.glob("08_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        ast.parse(block)

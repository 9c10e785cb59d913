"""The guard on every case of benchmarks/cases.py, and the cases themselves without it."""

import functools

import pytest
import torch

from benchmarks.cases import CASES, CONTROLS, MARK, PlainCheck, Symptom, state_of, train
from benchmarks.detection import bitwise_equal, examine
from benchmarks.tools import Ours

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0"),
    pytest.mark.filterwarnings("ignore:.*autocast"),
]


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def symptom(run):
    """The first symptom that isfinite shows, with gradients as they are at scale 1."""
    run.scaler = None
    try:
        train(run, PlainCheck(run))
    except Symptom as found:
        return found.step, found.what
    return None


# --- the cases, without any guard: one that healed itself in a new torch turns red -----------


@by_name([case for case in CASES if case.seen != "skips"])
def test_case_fails_without_a_guard(case):
    step, what = symptom(case.run())
    assert what == case.seen
    # A row of NaN that waits for its lookup is seen at step 3; naming step 2 is right as well.
    assert step == max(case.steps)


@by_name([case for case in CASES if case.seen == "skips"])
def test_case_skips_every_step_and_would_not_at_scale_1(case):
    run = case.run()
    before = [p.clone() for p in run.model.parameters()]
    train(run)
    assert all(torch.equal(p, q) for p, q in zip(before, run.model.parameters(), strict=True))
    assert symptom(case.run()) is None


@by_name(CONTROLS)
def test_control_is_healthy_without_a_guard(case):
    assert symptom(case.run()) is None


def test_control_warms_up_by_skipping():
    (case,) = [c for c in CONTROLS if c.name == "scaler_warm_up"]
    run = case.run()
    start = run.scaler.get_scale()
    train(run)
    assert 1 < run.scaler.get_scale() <= start / 2**3
    assert not torch.equal(run.model[0].weight, case.run().model[0].weight), "and then trains"


@by_name(CASES)
def test_case_has_its_line(case):
    without_line = {"input", "optimizer", "norm", "scaler"}
    assert case.lines or without_line & set(case.phases), f"no {MARK} in {case.name}"
    assert case.about


def test_state_is_the_same_twice_and_shows_one_bit():
    case = next(c for c in CONTROLS if c.name == "batchnorm_dropout_checkpoint")
    first = case.run()
    expected = state_of(first, train(first))
    second = case.run()
    losses = train(second)
    assert state_of(second, losses) == expected
    with torch.no_grad():
        one = second.model[0].weight[0, :1]
        one.copy_(torch.nextafter(one, one + 1))
    assert state_of(second, losses) != expected


# --- the guard -------------------------------------------------------------------------------


class Watched(Ours):
    """Compares everything that training owns, byte for byte, before and after a failed check."""

    unchanged = []

    def __init__(self, run):
        super().__init__(run)
        self.check = self.compare

    def compare(self, loss, norm):
        before = state_of(self.run, [])
        try:
            return self.guard.check(loss, norm)
        except Exception:
            self.unchanged.append(state_of(self.run, []) == before)
            raise


@functools.cache
def verdict_of(case):
    """The verdict, and whether the failed step was left as it was found: one run for both."""
    Watched.unchanged.clear()
    verdict = examine(case, Watched)
    return verdict, list(Watched.unchanged)


@by_name(CASES)
def test_guard_names_the_origin(case):
    verdict, _ = verdict_of(case)
    assert not verdict.crash
    assert verdict.found is not None, f"not flagged: {case.about}"
    said = vars(verdict.found)
    wanted = f"{case.steps} {case.phases} {case.ops} lines {sorted(case.lines)} {case.modules}"
    assert verdict.step and verdict.exact and verdict.module, f"{said}, expected {wanted}"
    assert not case.node or verdict.found.node == case.node
    if verdict.found.phase in ("forward", "backward", "input"):
        no_suspect = not verdict.found.op and "" in (case.ops or ())
        assert verdict.found.confirmed is not no_suspect


@by_name(CASES)
def test_guard_leaves_the_failed_step_as_it_found_it(case):
    _, unchanged = verdict_of(case)
    assert unchanged == [True]


@by_name(CONTROLS)
def test_guard_is_silent_and_changes_no_bit(case):
    verdict = examine(case, Ours)
    assert not verdict.crash
    assert verdict.found is None, vars(verdict.found)
    assert bitwise_equal(case, Ours)

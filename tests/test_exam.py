"""The grader: the bank of loops, what it puts back, how it prints; the mystery runs' margins."""

import random
import sys
import time
import warnings

import numpy as np
import pytest
import torch

from nan_lab import exam, exam_containment, exam_mysteries, exam_runner, loops, record
from tests.exam_bank import ours
from tools.confusion import banks, failing

NAMES = (
    "contract, loss value, loss gradient, clipping, loss scale, step order, bad input, overflow, "
    "non-finite gradient, false alarm, mixed precision, architecture, learning, global state, "
    "gradient reported, soft labels"
).split(", ")


def bank():
    """Every loop of the bank as a parameter; without --all only one in six is graded."""
    for number, (file, loop, rows) in enumerate(banks()):
        marks = [pytest.mark.slow] if number % 6 else []
        yield pytest.param(loop, rows, id=f"{file}-{loop.__name__}", marks=marks)


@pytest.mark.parametrize(("loop", "expected"), list(bank()))
def test_every_loop_of_the_bank_fails_the_rows_it_must(loop, expected):
    grade = exam.grade(loop)
    assert failing(grade) == expected, f"\n{grade}"
    assert grade.passed == (not expected)


def test_bank_is_large_enough():
    right = sum(not rows for _, rows in ours.BANK)
    assert right >= 12
    assert len(ours.BANK) - right >= 14
    assert {row for _, rows in ours.BANK for row in rows} == set(NAMES) - set(exam.criteria.BONUS)


def test_rows_of_a_full_grade():
    grade = exam.grade(loops.fixed)
    assert [row.name for row in grade.rows] == NAMES
    assert [row.name for row in grade.rows if row.bonus] == NAMES[-2:]
    assert all(f"\n{name}: " in exam.__doc__ for name in NAMES[:-2])


def test_bonus_rows():
    def bonus(loop):
        return {row.name: row.passed for row in exam.grade(loop).rows if row.bonus}

    by_name = {loop.__name__: loop for loop, _ in ours.BANK}
    assert bonus(loops.fixed) == {"gradient reported": False, "soft labels": True}
    assert bonus(by_name["nan_gradients_reported"])["gradient reported"]
    assert not bonus(by_name["log_softmax_nll"])["soft labels"]


def test_a_grade_is_the_same_twice_and_takes_under_ten_seconds_of_cpu_time():
    start = time.process_time()
    first = exam.grade(loops.broken)
    assert time.process_time() - start < 10
    second = exam.grade(loops.broken)
    assert (str(first), first._repr_markdown_()) == (str(second), second._repr_markdown_())


def test_table_and_text_say_the_same():
    grade = exam.grade(loops.without_clipping)
    text, table = str(grade), grade._repr_markdown_()
    assert text.startswith("Not passed: 1 to mend")
    for row in grade.rows:
        assert row.why in text
        assert f"| {row.why} |" in table
    assert len({line.replace("\\|", "").count("|") for line in table.splitlines()[2:]}) == 1
    assert text.count("02_missing_clipping") == table.count("02_missing_clipping") == 1


# What a loop does to the interpreter.


def spoil(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    """Change everything global that there is, and leave it."""
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.autograd.set_detect_anomaly(True)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    warnings.simplefilter("error")
    sys.stdout.write("noise")
    sys.stderr.write("noise")
    sys.stdout = None
    yield torch.zeros(())


def interpreter():
    return (
        exam_containment.read_state(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        str(np.random.get_state()),
        warnings.filters[:],
        warnings.showwarning,
        sys.stdout,
        sys.stderr,
    )


def test_everything_is_put_back(capsys):
    before = interpreter()
    grade = exam.grade(spoil)
    assert interpreter() == before
    assert not grade.passed and len(grade.rows) == 1
    assert capsys.readouterr() == ("", "")


def test_everything_is_put_back_after_a_full_grade():
    def leaves_it_changed(*arguments):
        yield from loops.fixed(*arguments)
        next(spoil(*arguments), None)

    before = interpreter()
    grade = exam.grade(leaves_it_changed)
    assert interpreter() == before
    why = {row.name: row.why for row in grade.rows}["global state"]
    for name in ("autocast", "default dtype", "grad mode", "anomaly", "seed", "warning filters"):
        assert name in why


def test_the_callers_own_state_does_not_matter():
    try:
        torch.set_default_dtype(torch.float64)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert exam.grade(loops.fixed).passed
    finally:
        torch.set_default_dtype(torch.float32)


def never_ends(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    while True:
        pass
    yield


def never_ends_and_catches_all(
    model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16
):
    while True:
        try:
            next(loader, None)
        except:  # noqa: E722
            pass
    yield


def ends_badly(model, loader, optimizer, scaler, device_type="cuda", dtype=torch.float16):
    """Does not let itself be closed."""
    try:
        yield torch.zeros(())
        yield torch.zeros(())
    finally:
        while True:
            pass


@pytest.mark.parametrize("loop", [never_ends, never_ends_and_catches_all, ends_badly])
def test_a_loop_that_never_ends_is_stopped(loop, monkeypatch):
    monkeypatch.setattr(exam_containment, "PATIENCE", 0.5)
    grade = exam.grade(loop)
    assert failing(grade) == {"contract"}
    time.sleep(0.2)  # nothing arrives late


def raises(error):
    def loop(*arguments):
        yield from ()
        raise error

    return loop


@pytest.mark.parametrize("error", [SystemExit(1), GeneratorExit(), RecursionError(), MemoryError()])
def test_what_a_loop_raises_is_in_the_grade(error):
    grade = exam.grade(raises(error))
    assert failing(grade) == {"contract"}
    assert type(error).__name__ in grade.rows[0].why


def test_keyboard_interrupt_is_the_users():
    before = interpreter()
    with pytest.raises(KeyboardInterrupt):
        exam.grade(raises(KeyboardInterrupt()))
    assert interpreter() == before


@pytest.mark.parametrize("thing", [None, 5, "fixed", torch.nn.Linear(2, 2), lambda: None])
def test_what_is_no_loop_at_all(thing):
    assert failing(exam.grade(thing)) == {"contract"}


def late_surprises():
    def changes_the_model(model, *rest):
        for step, loss in enumerate(loops.fixed(model, *rest)):
            if step == 8:
                model[2] = torch.nn.Linear(64, 3)
            yield loss

    def deletes_a_parameter(model, *rest):
        for step, loss in enumerate(loops.fixed(model, *rest)):
            if step == 8:
                del model[0].weight
            yield loss

    def yields_none_later(*arguments):
        for step, loss in enumerate(loops.fixed(*arguments)):
            yield loss if step < 8 else None

    def nan_weights(model, *rest):
        for step, loss in enumerate(loops.fixed(model, *rest)):
            if step == 8:
                model[0].weight.data.fill_(float("nan"))
            yield loss

    return [changes_the_model, deletes_a_parameter, yields_none_later, nan_weights]


@pytest.mark.parametrize("loop", late_surprises())
def test_a_late_surprise_fails_and_raises_nothing(loop):
    assert not exam.grade(loop).passed


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("step 13: NaN", True),
        ("step=13", True),
        ("step_13", True),
        ("step13", True),
        ("Step 00013 failed.", True),
        ("(13, 'loss')", True),
        ("batch #13.", True),
        ("step 130", False),
        ("loss 0.13", False),
        ("loss 13.5", False),
        ("1e-13", False),
        ("tensor(nan)", False),
    ],
)
def test_when_a_text_names_a_step(text, named):
    assert exam_runner._names(text, 13) == named


# The mystery runs.


@pytest.mark.parametrize("number", exam_mysteries.RUNS)
def test_mystery_is_the_same_twice_and_gives_nothing_away(number):
    first, second = exam.mystery(number), exam.mystery(number)
    assert str(first.history.loss) == str(second.history.loss)
    assert first.history.name == f"mystery {number}" and first.history.cause_step is None
    for question, choices in first.choices.items():
        right, wrong = exam_mysteries.ANSWERS[number, question]
        also = exam_mysteries.BOTH_RIGHT.get((number, question), ())
        assert set(choices) == {right, *wrong, *also} and len(choices) >= 4
        assert all(reason.endswith(".") for reason in wrong.values())


@pytest.mark.parametrize("number", exam_mysteries.RUNS)
def test_check_mystery(number):
    answers = {q: exam_mysteries.ANSWERS[number, q][0] for q in exam_mysteries.QUESTIONS}
    assert exam.check_mystery(number, **answers).passed
    untouched = exam.check_mystery(number)
    assert not untouched.passed and repr(untouched).count("not attempted") == 4
    for question in exam_mysteries.QUESTIONS:
        for wrong, reason in exam_mysteries.ANSWERS[number, question][1].items():
            verdict = exam.check_mystery(number, **{**answers, question: wrong})
            assert not verdict.passed and reason in repr(verdict)
    assert not exam.check_mystery(number, **{**answers, "step": 3}).passed


@pytest.mark.parametrize("number, question", exam_mysteries.BOTH_RIGHT)
def test_where_two_answers_are_right_each_is_told_of_the_other(number, question):
    right, wrong = exam_mysteries.ANSWERS[number, question]
    both = exam_mysteries.BOTH_RIGHT[number, question]
    assert len(both) == 2 and right in both and not set(both) & set(wrong)
    for (answer, reason), other in zip(both.items(), reversed(both), strict=True):
        ((_, _, correct, said),) = [
            line
            for line in exam.check_mystery(number, **{question: answer}).lines
            if line[0] == question
        ]
        assert correct and said == f". {reason}" and str(other) in reason


def test_check_mystery_refuses_what_is_no_choice():
    with pytest.raises(ValueError, match="1 to 6, got 7"):
        exam.mystery(7)
    with pytest.raises(ValueError, match="cause must be one of 'NaN in the batch'"):
        exam.check_mystery(1, cause="bad luck")


def probed(store):
    """A model factory whose model stores each training batch's largest logit gap."""

    def build():
        model = record.classifier()

        def hook(module, inputs, logits):
            if logits.dtype != torch.float32:
                gaps = logits.float().amax(-1) - logits.float().amin(-1)
                store.append((gaps.max().item(), logits.float().abs().max().item()))

        model.register_forward_hook(hook)
        return model

    return build


def rerun(number, **options):
    return record.run(**{**exam_mysteries.RUNS[number], **options}, seed=1, device="cpu")


def test_margins_of_mystery_1():
    """A gap of 104 is where float32's softmax gives 0: 1.5 times away on both sides."""
    store = []
    history = rerun(1, model=probed(store))
    gaps = [gap for gap, _ in store]
    assert max(gaps[:140]) * 1.5 < 104 < min(gaps[140:]) / 1.5
    assert max(largest for _, largest in store) < 1000
    assert history.first_bad_step == 140 and all(history.skipped[140:])


def test_margins_of_mystery_2():
    history = rerun(2)
    assert history.first_bad_step is None and not any(history.skipped)
    assert history.grad_norm[97] > 150 * sorted(history.grad_norm[:97])[48]
    assert history.grad_norm[97] > 1.5 * max(history.grad_norm[:97] + history.grad_norm[98:])
    # Twice the scale would still be finite: the largest entry is below half of 65504.
    assert not any(rerun(2, init_scale=2048.0).skipped[:98])
    assert rerun(2, init_scale=65536.0).skipped[97]


def test_margins_of_mystery_3():
    history = rerun(3)
    assert history.first_bad_step == history.first_bad_grad_step == 150
    assert not history.weights_finite and not any(history.skipped)


def test_margins_of_mystery_4():
    history = rerun(4)
    assert max(history.applied_norm) <= 1.001 / 65536
    assert max(history.loss) < 2.5 and min(history.loss) > 2.1
    assert 0.1 < min(history.grad_norm) and max(history.grad_norm) < 5
    assert set(history.scale) == {65536.0} and not any(history.skipped)


def test_margins_of_mystery_5():
    history = rerun(5)
    assert history.first_bad_step is None and history.error is None
    assert max(history.loss[90:101]) * 1.5 < 2.3 < min(history.loss[101:]) / 1.5
    assert history.grad_norm[100] < 1.5 * max(history.grad_norm[:100])
    assert history.accuracy[0] > 0.75 and history.accuracy[-1] < 0.3


def test_margins_of_mystery_6():
    history = rerun(6)
    bad = list(range(40, 224, 20))
    assert [i for i, skipped in enumerate(history.skipped) if skipped] == bad
    assert [i for i, loss in enumerate(history.loss) if loss != loss] == bad
    assert history.scale[-1] == 65536 / 2 ** len(bad)
    assert history.weights_finite and history.accuracy[-1] > 0.9

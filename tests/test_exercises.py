"""Every exercise: the stub is "not attempted", the solution passes, wrong answers have reasons."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from nan_lab import exercises

ROOT = Path(__file__).parents[1]
EXERCISES = exercises.registered()
WRONG = {
    name: answers
    for file in sorted((ROOT / "tests" / "wrong_answers").glob("nb*.py"))
    for name, answers in import_module(f"tests.wrong_answers.{file.stem}").WRONG.items()
}


def checks_in_notebook(notebook):
    """(exercise name, printed result) of every cell that checks an answer."""
    found = []
    for path in (ROOT / "notebooks").glob(f"{notebook}_*.ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            name = re.search(r'check\("(\w+)"', "".join(cell["source"]))
            if cell["cell_type"] == "code" and name:
                texts = [o.get("data", {}).get("text/plain", "") for o in cell["outputs"]]
                found.append((name[1], "".join("".join(text) for text in texts)))
    return found


@pytest.mark.parametrize("name", EXERCISES)
def test_the_notebook_shows_the_stub_and_a_solution_that_passes(name):
    entry = EXERCISES[name]
    results = [result for found, result in checks_in_notebook(entry.notebook) if found == name]
    assert results == [f"{name}: not attempted.", f"{name}: correct."]
    assert entry.difficulty in (1, 2, 3) and 1 <= entry.minutes <= 20


@pytest.mark.parametrize("name", EXERCISES)
def test_three_typical_wrong_answers_each_get_their_own_reason(name):
    results = [exercises.check(name, answer) for answer, _ in WRONG[name]]
    assert len(results) >= 3
    assert {r.outcome for r in results} == {"wrong"}
    assert len({r.reason for r in results}) == len(results)
    for result, (_, expected) in zip(results, WRONG[name], strict=True):
        assert expected in result.reason


@pytest.mark.parametrize("stub", [None, ...])
@pytest.mark.parametrize("name", EXERCISES)
def test_an_empty_answer_is_not_attempted(name, stub):
    assert exercises.check(name, stub).outcome == "not attempted"


def test_an_unknown_name_lists_the_names():
    with pytest.raises(ValueError, match="no exercise is called 'nonsense'; there are"):
        exercises.check("nonsense", 1)


def test_every_wrong_answer_belongs_to_an_exercise():
    assert set(WRONG) == set(EXERCISES)

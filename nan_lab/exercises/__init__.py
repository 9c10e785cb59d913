"""Exercises: `check(name, answer)` says correct, wrong (with the reason) or not attempted.

Each notebook's checkers live in a module of their own here. A checker takes the answer and
returns None when it is right, or a sentence that says what is wrong without giving it away.
"""

from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules

import torch

_EXERCISES = {}


class NotAttempted(Exception):
    """The answer is still the stub."""


@dataclass(frozen=True)
class Exercise:
    """What the notebook says of an exercise, and its checker."""

    name: str
    notebook: str
    difficulty: int  # 1 (a line) to 3 (think first)
    minutes: int
    checker: object


@dataclass(frozen=True)
class Result:
    """Outcome of a check: "correct", "wrong" or "not attempted", with a reason where wrong."""

    name: str
    outcome: str
    reason: str = ""

    def __repr__(self):
        return f"{self.name}: {self.outcome}." + (f" {self.reason}" if self.reason else "")


def exercise(notebook, difficulty, minutes):
    """Decorator that registers a checker under its function's name."""

    def register(checker):
        name = checker.__name__
        _EXERCISES[name] = Exercise(name, notebook, difficulty, minutes, checker)
        return checker

    return register


def call(function, *args, **kwargs):
    """Call the reader's function; raise NotAttempted where it returns nothing, as a stub does."""
    if not callable(function):
        raise TypeError(f"expected a function, got {type(function).__name__}")
    answer = function(*args, **kwargs)
    if answer is None or answer is ...:
        raise NotAttempted
    return answer


def registered():
    """All exercises by name."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return dict(_EXERCISES)


def check(name, answer):
    """Check an answer and return a `Result`.

    An untouched stub (None, `...`, a function that returns either or raises NotImplementedError)
    is "not attempted". An exception in the answer is a wrong answer. Random state, grad mode and
    default dtype are left as they were. Raises ValueError for an unknown name.
    """
    exercises = registered()
    if name not in exercises:
        raise ValueError(
            f"no exercise is called {name!r}; there are {', '.join(sorted(exercises))}"
        )
    if answer is None or answer is ...:
        return Result(name, "not attempted")
    dtype = torch.get_default_dtype()
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            reason = exercises[name].checker(answer)
    except (NotAttempted, NotImplementedError):
        return Result(name, "not attempted")
    except Exception as error:
        reason = f"Your answer raised {type(error).__name__}: {error}".splitlines()[0]
    finally:
        torch.set_default_dtype(dtype)
    return Result(name, "wrong", reason) if reason else Result(name, "correct")

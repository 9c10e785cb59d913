"""Grades every loop of tests/exam_bank and prints where exam.grade and the bank disagree.

python -m tools.confusion [WORD...]     only loops whose name contains one of the words
"""

import importlib
import sys
import time
from collections import Counter

from nan_lab import exam
from tools.environment import ROOT


def banks():
    """Return [(bank, loop, names of the rows that must fail)] of all files in tests/exam_bank."""
    sys.path.insert(0, str(ROOT))
    found = []
    for path in sorted((ROOT / "tests" / "exam_bank").glob("*.py")):
        if path.stem != "__init__":
            module = importlib.import_module(f"tests.exam_bank.{path.stem}")
            found += [(path.stem, loop, set(rows)) for loop, rows in module.BANK]
    return found


def failing(grade):
    """The names of the rows that failed; a bonus row cannot, a row that was not judged did not."""
    return {row.name for row in grade.rows if row.passed is False and not row.bonus}


def main(words):
    table, wrong, slowest = Counter(), 0, (0.0, "")
    for bank, loop, expected in banks():
        name = f"{bank}.{loop.__name__}"
        if words and not any(word in name for word in words):
            continue
        start = time.perf_counter()
        grade = exam.grade(loop)
        slowest = max(slowest, (time.perf_counter() - start, name))
        found = failing(grade)
        table[not expected, grade.passed] += 1
        if found != expected:
            wrong += 1
            print(f"{name}: expected {sorted(expected)}, found {sorted(found)}\n{grade}\n")
    print("                 passed   failed")
    for right, label in ((True, "right loops"), (False, "wrong loops")):
        print(f"{label:<14} {table[right, True]:>8} {table[right, False]:>8}")
    print(f"Loops whose failing rows differ from the bank's: {wrong}.")
    print(f"Slowest: {slowest[1]}, {slowest[0]:.1f} s.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

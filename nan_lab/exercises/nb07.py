"""Checkers of notebook 07, The bad batch, and the two runs of its second exercise."""

import torch

from nan_lab.exercises import call, exercise


@exercise("07", difficulty=2, minutes=8)
def bad_targets(answer):
    good = torch.stack([torch.eye(4)[1], torch.full((4,), 0.25), torch.tensor([0.7, 0.2, 0.1, 0])])
    returned = call(answer, good)
    if not isinstance(returned, (list, tuple)):
        return f"It must return a list of positions, it returned a {type(returned).__name__}."
    if list(returned):
        return "Three good rows, and it rejects some of them: they sum to 1 within rounding."
    if list(answer(torch.full((1, 10), 0.1) + 5e-5)):
        return "A sum that is 0.0005 off is within the 0.001, and it rejects the row."
    cases = [
        ([0.3] * 4, "A row sums to 1.2, and it passes."),
        ([0.1] * 4, "A row sums to 0.4, and it passes."),
        ([1.5, -0.5, 0.0, 0.0], "A row sums to 1 with an entry of -0.5, and it passes."),
        ([float("nan"), 1.0, 0.0, 0.0], "A row with a NaN passes: comparisons with NaN are False."),
        ([float("inf"), 0.0, 0.0, 0.0], "A row with an inf passes."),
    ]
    for row, reason in cases:
        if 0 not in list(answer(torch.tensor([row]))):
            return reason
    mixed = torch.stack([good[0], torch.tensor(cases[0][0]), good[1], torch.tensor(cases[3][0])])
    if list(answer(mixed)) != [1, 3]:
        return "Rows 1 and 3 of 4 are bad: return their positions, [1, 3], each once, in order."


def two_linear_runs(linear_run, order, kept):
    def jump(step):
        return 0.1 if step < 20 else 3.0

    return [linear_run(order(0, kept), jump), linear_run(order(0), 0.1)]


@exercise("07", difficulty=1, minutes=3)
def which_run(answer):
    reasons = {
        "run 1": "In run 1 the gradient norm grows for many steps first: no sample does that.",
        "both": "The two gradient norms differ: look at the twenty steps before each failure.",
        "neither": "One run fails without any warning in the gradient norm. What can do that?",
    }
    given = str(answer).strip().lower()
    if given != "run 2":
        return reasons.get(given, 'Answer "run 1", "run 2", "both" or "neither".')

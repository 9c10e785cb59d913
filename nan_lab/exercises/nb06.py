"""Checker of notebook 06, Learning rate and warm-up."""

from nan_lab.exercises import call, exercise


@exercise("06", difficulty=1, minutes=5)
def steps_until(answer):
    steps = call(answer, 10, lr=3, curvature=1)
    if isinstance(steps, bool) or not isinstance(steps, int):
        return f"Return the number of steps, an integer; got {steps!r}."
    if steps == 3:
        return "The first step makes -2 of w = 1; it is number 1, not 0."
    if steps != 4 and answer(10, lr=0.5, curvature=6) != 4:
        return (
            f"At lr 3 and curvature 1 w is -2, 4, -8, 16: above 10 after step 4. Yours is {steps}."
        )
    if answer(5, lr=3, curvature=1) != 3:
        return "w is -2, 4, -8: the size of -8 is above 5."
    if answer(10, lr=0.5, curvature=6) != 4:
        return (
            "lr 0.5 with curvature 6 makes the same steps as lr 3 with 1: where is the curvature?"
        )
    if answer(10, lr=1.5, curvature=1) != -1:
        return "At lr 1.5 and curvature 1 w is halved at each step: the answer is -1."
    if answer(10, lr=2, curvature=1) != -1:
        return "At lr = 2 / curvature w jumps between 1 and -1 for ever: the answer is -1."
    if answer(2.0**64, lr=3, curvature=1) != 65:
        return "Above 2 to the power of 64 means after step 65: at step 64 it is not above."

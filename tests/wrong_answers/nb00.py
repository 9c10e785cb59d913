"""Typical wrong answers of notebook 00, each with a part of the reason that it must get."""


def first_of_three(skipped):
    for step in range(len(skipped) - 2):
        if all(skipped[step : step + 3]):
            return step
    return -1


def third_in_all(skipped):
    steps = [step for step, was_skipped in enumerate(skipped) if was_skipped]
    return steps[2] if len(steps) > 2 else -1


def last_skip(skipped):
    return max((i for i, was_skipped in enumerate(skipped) if was_skipped), default=-1)


WRONG = {
    "when_to_stop": [
        (first_of_three, "first of the three"),
        (third_in_all, "never three in a row"),
        (last_skip, "third skip in a row is step 6"),
    ]
}

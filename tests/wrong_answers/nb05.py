"""Typical wrong answers of notebook 05, each with a part of the reason that it must get."""

import math
from itertools import pairwise


def _reading(scale):
    halvings = sum(after < before for before, after in pairwise(scale))
    doublings = sum(after > before for before, after in pairwise(scale))
    return halvings, doublings, int(math.log2(min(scale)))


def lowest_instead_of_its_power(scale):
    return *_reading(scale)[:2], min(scale)


def against_the_first(scale):
    halvings = sum(now < scale[0] for now in scale)
    return halvings, *_reading(scale)[1:]


def from_end_to_end(scale):
    return round(math.log2(scale[0] / scale[-1])), *_reading(scale)[1:]


def the_other_way_round(scale):
    halvings, doublings, power = _reading(scale)
    return doublings, halvings, power


def every_step_that_does_not_halve(scale):
    halvings, _, power = _reading(scale)
    return halvings, len(scale) - 1 - halvings, power


def power_of_the_last_step(scale):
    return *_reading(scale)[:2], int(math.log2(scale[-1]))


def power_without_its_sign(scale):
    return *_reading(scale)[:2], abs(_reading(scale)[2])


def only_the_lowest(scale):
    return min(scale)


WRONG = {
    "four_scales": [
        ({"A": "floor", "B": "staircase"}, "has the keys"),
        ({"A": "cliff", "B": "staircase", "C": "saw-tooth", "D": "floor"}, "A is no cliff"),
        ({"A": "floor", "B": "saw-tooth", "C": "staircase", "D": "cliff"}, "B is no saw-tooth"),
        ({"A": "floor", "B": "staircase", "C": "healthy", "D": "cliff"}, "'healthy' is none of"),
    ],
    "read_scale": [
        (lowest_instead_of_its_power, "power is not 1.0"),
        (against_the_first, "halvings is not 5"),
        (from_end_to_end, "halvings is not 2. Compare each step"),
        (the_other_way_round, "halvings is not 1"),
        (every_step_that_does_not_halve, "doublings is not 2"),
        (power_of_the_last_step, "2.0]: power is not 1. 2 to"),
        (power_without_its_sign, "below 1 the power is negative"),
        (only_the_lowest, "Return three numbers"),
    ],
}

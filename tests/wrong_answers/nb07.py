"""Typical wrong answers of notebook 07, each with a part of the reason that it must get."""


def _positions(bad):
    return bad.nonzero().flatten().tolist()


def exactly_one(y):
    return _positions((y.sum(1) != 1) | (y < 0).any(1) | y.isnan().any(1))


def only_too_much(y):
    return _positions((y.sum(1) > 1.001) | (y < 0).any(1) | y.isnan().any(1))


def only_the_sum(y):
    return _positions(~((y.sum(1) - 1).abs() <= 0.001))


def outside_instead_of_not_inside(y):
    return _positions((y < 0).any(1) | ((y.sum(1) - 1).abs() > 0.001))


def masks_first(y):
    return outside_instead_of_not_inside(y.nan_to_num(posinf=0.0))


def a_mask(y):
    return ~((y >= 0).all(1) & ((y.sum(1) - 1).abs() <= 0.001))


def only_the_first(y):
    return _positions(a_mask(y))[:1]


WRONG = {
    "bad_targets": [
        (exactly_one, "0.0005 off is within"),
        (only_too_much, "sums to 0.4"),
        (only_the_sum, "an entry of -0.5"),
        (outside_instead_of_not_inside, "comparisons with NaN are False"),
        (a_mask, "it returned a Tensor"),
        (only_the_first, "Rows 1 and 3 of 4"),
    ],
    "which_run": [
        ("run 1", "grows for many steps first"),
        ("both", "The two gradient norms differ"),
        ("neither", "without any warning"),
        ("the learning rate", 'Answer "run 1"'),
    ],
}

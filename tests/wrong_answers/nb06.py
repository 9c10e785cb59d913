"""Typical wrong answers of notebook 06, each with a part of the reason that it must get."""


def counted_from_zero(limit, lr, curvature):
    w = 1.0
    for step in range(10_000):
        w = w - lr * curvature * w
        if abs(w) > limit:
            return step
    return -1


def sign_forgotten(limit, lr, curvature):
    w = 1.0
    for step in range(1, 10_001):
        w = w - lr * curvature * w
        if w > limit:
            return step
    return -1


def curvature_forgotten(limit, lr, curvature):
    w = 1.0
    for step in range(1, 10_001):
        w = w - lr * w
        if abs(w) > limit:
            return step
    return -1


def loss_as_gradient(limit, lr, curvature):
    w = 1.0
    for step in range(1, 10_001):
        w = w - lr * curvature / 2 * w
        if abs(w) > limit:
            return step
    return -1


def at_the_limit(limit, lr, curvature):
    w = 1.0
    for step in range(1, 10_001):
        w = w - lr * curvature * w
        if abs(w) >= limit:
            return step
    return -1


WRONG = {
    "steps_until": [
        (counted_from_zero, "number 1, not 0"),
        (loss_as_gradient, "-2, 4, -8, 16"),
        (sign_forgotten, "the size of -8"),
        (curvature_forgotten, "where is the curvature"),
        (at_the_limit, "after step 65"),
    ]
}

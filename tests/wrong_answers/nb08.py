"""Typical wrong answers of notebook 08, each with a part of the reason that it must get."""

RIGHT = {
    "a": (5, "backward", "div", "slope"),
    "b": (7, "forward", "_softmax", "empty"),
    "c": (9, "forward", "addmm", "range"),
}

WRONG = {
    "three_runs": [
        # The step whose loss prints nan, its forward pass, what it meets first there.
        (RIGHT | {"a": (6, "forward", "mm", "batch")}, "the weights are NaN as that step begins"),
        # The first birth of the step: log of a number below 0, which where drops.
        (RIGHT | {"a": (5, "forward", "log", "slope")}, "the loss is finite. Which pass"),
        (RIGHT | {"b": (7, "forward", "masked_fill.Scalar", "mask")}, "at the healthy steps too"),
        (RIGHT | {"b": (7, "forward", "_softmax", "mask")}, "What is left of the row"),
        # The first step whose gradient is not finite: a healthy search for the scale.
        (RIGHT | {"c": (0, "backward", "mm", "scale")}, "the scaler skips that step"),
        (RIGHT | {"c": (9, "forward", "addmm", "scale")}, "the loss itself is not finite"),
        (RIGHT | {"c": (9, "forward", "addmm", "empty")}, "dtype, range, zeros"),
        (RIGHT | {"c": (9, "forward", "nll_loss_forward", "range")}, "out of finite numbers"),
        (RIGHT | {"a": (3, "backward", "div", "slope")}, "it is not step 3"),
        (RIGHT | {"a": (5, "backward", "div", "nan")}, "the cause must be one of"),
        (RIGHT | {"b": (7, "_softmax")}, "needs four entries"),
        ({"a": RIGHT["a"]}, "a dict with the keys"),
    ]
}

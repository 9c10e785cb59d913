"""Typical wrong answers of notebook 04, each with a part of the reason that it must get."""


def with_the_exponent_of_inf(exponent_bits, mantissa_bits):
    return (2 - 2.0**-mantissa_bits) * 2.0 ** (2 ** (exponent_bits - 1))


def without_mantissa(exponent_bits, mantissa_bits):
    return 2.0 ** (2 ** (exponent_bits - 1) - 1)


def without_the_leading_one(exponent_bits, mantissa_bits):
    return (1 - 2.0**-mantissa_bits) * 2.0 ** (2 ** (exponent_bits - 1) - 1)


def with_float16s_bias(exponent_bits, mantissa_bits):
    return (2 - 2.0**-mantissa_bits) * 2.0**15


def looked_up(exponent_bits, mantissa_bits):
    known = {(5, 10): 65504.0, (8, 7): (2 - 2**-7) * 2.0**127, (8, 23): (2 - 2**-23) * 2.0**127}
    return known.get((exponent_bits, mantissa_bits), 65504.0)


def scaled_afterwards(q, k):
    return q @ k.T * q.shape[-1] ** -0.5


def masked(q, k):
    return (q @ k.T).nan_to_num() * q.shape[-1] ** -0.5


def both_scaled(q, k):
    return (q * q.shape[-1] ** -0.5) @ (k * k.shape[-1] ** -0.5).T


def left_in_float32(q, k):
    return q.float() @ k.float().T * q.shape[-1] ** -0.5


def width_assumed(q, k):
    return (q / 8) @ k.T


def wrong_way_round(q, k):
    return (k / k.shape[-1] ** 0.5) @ q.T


WRONG = {
    "largest_number": [
        (with_the_exponent_of_inf, "kept for inf and NaN"),
        (without_mantissa, "power of two"),
        (without_the_leading_one, "65504, not 32736"),
        (with_float16s_bias, "not for (8, 7)"),
        (looked_up, "not for (5, 2)"),
    ],
    "attention_scores": [
        (scaled_afterwards, "still inf"),
        (masked, "Finite, but wrong"),
        (both_scaled, "width 64"),
        (left_in_float32, "torch.float32"),
        (width_assumed, "width 16"),
        (wrong_way_round, "shape (4, 5)"),
    ],
}

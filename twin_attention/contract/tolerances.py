"""The error budget: how wrong a result may be. Only this module defines it.

`ref` is the float64 oracle on the already-rounded inputs; `lp` is the same formula run plainly in
the inputs' dtype (see `reference`), with products in TF32 if that was asked for. A result's largest
error and root mean square error may be a small multiple of `lp`'s, and so may the error of each row
or number. It must be NaN or infinite exactly where `ref` is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from array_api_compat import array_namespace

Array = Any

# Limits of the largest error, also of each row, and of the root mean square error, in multiples of
# lp's.
MAX_ERROR_FACTOR = {"output": 2.0, "gradient": 3.0}
RMSE_FACTOR = {"output": 1.25, "gradient": 1.5}
# With fewer errors, the root mean square is chance, and only the largest error is checked. A row's
# elements count once: an error in a p or a ds appears in all of them. A row of zeros, such as that
# of a key that no query sees, has no error.
FEWEST_FOR_RMSE = 16
MAX_ERROR_ULPS = 2
LSE_TOLERANCE = 1e-5
# An attention output is rounded at random: its errors have a root mean square of 0.42 half ulps. p
# is rounded before it multiplies v as well, the same way in all rows that see similar keys. lp
# rounds a different p, and may be lucky.
ROUNDINGS = 1.09  # half ulps: sqrt(1 + 0.42^2)
# Accumulation is float32 whatever the inputs are, so an error of this class (relative to the
# largest value, absolute under 1) is never a defect. It is the whole budget if lp happens to be
# exact, as in a row with one key, whose p is 1 and whose ds cancels to 0. There the kernels
# recompute p from an lse that is rounded to float32, and again in base 2. ds inherits that error
# times dp.
FLOAT32_CLASS = 4e-6
# That grows with the scores: p = exp(s - lse) has the absolute errors of s and of lse as a relative
# one. These are half an ulp each, and half an ulp each again in base 2: four times 2^-24 of |lse|,
# since no key counts whose s is far below lse. It is more than 4e-6 where |lse| is above 17.
EXPONENT_ERROR = 2.0**-22
# A ds that cancels keeps the errors of dp and delta, float32 sums of products in different orders:
# up to an ulp of |dout| |v|, which is more than 4e-6 if q or k are large.
SUM_ERROR = 2.0**-23

# "tf32" is the format of products with `precision` "tf32", whatever the results' dtype.
MANTISSA_BITS = {"float16": 10, "bfloat16": 7, "tf32": 10, "float32": 23}
MIN_EXPONENT = {"float16": -14, "bfloat16": -126, "tf32": -126, "float32": -126}


@dataclass(frozen=True)
class Agreement:
    """Distance of a result from what it is compared with, and the budget for it.

    max_error, max_budget: of the largest absolute error.
    finite: False if there is an unexpected NaN or infinity, or an expected one is missing.
    each: the worst error of a row or number over its own budget.
    """

    max_error: float
    max_budget: float
    rmse: float
    rmse_budget: float
    finite: bool = True
    each: float = 0.0

    @property
    def ratio(self) -> float:
        """Error over budget, the worst of the measures; above 1 the comparison fails."""
        if not self.finite:
            return math.inf
        return max(
            _over(self.max_error, self.max_budget), _over(self.rmse, self.rmse_budget), self.each
        )

    @property
    def ok(self) -> bool:
        return self.ratio <= 1.0


def ulp(value: float, dtype: str) -> float:
    """Return the distance between neighbouring numbers of `dtype` at `value`."""
    exponent = math.frexp(abs(value))[1] - 1 if value else MIN_EXPONENT[dtype]
    return 2.0 ** (max(exponent, MIN_EXPONENT[dtype]) - MANTISSA_BITS[dtype])


def compare_to_reference(
    got: Array,
    ref: Array,
    lp: Array,
    dtype: str,
    kind: str,
    lse: Array | None = None,
    cancelled: float = 0.0,
    each: Literal["row", "number"] | None = None,
    expected: Array | float = 0.0,
) -> Agreement:
    """Compare an output or gradient with its budget.

    Args:
        dtype: the inputs' dtype name, or "tf32".
        lse: the oracle's log-sum-exps.
        cancelled: from `cancelled_gradient` for what is computed from ds, or from `cancelled_sum`.
        each: what has a budget of its own as well: rows, or numbers that have nothing in common,
            whose root mean square counts too.
        expected: an error of each that is no defect if lp has less by chance; it broadcasts against
            rows [...] or numbers.
    """
    largest = _max_abs(ref)
    exponent = 0.0 if lse is None else _max_abs(lse)
    floor = max(FLOAT32_CLASS, EXPONENT_ERROR * exponent) * max(1.0, largest)
    floor = max(floor, SUM_ERROR * cancelled)
    lp_max, lp_rmse, lp_finite = _errors(lp, ref)
    budget = MAX_ERROR_ULPS * ulp(largest, dtype)
    rmse_budget = ulp(largest, dtype)
    if lp_finite:
        budget += MAX_ERROR_FACTOR[kind] * lp_max
        rmse_budget = RMSE_FACTOR[kind] * lp_rmse
    if kind == "output" and lse is not None:  # of attention
        roundings = ROUNDINGS * 2.0 ** -(MANTISSA_BITS[dtype] + 1) * _rms(ref)
        rmse_budget = max(rmse_budget, roundings)
    error, rmse, finite = _errors(got, ref)
    if each == "number":
        got, ref, lp = (x[..., None] for x in (got, ref, lp))
    if _count_rows(ref) < FEWEST_FOR_RMSE:
        rmse_budget = budget
    worst = 0.0
    if each is not None and lp_finite and finite and math.prod(ref.shape):
        worst = _worst(got, ref, lp, dtype, kind, floor, expected, typical=each == "row")
    return Agreement(error, max(budget, floor), rmse, max(rmse_budget, floor), finite, worst)


def _worst(
    got: Array,
    ref: Array,
    lp: Array,
    dtype: str,
    kind: str,
    floor: float,
    expected: Array | float,
    typical: bool,
) -> float:
    """Return the largest error of a row over its budget.

    The budget is a multiple of lp's error in this row or, if `typical`, in a usual one, and ulps of
    the row's size.
    """
    xp = array_namespace(ref)
    got, lp = xp.astype(got, xp.float64), xp.astype(lp, xp.float64)
    error, own, size = (_rms_of_rows(xp, x) for x in (got - ref, lp - ref, ref))
    likely = xp.maximum(own, expected + xp.zeros_like(own))
    if typical:
        count = max(1, int(xp.sum(size > 0)))
        usual = math.sqrt(float(xp.sum(xp.where(size > 0, own * own, xp.zeros_like(own)))) / count)
        likely = xp.maximum(likely, xp.zeros_like(own) + usual)
    exponent = xp.floor(xp.log2(xp.maximum(size, 0.0 * size + 2.0 ** MIN_EXPONENT[dtype])))
    budget = MAX_ERROR_FACTOR[kind] * likely
    budget = budget + MAX_ERROR_ULPS * 2.0 ** (exponent - MANTISSA_BITS[dtype])
    return float(xp.max(error / xp.maximum(budget, 0.0 * budget + floor)))


def compare_lse(
    got: Array, ref: Array, tolerance: float = LSE_TOLERANCE, unit: float = 1.0
) -> Agreement:
    """Compare a log-sum-exp by a tolerance of max(unit, |lse|); -inf must be met exactly."""
    xp = array_namespace(ref)
    got, ref = xp.astype(got, xp.float64), xp.astype(ref, xp.float64)
    empty = xp.isinf(ref)
    same = _same_infinities(xp, got, ref)
    zero = xp.zeros_like(ref)
    got, ref = xp.where(empty, zero, got), xp.where(empty, zero, ref)
    error = _max_abs((got - ref) / xp.where(xp.abs(ref) > unit, xp.abs(ref), zero + unit))
    return Agreement(error, tolerance, error, tolerance, same)


def lse_tolerance(ref: Array, lp: Array, dtype: str) -> float:
    """Return the tolerance of a log-sum-exp.

    Products of 16-bit numbers are exact in float32, so scores have a float32 error. TF32 products
    have a larger one: there lp's largest error counts as it does for an output.
    """
    if dtype != "tf32":
        return LSE_TOLERANCE
    return LSE_TOLERANCE + MAX_ERROR_FACTOR["output"] * compare_lse(lp, ref).max_error


def lse_unit(ref: Array) -> float:
    """Return the smallest |lse| to which errors are relative; above 1 if some exceeds 42.

    A score may cancel, but keeps the error of its terms, as large as those of the largest score.
    """
    return max(1.0, EXPONENT_ERROR / LSE_TOLERANCE * _max_abs(ref))


def cancelled_gradient(scale: float, dout: Array, v: Array, other: Array, rows: float) -> float:
    """Return how large dq (or dk) is if no ds cancels: ``scale · |dout| |v| · |k|`` (or |q|).

    scale and other: 1 for what is added to scores. rows: how many rows of ds with a p near 1 a row
    of the gradient sums; their errors are independent.
    """
    if not min(math.prod(x.shape) for x in (dout, v, other)):
        return 0.0
    xp = array_namespace(dout)
    lengths = (float(xp.max(xp.sum(x * x, axis=-1))) ** 0.5 for x in (dout, v))
    return abs(scale) * math.prod(lengths) * _max_abs(other) * rows**0.5


def cancelled_sum(terms: Array) -> float:
    """Return how large sums over the last axis are if nothing cancels."""
    xp = array_namespace(terms)
    return FLOAT32_CLASS / SUM_ERROR * _max_abs(xp.sum(terms * terms, axis=-1)) ** 0.5


def rounded_delta(out: Array, dout: Array, dtype: str) -> Array:
    """Return the error of each row's delta, ``rowsum(dout ∘ out)``, because out is rounded."""
    xp = array_namespace(out)
    terms = xp.where(xp.isfinite(out * dout), out * dout, xp.zeros_like(out))
    return 2.0 ** -(MANTISSA_BITS[dtype] + 1) * xp.sqrt(xp.sum(terms * terms, axis=-1))


def compare_twins(a: Array, b: Array, budget_a: Agreement, budget_b: Agreement) -> Agreement:
    """Compare two implementations by the sum of their budgets; neither may have a NaN."""
    error, rmse, finite = _errors(a, b)
    has_nan = bool(array_namespace(a).any(array_namespace(a).isnan(a)))
    return Agreement(
        error,
        budget_a.max_budget + budget_b.max_budget,
        rmse,
        budget_a.rmse_budget + budget_b.rmse_budget,
        finite and not has_nan,
    )


def _count_rows(ref: Array) -> int:
    """Return how many rows, or elements of a vector, are not 0."""
    xp = array_namespace(ref)
    counted = ref != 0
    return int(xp.sum(xp.any(counted, axis=-1) if ref.ndim > 1 else counted))


def _errors(got: Array, want: Array) -> tuple[float, float, bool]:
    """Return the largest absolute and the RMS error, and if NaN and infinities agree."""
    xp = array_namespace(got, want)
    if math.prod(want.shape) == 0:
        return 0.0, 0.0, True
    got, want = xp.astype(got, xp.float64), xp.astype(want, xp.float64)
    if not _same_infinities(xp, got, want):
        return math.inf, math.inf, False
    difference = xp.where(xp.isfinite(want), got - want, xp.zeros_like(want))
    return (
        float(xp.max(xp.abs(difference))),
        math.sqrt(float(xp.mean(difference * difference))),
        True,
    )


def _same_infinities(xp: Any, got: Array, want: Array) -> bool:
    """Return True if `got` has NaN where `want` has it, and the same infinities."""
    infinite = xp.isinf(got) | xp.isinf(want)
    same_nan = bool(xp.all(xp.isnan(got) == xp.isnan(want)))
    return same_nan and bool(xp.all(~infinite | (got == want)))


def _rms_of_rows(xp: Any, x: Array) -> Array:
    """Numbers that are not finite count as 0."""
    finite = xp.where(xp.isfinite(x), x, xp.zeros_like(x))
    return xp.sqrt(xp.mean(finite * finite, axis=-1))


def _max_abs(x: Array) -> float:
    xp = array_namespace(x)
    finite = xp.where(xp.isfinite(x), xp.abs(x), xp.zeros_like(x))
    return float(xp.max(finite)) if math.prod(x.shape) else 0.0


def _rms(x: Array) -> float:
    """Numbers that are not finite count as 0."""
    xp = array_namespace(x)
    finite = xp.where(xp.isfinite(x), x, xp.zeros_like(x))
    return math.sqrt(float(xp.mean(finite * finite))) if math.prod(x.shape) else 0.0


def _over(error: float, budget: float) -> float:
    if budget > 0:
        return error / budget
    return 0.0 if error == 0 else math.inf

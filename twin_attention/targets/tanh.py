"""Coefficients of tanh in explicit kernels.

``tanh(x) = x · P(x²) / Q(x²)`` with x clamped to ±LIMIT, to a relative error of 5e-7. Unlike
``1 - 2 / (1 + exp(2x))`` it cancels nowhere, and a softcap far above the scores multiplies its
error by no more than the scores.
"""

LIMIT = 7.6

# From the constant on.
P = (0.9999999066238479, 0.12960342931783408, 0.002988615223807257, 1.1844820609020526e-05)
Q = (1.0, 0.4629359808804942, 0.02396837503657128, 0.00024403801042044087, 2.5946641978028856e-07)

# tanh(x) = x · NEAR(x²) for |x| <= NEAR_LIMIT, to a relative error of 5e-6.
NEAR_LIMIT = 0.375
NEAR = (0.99999571, -0.33278066, 0.12264755)
# The same to a relative error of 5e-7: a log-sum-exp of scores below 0 may be a small number with
# their error.
CLOSE_LIMIT = 0.25
CLOSE = (0.99999962, -0.33321973, 0.12841907)

# x · NEAR(x²) rises everywhere, so the size of exponentials of b times it tells whether x is near
# 0. Let `high` be their value at NEAR_LIMIT. If a sum is at most `high`, no x is beyond NEAR_LIMIT.
# Beyond -NEAR_LIMIT the exponentials are too small, by at most 2^-14 of a sum of up to 32 that is
# at least 2^SUM_BITS / high, if `high` is at least 2^HIGH_BITS.
SUM_BITS, HIGH_BITS = 9, 8

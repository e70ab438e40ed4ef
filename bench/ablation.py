"""Build the Triton forward without its softmax: the matrix products and the loads alone.

It is the shipped kernel's source, compiled with another function in place of its
`online_softmax_update`. Only the benchmark has this build.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, update_wrapper
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from torch_attn.kernels.portable import flash_fwd as shipped


@triton.jit
def no_softmax_update(s, m_i, l_i, exp2_scale):
    """Return the scores as p, without sums and rescaling."""
    return s, tl.full(m_i.shape, 1.0, tl.float32), m_i, l_i


@cache
def flash_fwd_without_softmax() -> Callable[..., Any]:
    """Return a `torch_attn.kernels.portable.flash_fwd.flash_fwd` of ``(q · kᵀ) · v``, unscaled.

    For problems without a mask, since hidden scores are -inf. The log-sum-exp is -inf.
    """
    kernel = shipped.flash_fwd_kernel
    built = triton.jit(do_not_specialize=kernel.do_not_specialize)(
        _with_names(kernel.fn, online_softmax_update=no_softmax_update)
    )
    return _with_names(shipped.flash_fwd, flash_fwd_kernel=built)


def _with_names(function: FunctionType, **names: Any) -> FunctionType:
    """Return a copy of a function that sees other objects under these global names."""
    missing = set(names) - set(function.__code__.co_names)
    if missing:
        raise ValueError(f"names: expected globals of {function.__name__}, got {sorted(missing)}")
    copy = FunctionType(
        function.__code__,
        function.__globals__ | names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    update_wrapper(copy, function)
    del copy.__wrapped__
    return copy

"""Build the Pallas forward without its softmax, or with barriers around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax.numpy as jnp

from bench.ablation import ptx
from bench.ablation.substitute import with_names
from bench.records import WITH_BARRIERS, WITHOUT_SOFTMAX
from pallas_attn.kernels.library.quantized import elementwise
from pallas_attn.kernels.library.softmax import online_softmax_update
from pallas_attn.kernels.portable import flash_fwd as shipped


def no_softmax_update(s, m_i, l_i, exp2_scale):
    """Return the scores as p, without sums and rescaling."""
    return s, jnp.ones(m_i.shape, jnp.float32), m_i, l_i


def wait_for_block(x):
    """Return x [rows] when all warps of the block have come here.

    With `plt.debug_barrier` in a loop Triton 3.6 loads no tile ahead.
    """
    return elementwise(ptx.WAIT, ptx.WAIT_CONSTRAINTS, ptx.WAIT_PACK, jnp.float32, x)


def update_between_barriers(s, m_i, l_i, exp2_scale):
    """Return what the shipped update does, which no warp begins or leaves before the others."""
    m_i = wait_for_block(m_i)
    p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i, exp2_scale)
    alpha = wait_for_block(alpha)
    return p, alpha, m_i, l_i


UPDATES = {WITHOUT_SOFTMAX: no_softmax_update, WITH_BARRIERS: update_between_barriers}


@cache
def flash_fwd(ablation: str) -> Callable[..., Any]:
    """Return a `pallas_attn.kernels.portable.flash_fwd.flash_fwd` with another update.

    Args:
        ablation: "without softmax" is ``(q · kᵀ) · v``, unscaled, with a log-sum-exp of -inf, for
            problems without a mask, since hidden scores are -inf. "with barriers" is for GPUs.
    """
    built = with_names(shipped.flash_fwd_kernel, online_softmax_update=UPDATES[ablation])
    return with_names(shipped.flash_fwd, flash_fwd_kernel=built)

"""Scores of mma.sync: from q·k to the input of the softmax."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.library.scores import attention_mask
from twin_attention.targets.tanh import LIMIT, P, Q

_LIMIT = gl.constexpr(LIMIT)
_P = gl.constexpr(P)
_Q = gl.constexpr(Q)


@gluon.jit
def visible_scores(s, position, key, end, rule, window_left, window_right, MASKED: gl.constexpr):
    """Return `library.scores.visible_scores` of products, and the derivative of the cap, or 1."""
    # As a tensor it would be a branch, of which Triton 3.6 has kept the side without the product.
    gl.static_assert(not isinstance(rule.scale_first, gl.tensor))
    if rule.scale_first:
        s = s * rule.scale
    dcap = 1.0
    if rule.softcap is not None:
        t = tanh(s * (1.0 / rule.softcap))
        s = rule.softcap * t
        dcap = 1.0 - t * t
    if MASKED:
        s = attention_mask(s, position, key, end, window_left, window_right)
    return s, dcap


@gluon.jit
def tanh(x):
    """Return the rational function of `twin_attention.targets.tanh`."""
    x = tl.clamp(x, -_LIMIT, _LIMIT, tl.PropagateNan.ALL)
    x2 = x * x
    return x * _polynomial(_P, x2) * _reciprocal(_polynomial(_Q, x2))


@gluon.jit
def _polynomial(coefficients: gl.constexpr, x):
    y = coefficients[len(coefficients) - 1]
    for i in gl.static_range(len(coefficients) - 2, -1, -1):
        y = y * x + coefficients[i]
    return y


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )

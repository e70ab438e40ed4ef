"""Scores: the way from q·k to what the softmax takes."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.portable.scores import attention_mask, softcap_derivative, tanh


@gluon.jit
def visible_scores(s, position, key, end, rule, window_left, window_right, MASKED: gl.constexpr):
    """Turn products q·k into what the softmax takes: `portable.scores.visible_scores`.

    Returns (s, dcap): the scores and the derivative of the cap, 1 without one.
    """
    # As a tensor it would be a branch, and Triton 3.6 has kept the side without the product.
    gl.static_assert(not isinstance(rule.scale_first, gl.tensor))
    if rule.scale_first:
        s = s * rule.scale
    dcap = 1.0
    if rule.softcap is not None:
        s = rule.softcap * tanh(s / rule.softcap)
        dcap = softcap_derivative(s, rule.softcap)
    if MASKED:
        s = attention_mask(s, position, key, end, window_left, window_right)
    return s, dcap

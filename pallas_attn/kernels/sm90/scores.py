"""Scores: the way from q·k to what the softmax takes, without the derivative of a cap."""

from pallas_attn.kernels.sm80.scores import tanh
from pallas_attn.kernels.sm90.pipeline import WGMMA


def scaled_scores(s, rule):
    """Scale products q·k, in registers, where the exponent cannot do it, and cap them."""
    if rule.scale_first:
        s = s * rule.scale
    if rule.softcap is not None:
        s = rule.softcap * tanh(s * (1.0 / rule.softcap), WGMMA)
    return s

"""Terms of scores and dropout by other libraries.

A factory takes (case, operation, tensors): a `FlashCase`, and torch's q, k, v, the term that has a
gradient, if any, and dout.
"""

from __future__ import annotations

from typing import Any

from bench.calls import compiled, jax_call, torch_call
from bench.job import Absent, Call
from bench.peers.limits import load
from bench.problems import constants_of
from twin_attention.interop.parity.cases import FlashCase


def flex(case: FlashCase, operation: str, tensors) -> Call:
    """Compiled FlexAttention with the terms in its score_mod."""
    if case.dropout_rate or case.row_max:
        raise Absent("its score_mod neither drops probabilities nor returns scores")
    from torch.nn.attention.flex_attention import flex_attention

    attention = compiled(flex_attention)
    slopes: Any = constants_of(case, tensors[0].device).get("alibi_slopes")

    def attend(q, k, v, *terms):
        def of_bias(score, b, h, i, j):
            return score + terms[0][0, h, i, j]

        def of_table(score, b, h, i, j):
            radius = case.relative or 0
            return score + terms[0][h, (j - i).clamp(-radius, radius) + radius]

        def of_slopes(score, b, h, i, j):
            return score - slopes[h] * (j - i).abs()

        mod: Any = None
        if case.bias is not None:
            mod = of_bias
        elif case.relative is not None:
            mod = of_table
        elif slopes is not None:
            mod = of_slopes
        qkv = (x.transpose(1, 2) for x in (q, k, v))
        return attention(*qkv, score_mod=mod, scale=case.scale).transpose(1, 2)

    return torch_call(attend, operation, tensors)


def sdpa(case: FlashCase, operation: str, tensors) -> Call:
    """`scaled_dot_product_attention` with the bias as attn_mask."""
    if _terms(case) not in (["bias"], []):
        raise Absent("it has a bias alone")
    import torch

    def attend(q, k, v, *terms):
        mask = terms[0].expand(case.batch, -1, -1, -1) if terms else None
        qkv = (x.transpose(1, 2) for x in (q, k, v))
        function = torch.nn.functional.scaled_dot_product_attention
        return function(*qkv, attn_mask=mask, scale=case.scale).transpose(1, 2)

    return torch_call(attend, operation, tensors)


def jax_nn(case: FlashCase, operation: str, tensors) -> Call:
    """`jax.nn`'s cuDNN kernels with a bias."""
    if _terms(case) not in (["bias"], []):
        raise Absent("it has a bias alone")
    import jax

    def attend(q, k, v, *terms):
        bias = terms[0] if terms else None
        return jax.nn.dot_product_attention(q, k, v, bias, scale=case.scale, implementation="cudnn")

    return jax_call(attend, operation, tensors)


def flash_attn(case: FlashCase, operation: str, tensors) -> Call:
    """flash-attn with ALiBi's slopes, or with dropout, whose bits are its own."""
    if _terms(case) not in (["alibi_slopes"], ["dropout_seed"], []):
        raise Absent("it has slopes and dropout alone")
    module = load("flash_attn")
    slopes = constants_of(case, tensors[0].device).get("alibi_slopes")

    def attend(q, k, v):
        return module.flash_attn_func(
            q, k, v, dropout_p=case.dropout_rate, softmax_scale=case.scale, alibi_slopes=slopes
        )

    call = torch_call(attend, operation, tensors)
    return call._replace(result=None) if case.dropout_rate else call


def _terms(case: FlashCase) -> list[str]:
    given = [*case.spec.terms, *(["dropout_seed"] if case.dropout_rate else [])]
    return [*given, *(["row_max"] if case.row_max else [])]

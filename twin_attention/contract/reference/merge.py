from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from twin_attention.contract.reference.arithmetic import normalize

Array = Any


def merge(outs: Array, lses: Array, dtype: Any) -> tuple[Array, Array]:
    """Merge outs [N, B, S, H, Dv] and lses [N, B, H, S] into one out and lse."""
    xp = array_namespace(outs, lses)
    weight, outs, lse = _merge_weights(xp, outs, lses, dtype)
    return xp.sum(weight * outs, axis=0), lse


def merge_backward(
    dout: Array, dlse: Array | None, outs: Array, lses: Array, dtype: Any
) -> tuple[Array, Array]:
    """Compute the gradients of outs and lses through `merge`.

    With ``w = softmax(lses)`` and ``dp_n = dout · out_n``: ``d out_n = w_n dout`` and
    ``d lse_n = w_n (dp_n - Σ_m w_m dp_m + dlse)``. A part that saw no key has gradients 0.
    """
    xp = array_namespace(outs, lses)
    weight, outs, _ = _merge_weights(xp, outs, lses, dtype)
    dout = xp.astype(dout, dtype)
    dp = xp.sum(dout * outs, axis=-1)
    delta = xp.sum(weight[..., 0] * dp, axis=0)
    if dlse is not None:
        delta = delta - xp.permute_dims(xp.astype(dlse, dtype), (0, 2, 1))
    dlses = weight[..., 0] * (dp - delta)
    return weight * dout, xp.permute_dims(dlses, (0, 1, 3, 2))


def _merge_weights(xp: Any, outs: Array, lses: Array, dtype: Any) -> tuple[Array, Array, Array]:
    """Return the parts' weights [N, B, S, H, 1], their outs with 0 where it is 0, and lse."""
    outs, lses = xp.astype(outs, dtype), xp.astype(lses, dtype)
    lses = xp.where(lses == float("inf"), xp.full_like(lses, float("nan")), lses)
    weight, _, lse = normalize(xp, xp.permute_dims(lses, (1, 2, 3, 0)))
    weight = xp.permute_dims(weight, (3, 0, 2, 1))[..., None]
    # A part that saw nothing has weight 0 and may hold anything.
    return weight, xp.where(weight > 0, outs, xp.zeros_like(outs)), lse[..., 0]

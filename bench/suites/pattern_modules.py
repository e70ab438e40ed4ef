"""Calls of the multi-head modules by patterns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.calls import jax_call, torch_call
from bench.job import Absent, Call, Check, Subject
from bench.ours import for_target
from bench.suites.pattern_cases import SparseCase
from interop.parity.cases import DilatedCase
from twin_attention.targets.target import use_target

if TYPE_CHECKING:
    from torch import Tensor

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")

Attend = Callable[..., Any]


def module_factories(
    target: str, check: Callable[..., Check]
) -> dict[Subject, Callable[..., Call]]:
    """Return factories of calls of both frameworks, which take (case, operation, tensors).

    A module gets q's channels as its tokens, and random weights. With others, by which tokens are
    q, k and v themselves, its output is checked here; gradients are not.

    Args:
        target: to compile for.
        check: returns the check of the attention from the case, the operation and its tensors.
    """
    makers = {"torch module": (torch_module, torch_call), "jax module": (jax_module, jax_call)}
    return {
        Subject(name, target): partial(_call, *maker, target, check)
        for name, maker in makers.items()
    }


def torch_module(case: SparseCase | DilatedCase) -> Attend:
    """Return the module as a function of its tokens, its weights and a mask's lists."""
    import torch
    from torch.func import functional_call

    from torch_attn import BlockMask, modules

    channels, options = case.heads_q * case.head_dim, {"causal": case.causal, "device": "meta"}
    if isinstance(case, SparseCase):
        mask = BlockMask(*map(torch.tensor, case.mask))
        module = modules.MultiHeadBlockSparseAttention(channels, case.heads_q, mask, **options)
    else:
        pairs = case.segment_lengths, case.dilation_rates
        module = modules.MultiHeadDilatedAttention(channels, case.heads_q, *pairs, **options)

    def attend(x, *operands):
        weights, lists = operands[: len(PROJECTIONS)], operands[len(PROJECTIONS) :]
        named = {f"{name}.weight": w for name, w in zip(PROJECTIONS, weights, strict=True)}
        named |= dict(zip(BlockMask._fields, lists, strict=False))
        return functional_call(module, named, (x,))

    return attend


def jax_module(case: SparseCase | DilatedCase) -> Attend:
    """Return the module as a function of its tokens, its weights and a mask's lists.

    Raises:
        Absent: there is no Flax.
    """
    try:
        from flax import nnx
    except ImportError as error:
        raise Absent(f"flax cannot be imported: {error}") from error
    import jax

    from pallas_attn import BlockMask, modules

    channels, precision = case.heads_q * case.head_dim, "default"
    if case.dtype == "float32":
        precision = "highest"

    def attend(x, *operands):
        weights, lists = operands[: len(PROJECTIONS)], operands[len(PROJECTIONS) :]
        # Made in each trace; XLA drops the weights that it draws.
        options = {"causal": case.causal, "rngs": nnx.Rngs(0), "param_dtype": x.dtype}
        if isinstance(case, SparseCase):
            mask = BlockMask(*lists)
            module = modules.MultiHeadBlockSparseAttention(channels, case.heads_q, mask, **options)
        else:
            pairs = case.segment_lengths, case.dilation_rates
            module = modules.MultiHeadDilatedAttention(channels, case.heads_q, *pairs, **options)
        for name, weight in zip(PROJECTIONS, weights, strict=True):
            getattr(module, name).kernel[...] = weight
        with jax.default_matmul_precision(precision):
            return module(x)

    return attend


def _call(
    make: Callable[..., Attend],
    prepare: Callable[..., Call],
    target: str,
    check: Callable[..., Check],
    case: SparseCase | DilatedCase,
    operation: str,
    tensors: list[Tensor],
) -> Call:
    import torch

    q, *_, dout = tensors
    x, dx = q.flatten(2), dout.flatten(2)
    channels = x.shape[-1]
    attend, lists = make(case), case.mask if isinstance(case, SparseCase) else ()
    of_mask = [torch.tensor(each, device=x.device) for each in lists]
    same = torch.eye(channels, dtype=x.dtype, device=x.device)
    reverse = same.flip(0).contiguous()  # of the channels, so that q and k differ
    weights = [torch.randn_like(same) * channels**-0.5 for _ in PROJECTIONS]
    with use_target(target):
        known = prepare(attend, "forward", [x, reverse, same, same, same, *of_mask, dx])
        call = prepare(attend, operation, [x, *weights, *of_mask, dx])
        assert known.result is not None
        (out,) = known.result(known.run())
    attended = x.flip(-1).view_as(q), q, q, dout
    error = check(case, "forward", attended)([out.reshape(*q.shape)])
    if error > 1:
        raise ValueError(f"its error is {error:.3g} times the budget")
    return for_target(call._replace(result=None), target)

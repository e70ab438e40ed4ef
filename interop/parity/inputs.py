"""The tensors of a case: made once, in torch, for both frameworks."""

from __future__ import annotations

from zlib import crc32

import torch

from interop.contract.cases import FlashCase
from interop.contract.validate import fail

Tensors = dict[str, torch.Tensor]


def make_inputs(case: FlashCase, device: str) -> Tensors:
    """Operands and output gradients of a case, normally distributed and seeded by its name.

    Args:
        case: the problem.
        device: a torch device, such as "cpu" or "cuda".

    Returns:
        q, k, v and dout in the case's dtype, dlse [B, Hq, Sq] in float32. Of a "strided" case,
        q, k and v are views of one packed tensor [B, S, Hq + 2 Hkv, D].

    Raises:
        ValueError: a "strided" case whose q, k and v do not fit one packed tensor.
    """
    generator = torch.Generator(device).manual_seed(crc32(case.name.encode()))

    def normal(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    dtype = getattr(torch, case.dtype)
    spec = case.spec
    if case.layout == "strided":
        if spec.seq_q != spec.seq_kv or spec.head_dim != spec.head_dim_v:
            fail(ValueError, "layout", "Sq == Skv and D == Dv for 'strided'", case.shapes)
        heads = (spec.heads_q, spec.heads_kv, spec.heads_kv)
        packed = normal((spec.batch, spec.seq_q, sum(heads), spec.head_dim), dtype)
        q, k, v = packed.split(heads, dim=2)
    else:
        q, k, v = (normal(shape, dtype) for shape in case.shapes)
    dout = normal((spec.batch, spec.seq_q, spec.heads_q, spec.head_dim_v), dtype)
    dlse = normal((spec.batch, spec.heads_q, spec.seq_q), torch.float32)
    return {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse}

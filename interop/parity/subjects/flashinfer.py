"""FlashInfer's attention over a paged cache, planned outside of the timed call.

Its modules compile slowly, so the first call compiles those of the suite kvcache in parallel.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from twin_attention.interop.parity.cases import DecodeCase, PagedCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.subjects.library import load
from twin_attention.interop.parity.torch_calls import Attend

WORKSPACE_BYTES = 512 * 2**20
# A case for each module that kvcache needs: tokens of a sequence (several share a module), head
# dimension, the cache's dtype if it is not the queries'.
COMPILED_AHEAD = (
    (1, 128, None), (4, 128, None), (1, 128, "float8_e4m3fn"), (1, 64, None), (1, 256, None),
)  # fmt: skip


def paged(case: DecodeCase, tensors: dict[str, Any], *, lse: bool = False) -> Attend:
    """Its decode kernels, or its prefill kernels for several tokens.

    One token uses BatchDecodeWithPagedKVCacheWrapper without tensor cores, which is faster there.
    """
    load("flashinfer")  # absent before anything is compiled
    if not (lse or isinstance(case, PagedCase)):
        _compile_ahead(tensors["q"].device.type)
    run, shape = _planned(case, tensors), tensors["q"].shape

    def attend(*operands):
        if not lse:
            return run(*operands).view(shape)
        out, found = run(*operands, return_lse=True)  # of base 2
        found = math.log(2) * found.view(shape[:-1])
        return out.view(shape), found.movedim(-1, 0 if isinstance(case, PagedCase) else 1)

    return attend


@cache
def _compile_ahead(device: str) -> None:
    """Compile the modules of kvcache; the case that needs a module shows its failure."""

    def compile_for(tokens: int, head_dim: int, kv_dtype: str | None) -> None:
        case = DecodeCase("small", (tokens,), tokens, 1, 1, head_dim, dtype="float16",
                          kv_dtype=kv_dtype)  # fmt: skip
        _planned(case, make_inputs(case, device))

    with ThreadPoolExecutor() as pool:
        for module in COMPILED_AHEAD:
            pool.submit(compile_for, *module)


def _planned(case: DecodeCase, tensors: dict[str, Any]) -> Attend:
    import torch

    flashinfer = load("flashinfer")

    spec = case.spec
    q, seq_lens, block_tables = (tensors[x] for x in ("q", "seq_lens", "block_tables"))
    used = -(-seq_lens // spec.cache.page_size)
    indptr = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    is_used = torch.arange(spec.cache.max_pages, device=used.device) < used[:, None]
    indices = block_tables[is_used]
    last_page_len = (seq_lens - 1) % spec.cache.page_size + 1
    pages = (indptr, indices, last_page_len)
    sizes = (spec.heads_q, spec.heads_kv, spec.head_dim, spec.cache.page_size)
    options = {
        "sm_scale": spec.scale,
        "window_left": -1 if spec.window_left is None else spec.window_left,
        "logits_soft_cap": spec.softcap,
        "q_data_type": q.dtype,
        "kv_data_type": tensors["k_pages"].dtype,
    }
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    rows = tensors.get("cu_seqlens_q")
    if rows is None and spec.tokens == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(*pages, *sizes, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        if rows is None:
            rows = torch.arange(spec.batch + 1, dtype=torch.int32, device=q.device) * spec.tokens
        wrapper.plan(rows, *pages, *sizes, causal=True, **options)
    scales = {
        name: float(scale)
        for name in ("k_scale", "v_scale")
        if (scale := tensors.get(name)) is not None
    }
    heads = spec.heads_q, spec.head_dim
    return lambda q, k, v, **more: wrapper.run(q.view(-1, *heads), (k, v), **scales, **more)

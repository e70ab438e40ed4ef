"""FlashInfer's decoding from a paged cache, planned outside of the timed call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.job import Absent, Call
from bench.peers.limits import load
from interop.contract.cases import DecodeCase

if TYPE_CHECKING:
    from bench.suites.decode_inputs import DecodeTensors

WORKSPACE_BYTES = 512 * 2**20


def decode(tensor_cores: bool, case: DecodeCase, tensors: DecodeTensors) -> Call:
    """A call of its decode kernels, or with tensor cores of its prefill kernels.

    One token a sequence goes through BatchDecodeWithPagedKVCacheWrapper, several through
    BatchPrefillWithPagedKVCacheWrapper.
    """
    spec = case.spec
    if spec.tokens > 1 and not tensor_cores:
        raise Absent("one token a sequence only, without tensor cores")
    if spec.cache.dtype == "int8" or case.scale_shape:
        raise Absent("neither int8 nor a scale for each head")
    if case.sinks or spec.head_dim != spec.head_dim_v:
        raise Absent("this adapter has neither sinks nor values of another size")
    flashinfer = load("flashinfer")
    import torch

    q = tensors.q.view(spec.batch * spec.tokens, spec.heads_q, spec.head_dim)
    used = -(-tensors.seq_lens // spec.cache.page_size)
    indptr = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    is_used = torch.arange(spec.cache.max_pages, device=used.device) < used[:, None]
    indices = tensors.block_tables[is_used]
    last_page_len = (tensors.seq_lens - 1) % spec.cache.page_size + 1
    pages = (indptr, indices, last_page_len)
    sizes = (spec.heads_q, spec.heads_kv, spec.head_dim, spec.cache.page_size)
    options = {
        "sm_scale": spec.scale,
        "window_left": -1 if spec.window_left is None else spec.window_left,
        "logits_soft_cap": spec.softcap,
        "q_data_type": tensors.q.dtype,
        "kv_data_type": tensors.k_pages.dtype,
    }
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    if spec.tokens == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=tensor_cores
        )
        wrapper.plan(*pages, *sizes, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        rows = torch.arange(spec.batch + 1, dtype=torch.int32, device=q.device) * spec.tokens
        wrapper.plan(rows, *pages, *sizes, causal=True, **options)
    scales = {
        name: float(scale)
        for name in ("k_scale", "v_scale")
        if (scale := getattr(tensors, name)) is not None
    }
    cache = (tensors.k_pages, tensors.v_pages)
    shape = (spec.batch, spec.tokens, spec.heads_q, spec.head_dim)
    return Call(lambda: wrapper.run(q, cache, **scales), lambda out: (out.view(shape),))

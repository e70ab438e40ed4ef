"""Offsets into tensors of 2^31 elements and more, where no whole problem fits a CPU.

Untouched memory takes none. Views of such a size are in ``tests/semantics``.
"""

import re

import torch
import triton
import triton.language as tl

from torch_attn.interpreter import interpreted
from torch_attn.kernels.library.block_mask import Lists, find_list
from torch_attn.kernels.library.pages import StateStrides
from torch_attn.kernels.portable.combine_bwd import combine_bwd_kernel
from tuning.static import triton_aot
from tuning.static.gate import Problem

SIZE = 128


def test_gradients_of_parts_that_lie_far_apart():
    rows = 2**31 // SIZE + 1
    make = torch.Generator().manual_seed(0)
    outs = torch.randn(2, SIZE, generator=make).bfloat16()
    lses = torch.tensor([0.0, 1.0])
    dout = torch.randn(SIZE, generator=make).bfloat16()
    douts = torch.empty(rows * SIZE + SIZE, dtype=torch.bfloat16)
    dlses = torch.empty(rows + 1)
    interpreted(combine_bwd_kernel)[(1,)](
        dout, None, outs, lses, douts, dlses,
        dout_strides=StateStrides(None, *(SIZE,) * 3), dlse_strides=None,
        outs_strides=StateStrides(*(SIZE,) * 4), lses_strides=StateStrides(*(1,) * 4),
        tokens=1, rows=rows, num_states=2, HEADS=1, HEAD_DIM_V=SIZE, BLOCK_DV=SIZE, BLOCK_STATES=2,
    )  # fmt: skip
    weights = lses.softmax(0)
    for part, start in enumerate((0, rows * SIZE)):
        got = douts[start : start + SIZE].float()
        torch.testing.assert_close(got, weights[part] * dout.float(), rtol=2**-7, atol=0)


@triton.jit
def first_tile_kernel(counts_ptr, tiles_ptr, out_ptr, stride, batch, head):
    lists = Lists(counts_ptr, tiles_ptr, 0, stride, 1, None, None, None)
    list_ptr, count = find_list(lists, batch, head, 0)
    tl.store(out_ptr, tl.load(list_ptr))
    tl.store(out_ptr + 1, count)


def test_lists_of_heads_that_lie_far_apart():
    stride = 2**30
    counts = torch.empty(2 * stride + 1, dtype=torch.int32)
    tiles = torch.empty(2 * stride + 1, dtype=torch.int32)
    counts[-1], tiles[-1] = 1, 7
    out = torch.empty(2, dtype=torch.int32)
    interpreted(first_tile_kernel)[(1,)](counts, tiles, out, stride, 0, 2)
    assert out.tolist() == [7, 1]


def test_sums_are_addressed_in_64_bits(monkeypatch):
    """The sums of one head pass 2^31 elements from 2^31 / D queries on."""

    def run_backward(spec, backend, x, **_):
        lse = torch.empty(spec.batch, spec.heads_q, spec.seq_q, device="meta")
        backend.family.function("flash_bwd")(x.q, lse, x, x.q, lse, None, spec, backend)

    monkeypatch.setattr(triton_aot, "run_kernels", run_backward)
    spec = Problem("torch", "sm80", "bfloat16", 80, "causal", "gluon").spec  # the gate's own test
    kernels = {
        name: compiled.asm["ttgir"]
        for name, _config, compiled in triton_aot.compile_kernels(spec, "sm80", family="gluon")
    }
    for name in ("flash_bwd_fused", "flash_bwd_postprocess"):
        assert not re.findall(r"tt\.addptr .*: !tt\.ptr<f32>, i32", kernels[name])
        assert re.findall(r"tt\.addptr .*: !tt\.ptr<f32>, i64", kernels[name])

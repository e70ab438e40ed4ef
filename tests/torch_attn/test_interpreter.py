"""Kernels on CPU tensors: `torch_attn.interpreter` computes what a GPU does.

These tests guard the private Triton API that `torch_attn/interpreter.py` uses. When one fails after
an update of Triton, compare ``triton/runtime/interpreter.py`` with the list in that file's
docstring: adapt what moved, and delete a repair that Triton no longer needs.
"""

import threading

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tests import fresh
from torch_attn.interpreter import interpreted


def language() -> dict:
    """Everything in Triton that a launch patches."""
    owners = (
        tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.block_type, tl.core.tensor_descriptor_base,
        JITFunction,
    )  # fmt: skip
    # Python shows an inherited method and its explicit copy alike, and keeps "__slotnames__" with a
    # class of which something is copied for the first time.
    names = ((owner, name) for owner in owners for name in dir(owner))
    return {(owner, name): getattr(owner, name) for owner, name in names if name != "__slotnames__"}


UNPATCHED = language()  # taken before any test runs


@triton.jit
def axpy(a, x, y):
    return a.to(x.dtype) * x + y


@triton.jit
def axpy_kernel(x_ptr, y_ptr, a, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < size, other=0.0)
    y = tl.load(y_ptr + offsets, mask=offsets < size, other=0.0)
    tl.store(y_ptr + offsets, axpy(a, x, y).to(y_ptr.dtype.element_ty), mask=offsets < size)


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, size, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in tl.range(0, size, BLOCK, num_stages=2):
        a = tl.load(a_ptr + rows * size + start + cols)
        b = tl.load(b_ptr + (start + rows) * BLOCK + cols)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(c_ptr + rows * BLOCK + cols, acc.to(c_ptr.dtype.element_ty))


@triton.jit
def sizes_kernel(out_ptr, BLOCK: tl.constexpr):
    x = tl.zeros([BLOCK, 4], tl.float32)
    y = x.to(tl.int8)
    for i in tl.static_range(2):
        tl.store(out_ptr + i, x.shape[i] + y.shape[i])
    tl.store(out_ptr + 2, y.numel + (x + x).numel)
    tl.store(out_ptr + 3, (x.dtype == tl.float32) & (y.type.element_ty == tl.int8))


@pytest.mark.parametrize("block", [8, 16])
def test_tensors_have_their_sizes(block):
    out = torch.zeros(4, dtype=torch.int32)
    interpreted(sizes_kernel)[(1,)](out, BLOCK=block)
    assert out.tolist() == [2 * block, 8, 8 * block, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_matmul_with_a_bound_known_at_run_time(dtype):
    a, b = torch.randn(32, 96).to(dtype), torch.randn(96, 32).to(dtype)
    c = torch.empty(32, 32, dtype=torch.float32)
    interpreted(matmul_kernel)[(1,)](a, b, c, 96, BLOCK=32)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_stores_round_to_nearest(dtype):
    a, b = torch.randn(32, 32).to(dtype), torch.eye(32).to(dtype)
    c = torch.empty(32, 32, dtype=torch.bfloat16)
    interpreted(matmul_kernel)[(1,)](a, b, c, 32, BLOCK=32)
    assert torch.equal(c, a.to(torch.bfloat16))


def test_helpers_masks_and_float_arguments():
    x, y = torch.randn(100), torch.randn(128)
    want = torch.cat([0.1 * x + y[:100], y[100:]])
    interpreted(axpy_kernel)[(4,)](x, y, 0.1, 100, BLOCK=32)
    torch.testing.assert_close(y, want)


@pytest.mark.parametrize("fails", [False, True])
def test_the_language_is_put_back(fails):
    if fails:
        with pytest.raises(ValueError, match="Unsupported ptr type"):
            interpreted(axpy_kernel)[(1,)](1, 2, 3.0, 4, BLOCK=4)
    else:
        interpreted(axpy_kernel)[(1,)](torch.ones(4), torch.ones(4), 1.0, 4, BLOCK=4)
    after = language()
    assert after.keys() == UNPATCHED.keys()
    assert [key for key, x in UNPATCHED.items() if after[key] != x] == []
    assert "interpreter_semantic" not in globals()


def test_launches_from_threads():
    xs = [torch.randn(64) for _ in range(8)]
    ys = [torch.zeros(64) for _ in xs]

    def run(x, y):
        interpreted(axpy_kernel)[(2,)](x, y, 3.0, 64, BLOCK=32)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(xs, ys, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, y in zip(xs, ys, strict=True):
        torch.testing.assert_close(y, 3.0 * x)


def test_the_kernel_still_compiles_after_an_interpreted_launch():
    """The compiler sees the kernel as written, on a machine without a GPU as well."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    interpreted(axpy_kernel)[(1,)](torch.ones(4), torch.ones(4), 1.0, 4, BLOCK=4)
    signature = {
        "x_ptr": "*fp32", "y_ptr": "*fp32", "a": "fp32", "size": "i32", "BLOCK": "constexpr",
    }  # fmt: skip
    source = ASTSource(fn=axpy_kernel, signature=signature, constexprs={"BLOCK": 128})
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32))
    assert "ld.global" in compiled.asm["ptx"]


def test_gluon_is_never_imported_by_an_interpreted_launch():
    """It would wrap the patched language for good; see the list in `torch_attn.interpreter`."""
    script = """
import inspect, torch
from torch_attn import flash_attention
q = torch.randn(1, 4, 1, 16)
flash_attention(q, q, q, implementation="triton")
from triton.experimental.gluon import language as gl
assert "_semantic" in inspect.signature(gl.program_id).parameters
"""
    fresh.run(exec, script, {})


def test_tritons_own_switch_is_refused():
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        interpreted(InterpretedFunction(axpy_kernel.fn))

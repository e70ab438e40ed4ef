"""The interpreter of Gluon: a small kernel, and all that can be wrong with it."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.torch_attn.gluon_interpreter import (
    READS_FIRST,
    WRITES_FIRST,
    DeadlockError,
    InterpreterError,
    Mode,
    edited,
    interpret,
)
from torch_attn.kernels.explicit import cp_async, mma
from torch_attn.kernels.explicit.barriers import allocate_barriers, arrive, wait_for_all
from torch_attn.kernels.explicit.tma import load_box, store_box
from torch_attn.kernels.explicit.wgmma import product_layout

STEPS = 4
READ = gl.constexpr(8)
MODES = [WRITES_FIRST, READS_FIRST, Mode()]


@gluon.jit
def squares_kernel(x, out, STEPS: gl.constexpr):
    """Compute x · xᵀ of tiles of 64 rows, one after the other; a partition loads them."""
    tile = gl.allocate_shared_memory(x.dtype, [64, 64], x.layout)
    result = gl.allocate_shared_memory(out.dtype, [64, 64], out.layout)
    full = allocate_barriers(1)
    fence_async_shared()
    gl.warp_specialize(
        [(_multiply, (out, tile, result, full, STEPS)), (_load, (x, tile, full, STEPS))], [1], [24]
    )


@gluon.jit
def _load(x, tile, full, STEPS: gl.constexpr):
    for step in range(STEPS):
        if step > 0:
            wait_for_all(READ, 160)
        mbarrier.expect(full.index(0), 64 * 64 * 2)
        load_box(x, [step * 64, 0], full.index(0), tile)


@gluon.jit
def _multiply(out, tile, result, full, STEPS: gl.constexpr):
    for step in range(STEPS):
        mbarrier.wait(full.index(0), step & 1)
        acc = gl.zeros([64, 64], gl.float32, product_layout(64))
        acc = warpgroup_mma(tile, tile.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        arrive(READ, 160)
        result.store(acc)
        fence_async_shared()
        store_box(out, [step * 64, 0], result)
        tma.store_wait(0)


def squares(mode, replace=None):
    x = torch.randn(64 * STEPS - 10, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.zeros(64 * STEPS - 10, 64)
    layouts = [gl.NVMMASharedLayout(128, bits, 2) for bits in (16, 32)]
    maps = [
        TensorDescriptor(each, list(each.shape), list(each.stride()), [64, 64], layout)
        for each, layout in zip((x, out), layouts, strict=True)
    ]
    interpret(squares_kernel, (1,), mode, replace=replace, x=maps[0], out=maps[1], STEPS=STEPS)
    tiles = torch.nn.functional.pad(x.float(), (0, 0, 0, 10)).view(STEPS, 64, 64)
    return out, (tiles @ tiles.mT).view(-1, 64)[: len(x)]


@pytest.mark.parametrize("mode", MODES)
def test_a_kernel_that_is_right(mode):
    got, want = squares(mode)
    torch.testing.assert_close(got, want)


WAIT = "acc = warpgroup_mma_wait(0, deps=(acc,))"
ARRIVE = "arrive(READ, 160)"
ERRORS = {
    "a pending count": (_multiply, WAIT, WAIT.replace("0", "1"), "leaves a product pending"),
    "no wait for a product": (_multiply, WAIT, "pass", "before it was waited for"),
    "no fence": (_multiply, "fence_async_shared()", "pass", "without a fence"),
    "no fence of barriers": (squares_kernel, "fence_async_shared()", "pass", "without a fence"),
    "no wait for a store": (_multiply, "tma.store_wait(0)", "pass", "not awaited its stores"),
    "two arrivals": (_multiply, ARRIVE, f"{ARRIVE}; {ARRIVE}", "twice|wait|arrivals"),
    "counts": (_multiply, ARRIVE, "arrive(READ, 192)", "192 and 160|160 and 192"),
    "two owners": (_multiply, ARRIVE, f"{ARRIVE}; mbarrier.arrive(full.index(0))", "twice|arr"),
    "a shape": (_multiply, "result.store(acc)", "result.store(acc[:32])", "into"),
    "a dtype": (_multiply, "result.store(acc)", "result.store(acc.to(gl.bfloat16))", "into"),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize(("function", "old", "new", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(function, old, new, message, mode):
    with pytest.raises(InterpreterError, match=message):
        squares(mode, {function: edited(function, old, new)})


DEADLOCKS = {
    "no arrival": (_multiply, ARRIVE, "pass"),
    "too few bytes": (_load, "64 * 64 * 2", "64 * 64"),
    "too many bytes": (_load, "64 * 64 * 2", "64 * 64 * 4"),
}


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize(("function", "old", "new"), DEADLOCKS.values(), ids=DEADLOCKS)
def test_deadlocks(function, old, new, mode):
    with pytest.raises(DeadlockError, match="partition 1: "):
        squares(mode, {function: edited(function, old, new)})


FULL = "mbarrier.wait(full.index(0), step & 1)"
START = """acc = gl.zeros([64, 64], gl.float32, product_layout(64))
        acc = warpgroup_mma(tile, tile.permute((1, 0)), acc, is_async=True)"""
RACES = {
    "read before it is loaded": (
        READS_FIRST, _multiply, f"{FULL}\n        {START}", f"{START}\n        {FULL}"
    ),
    "loaded while it is read": (
        WRITES_FIRST, _multiply, f"{WAIT}\n        arrive(READ, 160)", f"arrive(READ, 160); {WAIT}"
    ),
    "written while it is stored": (
        WRITES_FIRST, _multiply, "tma.store_wait(0)", "tma.store_wait(1 if step < STEPS - 1 else 0)"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("mode", "function", "old", "new"), RACES.values(), ids=RACES)
def test_races_make_wrong_results(mode, function, old, new):
    got, want = squares(mode, {function: edited(function, old, new)})
    assert not torch.allclose(got, want)


@gluon.jit
def hand_over_kernel(out):
    """One partition stores a tile of ones that another one writes, which has the fence."""
    tile = gl.allocate_shared_memory(out.dtype, [64, 64], out.layout)
    gl.warp_specialize([(_write, (tile,)), (_store, (out, tile))], [1], [24])


@gluon.jit
def _write(tile):
    tile.store(gl.full([64, 64], 1, gl.float32, product_layout(64)))
    arrive(READ, 160)


@gluon.jit
def _store(out, tile):
    wait_for_all(READ, 160)
    fence_async_shared()
    store_box(out, [0, 0], tile)
    tma.store_wait(0)


def hand_over(mode, old="", new=""):
    out = torch.zeros(64, 64)
    layout = gl.NVMMASharedLayout(128, 32, 2)
    replace = {_store: edited(_store, old, new)} if old else None
    result = TensorDescriptor(out, [64, 64], [64, 1], [64, 64], layout)
    interpret(hand_over_kernel, (1,), mode, replace=replace, out=result)
    return out


@pytest.mark.parametrize("mode", MODES)
def test_a_fence_of_who_has_met_the_writer(mode):
    assert (hand_over(mode) == 1).all()


MEET = """wait_for_all(READ, 160)
    fence_async_shared()"""
FENCE_FIRST = """fence_async_shared()
    wait_for_all(READ, 160)"""


@pytest.mark.parametrize("new", ["wait_for_all(READ, 160)", FENCE_FIRST], ids=["none", "early"])
def test_no_fence_of_who_has_met_the_writer(new):
    with pytest.raises(InterpreterError, match="without a fence"):
        hand_over(WRITES_FIRST, MEET, new)


@pytest.mark.parametrize("mode", MODES)
def test_two_writers_that_have_not_met(mode):
    write = "tile.store(gl.zeros([64, 64], gl.float32, product_layout(64)))"
    with pytest.raises(InterpreterError, match="has not met its writer"):
        hand_over(mode, MEET, f"{write}\n    {MEET}")
    in_turn = f"wait_for_all(READ, 160)\n    {write}\n    fence_async_shared()"
    assert (hand_over(mode, MEET, in_turn) == 0).all()


@gluon.jit
def square_kernel(x_ptr, out_ptr):
    layout: gl.constexpr = mma.product_layout(4)
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], cp_async.shared_layout(64))
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    places = rows * 64 + gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    cp_async.copy_async(tile, x_ptr + places)
    cp_async.commit()
    cp_async.wait(0)
    a = tile.load(gl.DotOperandLayout(0, layout, 2))
    b = tile.permute((1, 0)).load(gl.DotOperandLayout(1, layout, 2))
    gl.store(out_ptr + places, mma_v2(a, b, gl.zeros([64, 64], gl.float32, layout)))


def square(mode, old="", new=""):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.zeros(64, 64)
    replace = {square_kernel: edited(square_kernel, old, new)} if old else None
    interpret(square_kernel, (1,), mode, replace=replace, x_ptr=x, out_ptr=out)
    return out, x.float() @ x.float().mT


@pytest.mark.parametrize("mode", MODES)
def test_a_kernel_of_sm80_that_is_right(mode):
    got, want = square(mode)
    torch.testing.assert_close(got, want)


ERRORS_OF_SM80 = {
    "no group of a copy": ("cp_async.commit()", "pass", "not awaited its copies"),
    "no wait for a group": ("cp_async.wait(0)", "pass", "not awaited its groups"),
    "a pending count": ("cp_async.wait(0)", "cp_async.wait(1)", "not awaited its groups"),
    "a shape": ("(tile, x", "(tile.slice(0, 32), x", "into"),
    "a layout": ("gl.DotOperandLayout(0,", "gl.DotOperandLayout(1,", "operand 0"),
}


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize(("old", "new", "message"), ERRORS_OF_SM80.values(), ids=ERRORS_OF_SM80)
def test_errors_of_sm80(old, new, message, mode):
    with pytest.raises(InterpreterError, match=message):
        square(mode, old, new)


def test_what_is_unknown_is_named():
    unknown = edited(_multiply, "tma.store_wait(0)", "gl.histogram(acc, 4)")
    with pytest.raises(NotImplementedError, match="histogram"):
        squares(WRITES_FIRST, {_multiply: unknown})

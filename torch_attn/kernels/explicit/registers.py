"""Tiles in registers: how threads hold and pack their rows and columns."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.constexpr_function
def copy_layout(width, num_warps):
    """Return the layout of a copy of full rows, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [num_warps, 1], [1, 0])


@gluon.jit
def scale_all(x, factor):
    scaled = ()
    for i in gl.static_range(len(x)):
        scaled = scaled + (x[i] * factor,)
    return scaled


@gluon.jit
def pack(x, DTYPE: gl.constexpr):
    """Round to a 16-bit dtype and pack pairs: else a loop carries a word for each element."""
    low, high = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(
        pack_instruction(DTYPE), "=r,f,f", [high, low], dtype=gl.int32, is_pure=True, pack=1
    )


@triton.constexpr_function
def pack_instruction(dtype):
    return f"cvt.rn.{'bf16x2' if dtype == gl.bfloat16 else 'f16x2'}.f32 $0, $1, $2;"


@gluon.jit
def unpack(words, DTYPE: gl.constexpr, LAYOUT: gl.constexpr, PLACE: gl.constexpr):
    """Return packed words as a left operand of products with accumulators of a layout.

    PLACE, a comment in PTX, differs for each use: LLVM would merge equal uses before the loop,
    which then carries unpacked elements.
    """
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2; // " + PLACE, "=h,=h,r", [words],
        dtype=(gl.int16, gl.int16), is_pure=True, pack=1,
    )  # fmt: skip
    x = gl.reshape(gl.join(low, high), [words.shape[0], 2 * words.shape[1]])
    x = x.to(DTYPE, bitcast=True)
    return gl.convert_layout(x, gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True)


@gluon.jit
def split_columns(s):
    return gl.split(gl.permute(gl.reshape(s, [s.shape[0], 2, s.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def join_columns(a, b, like):
    x = gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), like.shape)
    return gl.convert_layout(x, like.type.layout, assert_trivial=True)

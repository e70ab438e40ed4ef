"""Scores: the way from q·k to what the softmax takes, without the derivative of a cap."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.sm80.scores import tanh


@gluon.jit
def scaled_scores(s, rule):
    """Scale products q·k where the exponent cannot do it, and cap them."""
    # As a tensor it would be a branch, and Triton 3.6 has kept the side without the product.
    gl.static_assert(not isinstance(rule.scale_first, gl.tensor))
    if rule.scale_first:
        s = s * rule.scale
    if rule.softcap is not None:
        s = rule.softcap * tanh(s * (1.0 / rule.softcap))
    return s


@gluon.jit
def hide(s, position, start_kv, end, window_left, window_right):
    """Set the scores of keys that a query does not see to -inf: `portable.scores.attention_mask`.

    The window's end and the last key are one bound, a number for each row. A thread has two keys in
    eight: what it compares with its rows' bounds are the same constants in each tile.
    """
    eights = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 8])
    of_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, eights.type.layout))
    of_eight: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, eights.type.layout))
    of_key: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, eights.type.layout))
    first = gl.arange(0, s.shape[1] // 8, of_eight)[None, :, None] * 8
    key = start_kv + gl.arange(0, 8, of_key)[None, None, :]
    position = gl.convert_layout(position, of_row, assert_trivial=True)[:, None, None]
    last = end - 1
    if window_right is not None:
        last = gl.minimum(position + window_right, last)
    eights = _where_at_most(first, last - key, eights)
    if window_left is not None:
        eights = _where_at_most(position - window_left - key, first, eights)
    return gl.convert_layout(gl.reshape(eights, s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def _where_at_most(x, bound, s):
    """Return s where x <= bound, else -inf; in PTX, since LLVM would pack the bits into words."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred seen; setp.le.s32 seen, $1, $2; selp.f32 $0, $3, 0fFF800000, seen; }",
        "=f,r,r,f", [x, bound, s], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip

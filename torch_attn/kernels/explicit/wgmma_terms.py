"""Terms of the scores of wgmma, and dropout, in a forward, with the fewest instructions a score.

Products q·k are not scaled: `exp2_scale` takes them to base 2, and a term is added in the units of
the products. What all scores in a thread's row share is added to its maximum and its exponents
instead. The functions below call it the shift, [rows, 4] like the sums of `softmax.add_columns`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.explicit.terms import axis_layout, draw_words, table_sides
from torch_attn.kernels.library.softmax import LOG2E

# Widens two packed bfloat16 numbers. In PTX: Triton takes three instructions for them.
WIDEN = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")


def _mask_words() -> str:
    """Return the PTX that makes masks of two halves from four words of one column and the next.

    A half stays where it is at least the threshold, that is where the difference borrows nothing.
    The top bit says so, and fills the mask. $16 has the threshold in both halves, and $17 its
    negative.
    """
    code = ["{ .reg .b32 less, first, next; .reg .pred never;"]
    for i in range(4):
        for j, name in enumerate(("first", "next")):
            code.append(f"add.u16x2 less, ${8 + 2 * i + j}, $17;")
            code.append(f"lop3.b32 {name}, ${8 + 2 * i + j}, $16, less, 0x71;")
        for j, halves in enumerate(("0xDD99", "0xFFBB")):
            code.append(f"prmt.b32 ${2 * i + j}, first, next, {halves};")
    # A store that no threshold triggers keeps all this before the products are awaited.
    code.append("xor.b32 less, $0, $4; mov.b32 first, 0; setp.eq.u32 never, $16, 0;")
    code.append("@never st.shared.b32 [first], less; }")
    return " ".join(code)


MASK_WORDS = gl.constexpr(_mask_words())
_MASK_CONSTRAINTS = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 10))
_EIGHT_WORDS = gl.constexpr((gl.int32,) * 8)


@gluon.jit
def add_to_products(s, terms, own, rule, offset, bias):
    """Add terms to products q·k; return these, and the shifts of scores in base 2.

    Args:
        s: the products.
        own, offset, bias: as in `terms.add_terms`.
        rule: `twin_attention.contract.spec.ScoreRule`, whose exponent scales.
    """
    inverse = 1.0 / rule.scale
    if terms.bias.entries is not None:
        # Before any branch: ptxas 12.8 crashes where a bias is added behind one.
        bias = _widen(bias)
        if terms.bias.of_keys:
            s += bias * inverse
    quads = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2])
    layout: gl.constexpr = quads.type.layout
    of_thread: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, layout))
    shift = gl.zeros([s.shape[0], 4], gl.float32, of_thread)
    if terms.bias.entries is not None:  # noqa: SIM102 (Triton evaluates both sides of an "and")
        if not terms.bias.of_keys:
            rows: gl.constexpr = gl.SliceLayout(1, of_thread)
            bias = gl.convert_layout(gl.reshape(bias, [s.shape[0]]), rows, assert_trivial=True)
            shift += bias[:, None] * LOG2E
    # Distance from the thread's queries to a key in the middle, and from that key to the thread's
    # keys. Both parts of a distance are rounded, so they should be small where it is small.
    MIDDLE: gl.constexpr = s.shape[1] // 2
    row = gl.arange(0, s.shape[0], gl.SliceLayout(1, of_thread))[:, None]
    pair = gl.arange(0, 4, gl.SliceLayout(0, of_thread))[None, :]
    middle = offset + MIDDLE + pair * 2 - row
    of_eight: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    of_column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    eight = gl.arange(0, s.shape[1] // 8, of_eight)[None, :, None, None]
    column = gl.arange(0, 2, of_column)[None, None, None, :]
    other = eight * 8 + column - MIDDLE
    # In a tile on both sides, or within the table, each score has its own term.
    is_before, is_behind = offset + s.shape[1] <= 0, offset >= s.shape[0]
    if terms.slopes is not None:
        if terms.falling:
            quads += other.to(gl.float32) * (own.slope * inverse)
            shift += middle.to(gl.float32) * (own.slope * LOG2E)
        elif is_before | is_behind:
            slope = gl.where(is_behind, -own.slope, own.slope)
            quads += other.to(gl.float32) * (slope * inverse)
            shift += middle.to(gl.float32) * (slope * LOG2E)
        else:
            distance = middle.to(gl.float32)[:, None, :, None] + other.to(gl.float32)
            quads -= gl.abs(distance) * (own.slope * inverse)
    if terms.relative is not None:
        is_before, is_behind = table_sides(terms, offset, s.shape[1], s.shape[0])
        if is_before | is_behind:
            shift += gl.where(is_before, own.first, own.last) * LOG2E
        else:
            quads += _table_values(terms, own, offset, quads) * inverse
    s = gl.convert_layout(gl.reshape(quads, s.shape), s.type.layout, assert_trivial=True)
    return s, shift


@gluon.jit
def _table_values(terms, own, offset, quads):
    """Return the table's values for the distances of a tile, as products in quads.

    A thread's second row has the distances of its first row eight keys further on, so they are
    loaded once.
    """
    ROWS: gl.constexpr = quads.shape[0] // 16
    EIGHTS: gl.constexpr = quads.shape[1]
    like = gl.reshape(quads, [ROWS, 2, 8, EIGHTS, 4, 2])
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, like.type.layout))
    sixteen = gl.arange(0, ROWS, axis_layout(layout, 4, 0))[:, None, None, None]
    row = gl.arange(0, 8, axis_layout(layout, 4, 1))[None, :, None, None]
    pair = gl.arange(0, 4, axis_layout(layout, 4, 2))[None, None, :, None]
    column = gl.arange(0, 2, axis_layout(layout, 4, 3))[None, None, None, :]
    first = offset + pair * 2 + column - row - sixteen * 16
    values = ()
    for i in gl.static_range(EIGHTS + 1):
        place = gl.minimum(gl.maximum(first + (i - 1) * 8, -terms.radius), terms.radius)
        values = values + (gl.load(own.table + place).to(gl.float32),)
    halves = gl.join(_stack(values, 1, EIGHTS), _stack(values, 0, EIGHTS))
    if EIGHTS == 16:
        halves = gl.permute(halves, (0, 8, 1, 7, 6, 5, 4, 2, 3))
    else:
        halves = gl.permute(halves, (0, 7, 1, 6, 5, 4, 2, 3))
    values = gl.reshape(halves, quads.shape)
    return gl.convert_layout(values, quads.type.layout, assert_trivial=True)


@gluon.jit
def _stack(values, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Return COUNT tensors as one, with one more axis for each bit of their numbers."""
    joined = ()
    for i in gl.static_range(COUNT // 2):
        joined = joined + (gl.join(values[FIRST + 2 * i], values[FIRST + 2 * i + 1]),)
    if COUNT == 2:
        x = joined[0]
    else:
        x = _stack(joined, 0, COUNT // 2)
    return x


@gluon.jit
def shifted_softmax_update(s, shift, m_i, l_i, exp2_scale):
    """Update the running softmax: `softmax.online_softmax_update` of shifted scores.

    Args:
        s: products q·k, -inf where a key is hidden.
        shift: added to s · exp2_scale, gives scores in base 2, for the columns of a thread.
    """
    quads = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2])
    rows: gl.constexpr = gl.SliceLayout(1, l_i.type.layout)
    shift = gl.convert_layout(shift, l_i.type.layout, assert_trivial=True)
    largest = gl.max(gl.max(quads, 1), 2)
    largest = gl.convert_layout(largest, l_i.type.layout, assert_trivial=True) * exp2_scale + shift
    m_new = gl.convert_layout(gl.max(largest, 1), m_i.type.layout, assert_trivial=True)
    m_new = gl.maximum(m_i, m_new)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    below = gl.convert_layout(m_safe, rows, assert_trivial=True)[:, None] - shift
    of_thread: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, quads.type.layout))
    below = gl.convert_layout(below, of_thread, assert_trivial=True)[:, None, :, None]
    p = gl.exp2(quads * exp2_scale - below)
    sums = gl.convert_layout(gl.sum(gl.sum(p, 1), 2), l_i.type.layout, assert_trivial=True)
    p = gl.convert_layout(gl.reshape(p, s.shape), s.type.layout, assert_trivial=True)
    alpha = gl.exp2(m_i - m_safe)
    l_i = l_i * gl.convert_layout(alpha, rows, assert_trivial=True)[:, None] + sums
    return p, alpha, m_new, l_i


@gluon.jit
def draw_masks(
    terms,
    own,
    first_q,
    first_kv,
    BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Draw which probabilities of a tile stay: a bit each, for `drop_packed`.

    The seed is loaded again for each tile, so that nothing is drawn before this place. Otherwise
    the compiler would draw between the products issued before, and the tensor cores would wait.

    Args:
        first_q, first_kv, LAYOUT: as in `terms.draw`.
    """
    kept = 0
    if terms.seed is not None:
        low = gl.cast(gl.load(terms.seed, volatile=True), gl.uint32, bitcast=True)
        high = gl.cast(gl.load(terms.seed + 1, volatile=True), gl.uint32, bitcast=True)
        words, _row, _column = draw_words(
            own.element, own.head, low, high, first_q, first_kv, BLOCK_Q, BLOCK_KV, LAYOUT
        )
        a, b = _pairs(words[0])
        c, d = _pairs(words[1])
        e, f = _pairs(words[2])
        g, h = _pairs(words[3])
        threshold = terms.dropout.threshold * 0x10001
        opposite = (0x10000 - terms.dropout.threshold) * 0x10001
        m = gl.inline_asm_elementwise(
            MASK_WORDS, _MASK_CONSTRAINTS, [a, b, c, d, e, f, g, h, threshold, opposite],
            dtype=_EIGHT_WORDS, is_pure=False, pack=1,
        )  # fmt: skip
        # [blocks, 8, blocks, 4 pairs] with one more axis for the half of a word, which are keys,
        # and for words of keys and of queries.
        upper = gl.join(gl.join(m[0], m[1]), gl.join(m[2], m[3]))
        lower = gl.join(gl.join(m[4], m[5]), gl.join(m[6], m[7]))
        kept = gl.permute(gl.join(upper, lower), (0, 6, 1, 2, 4, 5, 3))
        kept = gl.reshape(kept, [BLOCK_Q, BLOCK_KV // 2])
    return kept


@gluon.jit
def drop_packed(packed, kept):
    """Set the dropped ones of probabilities packed by `registers.pack` to 0."""
    return packed & gl.convert_layout(kept, packed.type.layout, assert_trivial=True)


@gluon.jit
def _pairs(words):
    """Return the words of even columns, and of odd ones."""
    return gl.split(gl.reshape(words, [words.shape[0], 8, words.shape[2], 4, 2]))


@gluon.jit
def _widen(bias):
    """Return a tile of a bias in float32."""
    if bias.dtype == gl.bfloat16 and bias.shape[1] > 1:
        bias = gl.inline_asm_elementwise(
            WIDEN, "=f,=f,r", [bias], dtype=gl.float32, is_pure=True, pack=2
        )
    return bias.to(gl.float32)

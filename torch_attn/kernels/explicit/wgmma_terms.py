"""Terms of the scores of wgmma, and dropout, in a forward, with the fewest instructions a score.

What the scores in a thread's row share, the shift [rows, 4], is added to its maximum and exponents
in place of each score.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.explicit.terms import add_terms, axis_layout, draw_words, table_sides, widen
from torch_attn.kernels.library.softmax import LOG2E
from torch_attn.kernels.library.terms import STEEP

# The largest entry of a table that is a shift: with a larger one the backward would round scores.
LARGEST_SHIFT = gl.constexpr(4096.0)
# From here on the scores of a row that have weight are equal, apart from multiples of 16.
HUGE = gl.constexpr(2.0**27)


def _mask_words() -> str:
    """Return the PTX that makes masks of two halves from four words of one column and the next.

    A half stays where it is at least the threshold: the top bit of the difference says so, and
    fills the mask. $16 has the threshold in both halves, and $17 its negative.
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
def scores_to_add(s, terms, own, rule, offset, bias):
    """Return (s, shift, unit): s · unit + shift are the scores, with their terms, of products s.

    Where pairs share an entry of the table, and with ALiBi if no slope is steep, s stays products.
    Terms large enough to round a score are added to each, as in the backward.
    """
    quads = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2])
    layout: gl.constexpr = quads.type.layout
    of_thread: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, layout))
    shift = no_shift(s)
    unit = 1.0
    if terms.bias.entries is not None or (terms.relative is not None and terms.slopes is not None):
        if terms.bias.entries is not None:
            bias = widen(bias)
        s = add_terms(s, terms, own, rule, offset, bias)
    elif terms.relative is not None:
        is_before, is_behind = table_sides(terms, offset, s.shape[1], s.shape[0])
        far = gl.where(is_before, own.first, own.last)
        is_shifted = (is_before | is_behind) & (gl.abs(far) < LARGEST_SHIFT)
        unit = gl.where(is_shifted, rule.scale, 1.0)
        if is_shifted:
            shift += far
        else:
            quads = quads * rule.scale + _table_values(terms, own, offset, quads)
        s = gl.convert_layout(gl.reshape(quads, s.shape), s.type.layout, assert_trivial=True)
    else:
        # Distance from the thread's queries to a key in the middle, and from that key to the
        # thread's keys. Both parts are rounded, so they should be small where the distance is.
        MIDDLE: gl.constexpr = s.shape[1] // 2
        row = gl.arange(0, s.shape[0], gl.SliceLayout(1, of_thread))[:, None]
        pair = gl.arange(0, 4, gl.SliceLayout(0, of_thread))[None, :]
        middle = offset + MIDDLE + pair * 2 - row
        of_eight: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
        of_column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        eight = gl.arange(0, s.shape[1] // 8, of_eight)[None, :, None, None]
        column = gl.arange(0, 2, of_column)[None, None, None, :]
        other = (eight * 8 + column - MIDDLE).to(gl.float32)
        # In a tile on both sides each score has its own distance.
        is_behind = offset >= s.shape[0]
        is_shifted = gl.abs(own.slope) <= STEEP
        if not terms.falling:
            is_shifted &= is_behind | (offset + s.shape[1] <= 0)
        unit = gl.where(is_shifted, rule.scale, 1.0)
        if is_shifted:
            slope = own.slope
            if not terms.falling:
                slope = gl.where(is_behind, -slope, slope)
            quads += other * (slope / rule.scale)
            shift += middle.to(gl.float32) * slope
        else:
            distance = middle.to(gl.float32)[:, None, :, None] + other
            quads = quads * rule.scale - gl.abs(distance) * own.slope
        s = gl.convert_layout(gl.reshape(quads, s.shape), s.type.layout, assert_trivial=True)
    return s, shift, unit


@gluon.jit
def no_shift(s):
    quads = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2])
    of_thread: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, quads.type.layout))
    return gl.zeros([s.shape[0], 4], gl.float32, of_thread)


@gluon.jit
def _table_values(terms, own, offset, quads):
    """Return the table's values of a tile in quads; a second row is eight keys further."""
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
def added_softmax_update(s, shift, unit, m_i, l_i):
    """Update the running softmax with the result of `scores_to_add`, s -inf where a key is hidden.

    m_i is the largest score; l_i is relative to a rounded product with it (`rounding_of_maximum`).
    """
    quads = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2])
    rows: gl.constexpr = gl.SliceLayout(1, l_i.type.layout)
    shift = gl.convert_layout(shift, l_i.type.layout, assert_trivial=True)
    largest = gl.max(gl.max(quads, 1), 2)
    largest = gl.convert_layout(largest, l_i.type.layout, assert_trivial=True) * unit + shift
    m_new = gl.convert_layout(gl.max(largest, 1), m_i.type.layout, assert_trivial=True)
    m_new = gl.maximum(m_i, m_new)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    of_thread: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, quads.type.layout))
    of_row: gl.constexpr = gl.SliceLayout(1, of_thread)
    base = base_of(m_safe)
    below = gl.convert_layout(m_safe, rows, assert_trivial=True)[:, None] - shift
    below *= gl.convert_layout(base, rows, assert_trivial=True)[:, None]
    below = gl.convert_layout(below, of_thread, assert_trivial=True)[:, None, :, None]
    factor = gl.convert_layout(base * unit, of_row, assert_trivial=True)[:, None]
    p = gl.exp2(gl.fma(quads, factor[:, None, :, None], -below))
    sums = gl.convert_layout(gl.sum(gl.sum(p, 1), 2), l_i.type.layout, assert_trivial=True)
    p = gl.convert_layout(gl.reshape(p, s.shape), s.type.layout, assert_trivial=True)
    alpha = gl.exp2((m_i - m_safe) * base)
    l_i = l_i * gl.convert_layout(alpha, rows, assert_trivial=True)[:, None] + sums
    return p, alpha, m_new, l_i


@gluon.jit
def base_of(m):
    """Return the factor that takes scores of rows with these maxima to base 2.

    With a maximum of HUGE, a score is equal or has p = 0, for every factor. With 1 the product is
    exact, while log2(e) would round it by as much as the exponents that p can have.
    """
    return gl.where(gl.abs(m) < HUGE, LOG2E, 1.0)


@gluon.jit
def rounding_of_maximum(m):
    """Return by how much m in base 2 is more than what `added_softmax_update` subtracted."""
    m_safe = gl.where(m == float("-inf"), 0.0, m)
    base = base_of(m_safe)
    return gl.fma(m_safe, base, -(m_safe * base))


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

    The seed is loaded for each tile: else the compiler draws between products, which then wait.
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
    return packed & gl.convert_layout(kept, packed.type.layout, assert_trivial=True)


@gluon.jit
def _pairs(words):
    return gl.split(gl.reshape(words, [words.shape[0], 8, words.shape[2], 4, 2]))

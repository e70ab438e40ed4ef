"""Terms of scores, and dropout, in the register layout of accumulators.

They give the numbers of `library.terms` and `library.dropout`. A thread has rows i and i + 8 of a
tile, and the same two columns in every eight: what follows from these is computed once, and differs
between eights by constants.

Scores, of LAYOUT, have queries down or, TRANSPOSED, keys. `own` is a `HeadTerms`; `offset` is from
a tile's first query to its first key; first_q and first_kv count in the sequence.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from torch_attn.kernels.explicit.tma import box_layout, load_box
from torch_attn.kernels.library.dropout import philox
from torch_attn.kernels.library.terms import Bias, round_steep
from torch_attn.tensor_maps import TensorMap

# Keeps $3 where the words $1 and $2 share a bit. In PTX, since LLVM would undo the bit operations.
KEEP = gl.constexpr(
    "{ .reg .pred kept; .reg .b32 bit; and.b32 bit, $1, $2; setp.ne.b32 kept, bit, 0; "
    "selp.f32 $0, $3, 0f00000000, kept; }"
)

# Widens two packed bfloat16 numbers. In PTX: Triton takes three instructions for them.
WIDEN = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")


class HeadTerms(NamedTuple):
    """The terms of a query head; 0 for what a problem lacks.

    Attributes:
        table: pointer to the table's entry for a distance of 0.
        first, last: the entries for distances of -R and less, and of R and more.
        bias: pointer to the value of query 0 and key 0.
        element, head, seed_low, seed_high: of dropout, uint32.
    """

    slope: Any
    table: Any
    first: Any
    last: Any
    bias: Any
    element: Any
    head: Any
    seed_low: Any
    seed_high: Any


class TileTerms(NamedTuple):
    """Hold what a tile's terms need, 0 without them: offset; results of `load_bias` and `draw`."""

    offset: Any
    bias: Any
    kept: Any


@gluon.jit
def head_terms(terms, element, head):
    """Return the `HeadTerms`; element: of the batch, or the packed sequence, even of padding."""
    slope, table, first, last, bias = 0.0, 0, 0.0, 0.0, 0
    counted, counted_head, seed_low, seed_high = 0, 0, 0, 0
    if terms.slopes is not None:
        place = element * terms.of_batch + head
        slope = gl.load(terms.slopes + place, mask=element < terms.count, other=0.0)
        slope = round_steep(slope)
    if terms.relative is not None:
        row = terms.relative + gl.cast(head, gl.int64) * (2 * terms.radius + 1)
        table = row + terms.radius
        first = gl.cast(gl.load(row), gl.float32)
        last = gl.cast(gl.load(table + terms.radius), gl.float32)
    if terms.bias.entries is not None:
        place = gl.cast(element, gl.int64) * terms.bias.batch
        place += gl.cast(head, gl.int64) * terms.bias.head
        bias = terms.bias.entries + gl.multiple_of(place, terms.bias.align)
    if terms.seed is not None:
        counted, counted_head = element.to(gl.uint32), head.to(gl.uint32)
        if terms.of_part:
            counted += gl.cast(gl.load(terms.seed + 2), gl.uint32, bitcast=True)
            counted_head += gl.cast(gl.load(terms.seed + 3), gl.uint32, bitcast=True)
        seed_low = gl.cast(gl.load(terms.seed), gl.uint32, bitcast=True)
        seed_high = gl.cast(gl.load(terms.seed + 1), gl.uint32, bitcast=True)
    return HeadTerms(slope, table, first, last, bias, counted, counted_head, seed_low, seed_high)


@gluon.jit
def prepare_tile(
    terms, own, first_q, first_kv, offset, seq_q, seq_kv, BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr, LAYOUT: gl.constexpr, TRANSPOSED: gl.constexpr = False,
):  # fmt: skip
    """Return the `TileTerms` of a backward, before the scores are awaited."""
    bias, kept = tile_terms(
        terms, own, first_q, first_q, first_kv, seq_q, seq_kv, BLOCK_Q, BLOCK_KV, LAYOUT, TRANSPOSED
    )
    return TileTerms(offset, bias, kept)


@triton.constexpr_function
def adds_terms(bias, relative, slopes):
    return bias is not None or relative is not None or slopes is not None


@gluon.jit
def table_sides(terms, offset, KEYS: gl.constexpr, QUERIES: gl.constexpr):
    """Return whether all pairs share a table's first entry, and whether all its last."""
    return offset + KEYS <= 1 - terms.radius, offset - QUERIES + 1 >= terms.radius


@gluon.jit
def add_terms(
    s, terms, own, rule, offset, bias, TRANSPOSED: gl.constexpr = False, FAR: gl.constexpr = False
):
    """Return scaled products q·k with the terms added, in the library's order.

    FAR: one of `table_sides` is known to be true.
    """
    SIGN: gl.constexpr = -1 if TRANSPOSED else 1
    KEYS: gl.constexpr = s.shape[0] if TRANSPOSED else s.shape[1]
    QUERIES: gl.constexpr = s.shape[1] if TRANSPOSED else s.shape[0]
    layout: gl.constexpr = s.type.layout
    shape: gl.constexpr = s.shape
    eights = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 8])
    eight, near = _distances(eights, offset, SIGN)
    if terms.slopes is not None:
        # On one side the penalty is linear: only a tile on both sides needs more.
        slope = own.slope
        if not terms.falling:
            slope = gl.where(offset >= QUERIES, -slope, slope)
        penalty = eight.to(gl.float32) * (slope * SIGN) + near.to(gl.float32) * slope
        eights = eights * rule.scale + penalty
        if not terms.falling:  # noqa: SIM102 (Triton evaluates both sides of an "and")
            if (offset < QUERIES) & (offset + KEYS > 0):
                after = gl.maximum(near + eight * SIGN, 0).to(gl.float32)
                eights -= after * (2.0 * slope)
    else:
        eights = eights * rule.scale
    if terms.relative is not None:
        # Most tiles are so far off that all distances share an entry.
        is_before, is_behind = table_sides(terms, offset, KEYS, QUERIES)
        if FAR:
            eights += gl.where(is_before, own.first, own.last)
        else:
            eights += gl.where(is_before, own.first, gl.where(is_behind, own.last, 0.0))
            if not (is_before | is_behind):
                place = gl.minimum(gl.maximum(near + eight * SIGN, -terms.radius), terms.radius)
                eights += gl.load(own.table + place).to(gl.float32)
    s = gl.convert_layout(gl.reshape(eights, shape), layout, assert_trivial=True)
    if terms.bias.entries is not None:
        s += bias.to(gl.float32)
    return s


@gluon.jit
def _distances(eights, offset, SIGN: gl.constexpr):
    """Return the first column of each eight, and the distances in the first eight of each row."""
    layout: gl.constexpr = eights.type.layout
    of_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    of_eight: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    of_column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    row = gl.arange(0, eights.shape[0], of_row)[:, None, None]
    eight = gl.arange(0, eights.shape[1], of_eight)[None, :, None] * 8
    column = gl.arange(0, 8, of_column)[None, None, :]
    return eight, offset + (column - row) * SIGN


@gluon.jit
def load_bias(
    terms, own, start_q, start_kv, seq_q, seq_kv, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr,
    LAYOUT: gl.constexpr, TRANSPOSED: gl.constexpr = False, WHOLE: gl.constexpr = False,
):  # fmt: skip
    """Load a tile of a bias for `add_terms`, with 1 in place of an axis that the bias lacks.

    Missing rows get the last one's value. WHOLE: all keys exist, and the first is a multiple of 16,
    so that loads are wide.
    """
    bias = 0
    if terms.bias.entries is not None:
        of_queries: gl.constexpr = gl.SliceLayout(0 if TRANSPOSED else 1, LAYOUT)
        of_keys: gl.constexpr = gl.SliceLayout(1 if TRANSPOSED else 0, LAYOUT)
        query, key = start_q + gl.arange(0, BLOCK_Q, of_queries), gl.arange(0, BLOCK_KV, of_keys)
        query = gl.minimum(query, seq_q - 1).to(gl.int64) * terms.bias.row
        if WHOLE:
            key += gl.multiple_of(start_kv, 16)
        else:
            key = gl.maximum(gl.minimum(start_kv + key, seq_kv - 1), 0)
        if not terms.bias.of_keys:
            bias = gl.load(own.bias + query)
            bias = bias[None, :] if TRANSPOSED else bias[:, None]
        elif not terms.bias.of_rows:
            bias = gl.load(own.bias + key)
            bias = bias[:, None] if TRANSPOSED else bias[None, :]
        elif TRANSPOSED:
            bias = gl.load(own.bias + (query[None, :] + key[:, None]))
        else:
            bias = gl.load(own.bias + (query[:, None] + key[None, :]))
    return bias


@gluon.jit
def store_bias(dbias, x, pairs, start_kv, seq_q, seq_kv):
    first = gl.cast(pairs.element, gl.int64) * dbias.batch
    first += gl.cast(pairs.head, gl.int64) * dbias.head
    query = pairs.first + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    key = start_kv + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    rows = query.to(gl.int64) * gl.multiple_of(gl.cast(dbias.row, gl.int64), dbias.align)
    tile = dbias.entries + gl.multiple_of(first, dbias.align) + rows[:, None] + key[None, :]
    x = x.to(dbias.entries.dtype.element_ty)
    # Without a mask a thread stores two values at once.
    if (pairs.first + x.shape[0] <= seq_q) & (start_kv + x.shape[1] <= seq_kv):
        gl.store(tile, x)
    else:
        gl.store(tile, x, mask=(query < seq_q)[:, None] & (key < seq_kv)[None, :])


@gluon.jit
def allocate_bias_boxes(boxes, COUNT: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr):
    layout: gl.constexpr = box_layout(BLOCK_KV, boxes.dtype.primitive_bitwidth)
    return gl.allocate_shared_memory(boxes.dtype, [COUNT, 1, 1, BLOCK_Q, BLOCK_KV], layout)


@triton.constexpr_function
def bias_box_bytes(boxes, rows, columns):
    return 0 if boxes is None else boxes.dtype.primitive_bitwidth // 8 * rows * columns


@gluon.jit
def load_bias_box(bias, buffer, slot, batch, head, start_q, start_kv, full):
    # An axis of 1 has a stride of 0.
    batch, head = gl.where(bias.batch == 0, 0, batch), gl.where(bias.head == 0, 0, head)
    load_box(bias.boxes, [batch, head, start_q, start_kv], full, buffer.index(slot))


@gluon.jit
def read_bias_box(tile, LAYOUT: gl.constexpr):
    """Read what `load_bias_box` loaded, before TMA writes there: named barriers await no loads."""
    bias = tile.load(LAYOUT)
    fence_async_shared()
    return bias


@gluon.jit
def widen(bias):
    if bias.dtype == gl.bfloat16 and bias.shape[1] > 1:
        bias = gl.inline_asm_elementwise(
            WIDEN, "=f,=f,r", [bias], dtype=gl.float32, is_pure=True, pack=2
        )
    return bias.to(gl.float32)


@gluon.jit
def draw(
    terms,
    own,
    first_q,
    first_kv,
    BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    LAYOUT: gl.constexpr,
    TRANSPOSED: gl.constexpr = False,
):
    """Draw which probabilities of a tile stay, as bits of words, for `drop`.

    A thread draws once for its eight pairs of a block; TRANSPOSED, for its four, as another warp
    has the others. first_q and first_kv are multiples of 16 and 32.
    """
    kept = 0
    if terms.seed is not None:
        words, row, column = draw_words(
            own.element, own.head, own.seed_low, own.seed_high, first_q, first_kv, BLOCK_Q,
            BLOCK_KV, LAYOUT, TRANSPOSED,
        )  # fmt: skip
        a, b, c, d = words
        # Where keys are rows, an even block of rows has the lower halves of all words.
        shift = 16
        if TRANSPOSED:
            shift = (1 - row % 2) * 16
        HALVES: gl.constexpr = 1 if TRANSPOSED else 2
        threshold = terms.dropout.threshold << 16
        bits = gl.inline_asm_elementwise(
            compare_words(HALVES), "=r,r,r,r,r,r,r", [a, b, c, d, threshold, shift],
            dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        kept = gl.sum(bits << column * (4 * HALVES), 2)
    return kept


@gluon.jit
def draw_words(
    element, head, seed_low, seed_high, first_q, first_kv, BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr, LAYOUT: gl.constexpr, TRANSPOSED: gl.constexpr = False,
):  # fmt: skip
    """Draw four words for each block of a tile, for the pairs that a thread has.

    Returns (words, row, column): [row blocks, 8, column blocks, 8], and the blocks' numbers.
    """
    ROWS: gl.constexpr = BLOCK_KV if TRANSPOSED else BLOCK_Q
    COLUMNS: gl.constexpr = BLOCK_Q if TRANSPOSED else BLOCK_KV
    like = _blocks(gl.zeros([ROWS, COLUMNS], gl.int32, LAYOUT), TRANSPOSED)
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(4, like.type.layout))
    row = gl.arange(0, ROWS // 16, axis_layout(layout, 4, 0))[:, None, None, None]
    of_row = gl.arange(0, 8, axis_layout(layout, 4, 1))[None, :, None, None]
    column = gl.arange(0, like.shape[3], axis_layout(layout, 4, 2))[None, None, :, None]
    of_column = gl.arange(0, 8, axis_layout(layout, 4, 3))[None, None, None, :]
    query, key = first_q // 16 * 8, first_kv // 32 * 8
    if TRANSPOSED:
        query, key = query + column * 8 + of_column, key + row // 2 * 8 + of_row
    else:
        query, key = query + row * 8 + of_row, key + column * 8 + of_column
    query, key = query.to(gl.uint32), key.to(gl.uint32)
    words = philox(element, head, query, key, seed_low, seed_high)
    return words, row, column


@gluon.jit
def tile_terms(
    terms, own, own_q, start_q, start_kv, seq_q, seq_kv, BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr, LAYOUT: gl.constexpr, TRANSPOSED: gl.constexpr = False,
):  # fmt: skip
    """Return the `TileTerms`, without a bias that TMA loads; own_q: as `first_q`."""
    bias = 0
    if terms.bias.boxes is None:
        bias = load_bias(
            terms, own, start_q, start_kv, seq_q, seq_kv, BLOCK_Q, BLOCK_KV, LAYOUT, TRANSPOSED
        )
    return bias, draw(terms, own, own_q, start_kv, BLOCK_Q, BLOCK_KV, LAYOUT, TRANSPOSED)


@gluon.jit
def drop(p, terms, kept, TRANSPOSED: gl.constexpr = False):
    """Set dropped elements of p or its gradient to 0, without scaling the others."""
    if terms.seed is not None:
        blocks = _blocks(p, TRANSPOSED)
        layout: gl.constexpr = blocks.type.layout
        half = gl.arange(0, 2, axis_layout(layout, 6, 1))[None, :, None, None, None, None]
        column = gl.arange(0, blocks.shape[3], axis_layout(layout, 6, 3))[
            None, None, None, :, None, None
        ]
        eight = gl.arange(0, blocks.shape[4], axis_layout(layout, 6, 4))[
            None, None, None, None, :, None
        ]
        if TRANSPOSED:
            place = column * 4 + eight * 2 + half
        else:
            place = column * 8 + eight // 2 * 4 + half * 2 + eight % 2
        kept = gl.expand_dims(gl.expand_dims(gl.expand_dims(kept, 2), 1), 4)
        blocks = gl.inline_asm_elementwise(
            KEEP, "=f,r,r,f", [kept, 1 << place, blocks], dtype=gl.float32, is_pure=True, pack=1
        )
        p = gl.convert_layout(gl.reshape(blocks, p.shape), p.type.layout, assert_trivial=True)
    return p


@gluon.jit
def drop_scaled(p, terms, tile, TRANSPOSED: gl.constexpr = False):
    if terms.seed is not None:
        p = drop(p, terms, tile.kept, TRANSPOSED) * terms.dropout.scale
    return p


@gluon.jit
def _blocks(x, TRANSPOSED: gl.constexpr):
    """Return a tile as [row blocks, 2, 8, column blocks, eights, 8]: 16 queries by 32 keys."""
    WIDTH: gl.constexpr = 16 if TRANSPOSED else 32
    return gl.reshape(x, [x.shape[0] // 16, 2, 8, x.shape[1] // WIDTH, WIDTH // 8, 8])


@triton.constexpr_function
def axis_layout(layout, rank, axis):
    for i in reversed(range(rank)):
        if i != axis:
            layout = gl.SliceLayout(i, layout)
    return layout


@triton.constexpr_function
def compare_words(halves):
    """Return the PTX that sets a bit for each word, up to $4, whose lower half is at least $5.

    It compares upper halves of words shifted left by $6; with two halves the bits of the upper ones
    follow.
    """
    code = ["{ .reg .pred kept; .reg .b32 half; mov.b32 $0, 0;"]
    for i in range(4):
        code.append(f"shl.b32 half, ${i + 1}, $6; setp.ge.u32 kept, half, $5;")
        code.append(f"@kept or.b32 $0, $0, {1 << i};")
        if halves == 2:
            code.append(f"setp.ge.u32 kept, ${i + 1}, $5; @kept or.b32 $0, $0, {16 << i};")
    return " ".join([*code, "}"])


def bias_boxes(bias: Bias, block_q: int, block_kv: int) -> TensorMap | None:
    """Return the descriptor of a bias of pairs if TMA can load its tiles; else None."""
    if bias.entries is None or 1 in bias.entries.shape[2:] or not bias.entries.is_aligned:
        return None
    shape, itemsize = bias.entries.shape, bias.entries.dtype.itemsize
    strides = bias.batch, bias.head, bias.row
    if bias.row == 0 or any(n * itemsize % 16 for n in (*strides, shape[3])):
        return None
    outer = (n if stride else 1 for n, stride in zip(shape[:2], strides, strict=False))
    layout = box_layout(block_kv, 8 * itemsize)
    return TensorMap.of_boxes(
        bias.entries.operand, (*outer, *shape[2:]), (*strides, 1), (1, 1, block_q, block_kv), layout
    )

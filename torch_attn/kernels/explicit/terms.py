"""Terms of scores, and dropout, in the layout that tensor cores leave their sums in.

They give the same numbers as `torch_attn.kernels.library.terms` and `library.dropout`. A thread has
rows i and i + 8 of a tile, and the same two columns in each eight. What follows from these is
computed once, and what the eights differ by is a constant of the code.

Each function takes scores with queries down and keys across, or, TRANSPOSED, keys down and queries
across.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_attn.kernels.explicit.tma import box_layout, load_box, piece
from torch_attn.kernels.library.dropout import philox
from torch_attn.kernels.library.terms import Bias
from torch_attn.tensor_maps import TensorMap


class HeadTerms(NamedTuple):
    """Hold the terms of a query head; 0 for what a problem does not have.

    Attributes:
        slope: of ALiBi.
        table: pointer to what the table has for a distance of 0.
        first, last: what the table has for distances of -R and less, and of R and more.
        bias: pointer to the value of query 0 and key 0.
        element, head: what dropout counts, as uint32.
        seed_low, seed_high: of dropout, as uint32.
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


@gluon.jit
def head_terms(terms, element, head):
    """Return the `HeadTerms` of a head.

    Args:
        terms: `torch_attn.kernels.library.terms.Terms`.
        element: of the batch, or the packed sequence, which may be that of padding.
        head: the query head.
    """
    slope, table, first, last, bias = 0.0, 0, 0.0, 0.0, 0
    counted, counted_head, seed_low, seed_high = 0, 0, 0, 0
    if terms.slopes is not None:
        place = element * terms.of_batch + head
        slope = gl.load(terms.slopes + place, mask=element < terms.count, other=0.0)
    if terms.relative is not None:
        row = terms.relative + gl.cast(head, gl.int64) * (2 * terms.radius + 1)
        table = row + terms.radius
        first = gl.cast(gl.load(row), gl.float32)
        last = gl.cast(gl.load(table + terms.radius), gl.float32)
    if terms.bias.entries is not None:
        bias = terms.bias.entries + gl.cast(element, gl.int64) * terms.bias.batch
        bias += gl.cast(head, gl.int64) * terms.bias.head
    if terms.seed is not None:
        counted, counted_head = element.to(gl.uint32), head.to(gl.uint32)
        seed_low = gl.cast(gl.load(terms.seed), gl.uint32, bitcast=True)
        seed_high = gl.cast(gl.load(terms.seed + 1), gl.uint32, bitcast=True)
    return HeadTerms(slope, table, first, last, bias, counted, counted_head, seed_low, seed_high)


@gluon.jit
def add_terms(s, terms, own, rule, offset, bias, TRANSPOSED: gl.constexpr = False):
    """Return products q·k, scaled, with the terms added: scores before the softcap.

    Args:
        s: the products.
        own: `HeadTerms`.
        rule: `twin_attention.contract.spec.ScoreRule`.
        offset: distance of the tile's first key from its first query.
        bias: the tile's, in any dtype and with 1 in place of any axis; not read without one.
    """
    SIGN: gl.constexpr = -1 if TRANSPOSED else 1
    KEYS: gl.constexpr = s.shape[0] if TRANSPOSED else s.shape[1]
    QUERIES: gl.constexpr = s.shape[1] if TRANSPOSED else s.shape[0]
    layout: gl.constexpr = s.type.layout
    shape: gl.constexpr = s.shape
    eights = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 8]) * rule.scale
    eight, near = _distances(eights, offset, SIGN)
    if terms.slopes is not None:
        # Towards one side a distance has one sign, and the penalty is linear: only a tile that
        # has both sides needs more.
        slope = own.slope
        if not terms.falling:
            slope = gl.where(offset >= QUERIES, -slope, slope)
        eights += eight.to(gl.float32) * (slope * SIGN) + near.to(gl.float32) * slope
        if not terms.falling:  # noqa: SIM102 (Triton evaluates both sides of an "and")
            if (offset < QUERIES) & (offset + KEYS > 0):
                after = gl.maximum(near + eight * SIGN, 0).to(gl.float32)
                eights -= after * (2.0 * slope)
    if terms.relative is not None:
        # Most tiles are so far off that all of their distances share an entry.
        is_before = offset + KEYS <= 1 - terms.radius
        is_behind = offset - QUERIES + 1 >= terms.radius
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
    terms,
    own,
    start_q,
    start_kv,
    seq_q,
    seq_kv,
    BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    LAYOUT: gl.constexpr,
    TRANSPOSED: gl.constexpr = False,
):
    """Load a tile of a bias, for `add_terms`, with 1 in place of an axis that the bias lacks.

    Queries and keys that do not exist have the last one's.

    Args:
        LAYOUT: of the scores.
    """
    bias = 0
    if terms.bias.entries is not None:
        of_queries: gl.constexpr = gl.SliceLayout(0 if TRANSPOSED else 1, LAYOUT)
        of_keys: gl.constexpr = gl.SliceLayout(1 if TRANSPOSED else 0, LAYOUT)
        query, key = start_q + gl.arange(0, BLOCK_Q, of_queries), gl.arange(0, BLOCK_KV, of_keys)
        query = gl.minimum(query, seq_q - 1).to(gl.int64) * terms.bias.row
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
def allocate_bias_boxes(boxes, COUNT: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr):
    """Allocate COUNT tiles of a bias of pairs."""
    layout: gl.constexpr = box_layout(BLOCK_KV, boxes.dtype.primitive_bitwidth)
    return gl.allocate_shared_memory(boxes.dtype, [COUNT, 1, 1, BLOCK_Q, BLOCK_KV], layout)


@gluon.jit
def load_bias_box(bias, buffer, slot, batch, head, start_q, start_kv, full, MORE: gl.constexpr):
    """Load a tile of a bias of pairs; `full` expects its bytes and MORE, which the caller loads."""
    BYTES: gl.constexpr = buffer.dtype.primitive_bitwidth // 8 * buffer.shape[3] * buffer.shape[4]
    mbarrier.expect(full, BYTES + MORE)
    # An axis of 1 has a stride of 0.
    batch, head = gl.where(bias.batch == 0, 0, batch), gl.where(bias.head == 0, 0, head)
    load_box(bias.boxes, [batch, head, start_q, start_kv], full, buffer.index(slot))


@gluon.jit
def read_bias_box(buffer, slot, PART: gl.constexpr, LAYOUT: gl.constexpr):
    """Read 64 rows of a tile that `load_bias_box` loaded, for `add_terms`."""
    return piece(buffer, slot).slice(64 * PART, 64, dim=0).load(LAYOUT)


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
    """Draw what decides which probabilities of a tile are dropped, for `drop`: four words a block.

    A thread draws once for the eight pairs of a block that it has; TRANSPOSED for four, since the
    others are another warp's. Needs no score, so that products may run meanwhile.

    Args:
        first_q, first_kv: the tile's first query and key, counted from the sequence's first;
            multiples of 16 and of 32.
        LAYOUT: of the scores.
    """
    words = (0, 0, 0, 0)
    if terms.seed is not None:
        block_q, block_kv = first_q // 16 * 8, first_kv // 32 * 8
        if TRANSPOSED:
            like = gl.zeros([BLOCK_KV, BLOCK_Q], gl.int32, LAYOUT)
            like = gl.reshape(like, [BLOCK_KV // 16, 2, 8, BLOCK_Q // 16, 2, 8])
        else:
            like = gl.zeros([BLOCK_Q, BLOCK_KV], gl.int32, LAYOUT)
            like = gl.reshape(like, [BLOCK_Q // 16, 2, 8, BLOCK_KV // 32, 4, 8])
        layout: gl.constexpr = like.type.layout
        block, of_block, other, of_other = _blocks(layout, like.shape[0], like.shape[3])
        if TRANSPOSED:
            key, query = block_kv + block // 2 * 8 + of_block, block_q + other * 8 + of_other
        else:
            query, key = block_q + block * 8 + of_block, block_kv + other * 8 + of_other
        words = philox(
            own.element, own.head, query.to(gl.uint32), key.to(gl.uint32), own.seed_low,
            own.seed_high,
        )  # fmt: skip
        if TRANSPOSED:
            # The upper half of what is compared counts.
            shift = ((1 - block % 2) * 16).to(gl.uint32)
            words = words[0] << shift, words[1] << shift, words[2] << shift, words[3] << shift
    return words


@gluon.jit
def tile_terms(
    terms,
    own,
    own_q,
    start_q,
    start_kv,
    seq_q,
    seq_kv,
    BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Return what `load_bias` and `draw` do, for a tile with queries down; 0 for a bias by TMA.

    Args:
        own_q: the tile's first query, counted from the sequence's first; keys are counted so.
    """
    bias = 0
    if terms.bias.boxes is None:
        bias = load_bias(terms, own, start_q, start_kv, seq_q, seq_kv, BLOCK_Q, BLOCK_KV, LAYOUT)
    return bias, draw(terms, own, own_q, start_kv, BLOCK_Q, BLOCK_KV, LAYOUT)


@gluon.jit
def _blocks(LAYOUT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return which block of rows and of columns, and which row and column in eight, are a thread's.

    LAYOUT is that of [ROWS, ., 8, COLUMNS, ., 8].
    """
    blocks: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(4, LAYOUT))
    of_0: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, blocks)))
    of_1: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, blocks)))
    of_2: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, blocks)))
    of_3: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, blocks)))
    return (
        gl.arange(0, ROWS, of_0)[:, None, None, None],
        gl.arange(0, 8, of_1)[None, :, None, None],
        gl.arange(0, COLUMNS, of_2)[None, None, :, None],
        gl.arange(0, 8, of_3)[None, None, None, :],
    )


@gluon.jit
def drop(p, terms, words, TRANSPOSED: gl.constexpr = False):
    """Set what is dropped to 0; `terms.dropout.scale` times the rest is left to the caller.

    Args:
        p: probabilities, or their gradients.
        words: what `draw` returned.
    """
    if terms.seed is not None:
        bits = gl.join(gl.join(words[0], words[1]), gl.join(words[2], words[3]))
        if TRANSPOSED:
            bits = gl.permute(bits, (0, 4, 1, 2, 5, 3))
        else:
            bits = gl.permute(gl.join(bits << 16, bits), (0, 5, 1, 2, 6, 4, 3))
        bits = gl.convert_layout(gl.reshape(bits, p.shape), p.type.layout, assert_trivial=True)
        threshold = gl.cast(terms.dropout.threshold, gl.uint32) << 16
        p = gl.where(bits >= threshold, p, 0.0)
    return p


def bias_boxes(bias: Bias, block_q: int, block_kv: int) -> TensorMap | None:
    """Return the descriptor of a bias of pairs whose tiles TMA can load; None for any other.

    Args:
        bias: as its layout, with its strides.
    """
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

"""Packed sequences: programs take tiles from a counter in global memory, so that they end together.

Lengths are data on the device, so the host cannot deal them out. A program's producer takes an
item, finds the sequence of its tile, and hands its place to the other warps.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.addresses import pointer_at
from pallas_attn.kernels.explicit.programs import for_each_tile
from pallas_attn.kernels.explicit.registers import NUMBER
from pallas_attn.kernels.explicit.sequences import locate_tile
from pallas_attn.kernels.library.sequences import count_sequence_tiles
from pallas_attn.private import arith, ir, llvm, mgpu, mgpu_utils

# At most this many heads of packed sequences share the L2 cache at a time.
PACKED_HEADS = 8


class Items(NamedTuple):
    """The tiles of one axis of packed sequences; last_first: a sequence's last is its longest."""

    cu_seqlens_ref: Any
    cu_seqlens_other_ref: Any
    num_rows: int
    num_rows_other: int
    heads: int
    block: int
    last_first: bool


class Place(NamedTuple):
    """The head (-1 when no item is left) and the tile of a work item, and its `TileRows`."""

    head: Any
    tile: Any
    start: Any
    end: Any
    first_other: Any
    size_other: Any
    sequence: Any


class Queue(NamedTuple):
    """The tiles of a program: of its schedule, or from the counter for packed sequences."""

    program: Any
    schedule: Any
    counter: Any
    items: Items
    hand_over: Any

    def give(self, body):
        """Call body(item, steps before, turn) for each tile, in the producer; return all steps.

        body returns its steps plus those before. turn: how many tiles the program has had.
        """
        return self._for_each(self._hand_over, body)

    def give_ahead(self, body):
        """Call body as `give` does, with take_next, to call once to take the next tile."""

        def take_next(turn):
            if self.schedule is None:
                self._hand_over(turn)

        def visit(item, step, turn):
            return body(item, step, turn, lambda: take_next(turn + 1))

        take_next(jnp.int32(0))
        return self._for_each(lambda turn: own_item(self.hand_over, turn, reads=False), visit)

    def take(self, body):
        """Call body in the other warps."""
        return self._for_each(lambda turn: own_item(self.hand_over, turn), body)

    def _for_each(self, place_of_turn, body):
        if self.schedule is None:
            return for_each_place(place_of_turn, body)
        return for_each_tile(self.schedule, self.program, body)

    def _hand_over(self, turn):
        return hand_over_item(next_item(self.counter, self.items), self.hand_over, turn)


class HandOver(NamedTuple):
    places: Any
    written: Any
    read: Any

    def free(self):
        """Say for one reader that it has read all slots, before its first item."""
        for slot in range(self.places.shape[0]):
            plgpu.barrier_arrive(self.read.at[slot])


def item_counter() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1,), jnp.int32)


def allocate_hand_over(readers: int, slots: int = 1) -> HandOver:
    """Return the shared memory that hands over places; with two slots one item ahead."""
    return HandOver(
        plgpu.SMEM((slots, len(Place._fields)), jnp.int32),
        plgpu.Barrier(num_barriers=slots),
        plgpu.Barrier(num_arrivals=readers, num_barriers=slots),
    )


def next_item(counter_ref, items: Items) -> Place:
    return lax.while_loop(
        lambda place: (place.head >= 0) & (place.start == place.end),
        lambda _: take_place(counter_ref, items),
        take_place(counter_ref, items),
    )


def hand_over_item(place: Place, hand_over: HandOver, turn: Any) -> Place:
    slot = turn % hand_over.places.shape[0]
    plgpu.barrier_wait(hand_over.read.at[slot])
    for i, x in enumerate(place):
        hand_over.places[slot, i] = x
    plgpu.barrier_arrive(hand_over.written.at[slot])
    return place


def own_item(hand_over: HandOver, turn: Any, reads: bool = True) -> Place:
    """Return the place that `hand_over_item` gave in a turn; reads: the caller is a reader."""
    slot = turn % hand_over.places.shape[0]
    plgpu.barrier_wait(hand_over.written.at[slot])
    place = Place(*(hand_over.places[slot, i] for i in range(len(Place._fields))))
    if reads:
        plgpu.barrier_arrive(hand_over.read.at[slot])
    return place


def for_each_place(place_of_turn, body):
    """Call body as `Queue.give` does, for the places that place_of_turn returns."""

    def visit(carry):
        place, step, turn = carry
        step = body(place, step, turn)
        return place_of_turn(turn + 1), step, turn + 1

    first = jnp.int32(0)
    carry = place_of_turn(first), first, first
    return lax.while_loop(lambda carry: carry[0].head >= 0, visit, carry)[1]


def take_place(counter_ref, items):
    """Take the next item, and return its place; its tile may have no rows."""
    offsets = items.cu_seqlens_ref, items.cu_seqlens_other_ref
    num_sequences = items.cu_seqlens_ref.shape[0] - 1
    num_tiles = count_sequence_tiles(items.num_rows, num_sequences, items.block)
    item = take_item(counter_ref)
    # If no item is left, the rows are those of the last item.
    exists = item < num_tiles * items.heads
    item = jnp.minimum(item, num_tiles * items.heads - 1)
    head, tile = head_and_tile(item, items.heads, num_tiles)
    if items.last_first:
        tile = num_tiles - 1 - tile
    sequence, _first, *rows = locate_tile(
        *offsets, tile, items.num_rows, items.num_rows_other, items.block
    )
    return Place(jnp.where(exists, head, -1), tile, *rows, sequence)


# Can go when plgpu has atomic operations.
@plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=NUMBER)
def take_item(_, counter):
    """Return how many items all programs took before this one; runs in one warp."""
    i32 = ir.IntegerType.get_signless(32)
    lane = arith.remui(mgpu_utils.thread_idx(), mgpu.c(32, i32))
    text = (
        "{ .reg .pred p; .reg .b32 x; mov.b32 x, 0; setp.eq.s32 p, $2, 0; "
        "@p atom.relaxed.gpu.global.add.s32 x, [$1], 1; "
        "shfl.sync.idx.b32 $0, x, 0, 31, -1; }"
    )
    item = llvm.inline_asm(
        i32,
        [pointer_at(counter, [(0, mgpu.c(0, i32))]), lane],
        text,
        "=r,l,r",
        has_side_effects=True,
    )
    return mgpu.FragmentedArray.splat(item, (), is_signed=True)


def head_and_tile(item: Any, heads: int, num_tiles: int) -> tuple[Any, Any]:
    """Return an item's head, and its tile; of PACKED_HEADS heads the first tiles come first."""
    together = -(-heads // -(-heads // PACKED_HEADS))
    first = item // (together * num_tiles) * together
    rest = item - first * num_tiles
    sharing = jnp.minimum(together, heads - first) if heads % together else together
    return first + rest % sharing, rest // sharing

"""The tensors of a case, made once, in torch, for both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from random import Random
from zlib import crc32

import torch

from twin_attention.contract.operands import CONSTANTS, DIFFERENTIABLE
from twin_attention.contract.paged_spec import PagedCache
from twin_attention.contract.reference.cache import quantize
from twin_attention.contract.tree import tree_of
from twin_attention.contract.validate.errors import fail
from twin_attention.interop.parity.cases import (
    AppendCase,
    BlockSparseCase,
    Case,
    ContextCase,
    DecodeCase,
    FlashCase,
    MergeCase,
    PagedCase,
    VarlenCase,
)
from twin_attention.interop.parity.ranges import KINDS, make_ranges
from twin_attention.interop.parity.trees import make_tree

Tensors = dict[str, torch.Tensor]
Normal = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]

GRADIENTS, POOLS = ("dout", "dlse"), ("k_pages", "v_pages")
# Tangents of operands, by their names.
TANGENTS = {f"t{name}": name for name in DIFFERENTIABLE}
# Ids of no page, on either side of the pool's.
NO_PAGES = (-1, 2**31 - 1)
# As a byte: NaN in float8_e4m3fn, the largest number in int8.
POISON_BYTE = 0x7F
# The smallest scale of a quantised cache: its largest number is 3 standard deviations.
SMALLEST_SCALE = {"int8": 3.0 / 127, "float8_e4m3fn": 3.0 / 448}


def make_inputs(case: Case, device: str) -> Tensors:
    """Make the arguments of a case's call and its output gradients, seeded by its name.

    Tensors are normally distributed. What a call must not read is NaN or an id of no page: padding,
    unused pages, slots and table entries, parts that saw no key; not in an append's pools, which
    are compared whole. A context case has its documents as segment ids, for the oracle; a
    block-sparse case a mask of booleans.

    Raises:
        ValueError: a "strided" case whose q, k and v do not fit one packed tensor.
    """
    generator = torch.Generator(device).manual_seed(crc32(case.name.encode()))

    def normal(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    if isinstance(case, DecodeCase | AppendCase):
        num_pages = case.spec.cache.num_pages
        order = torch.randperm(num_pages, generator=generator, device=device)
        if isinstance(case, AppendCase):
            return _append_inputs(case, normal, order)
        return _decode_inputs(case, normal, order)
    if isinstance(case, MergeCase):
        return _merge_inputs(case, normal)
    if isinstance(case, VarlenCase):
        inputs = _varlen_inputs(case, normal, device)
    else:
        inputs = _flash_inputs(case, normal)
    of = TANGENTS.items() if case.tangents else ()
    # Where an operand is NaN, its tangent is too.
    tangents = {
        t: normal(inputs[x].shape, inputs[x].dtype) + 0 * inputs[x] for t, x in of if x in inputs
    }
    return inputs | tangents


def operands_alone(inputs: Tensors) -> Tensors:
    return {name: x for name, x in inputs.items() if name not in (*GRADIENTS, *TANGENTS)}


def has_gradient(name: str, x: torch.Tensor) -> bool:
    return x.is_floating_point() and name not in CONSTANTS


def _flash_inputs(case: FlashCase, normal: Normal) -> Tensors:
    dtype = getattr(torch, case.dtype)
    spec = case.spec
    if case.layout == "strided":
        if spec.seq_q != spec.seq_kv or spec.head_dim != spec.head_dim_v:
            fail(ValueError, "layout", "Sq == Skv and D == Dv for 'strided'", case.shapes)
        heads = (spec.heads_q, spec.heads_kv, spec.heads_kv)
        packed = normal((spec.batch, spec.seq_q, sum(heads), spec.head_dim), dtype)
        q, k, v = packed.split(heads, dim=2)
    else:
        q, k, v = (normal(shape, dtype) for shape in case.shapes)
    inputs = {"q": q, "k": k, "v": v}
    if case.sinks:
        inputs["sinks"] = normal((spec.heads_q,), torch.float32)
    inputs |= _terms(case, normal, spec.batch)
    if isinstance(case, BlockSparseCase):
        inputs["block_mask"] = _block_mask(case, inputs["q"].device)
    if case.segments:
        inputs["q_segment_ids"] = _segment_ids(case, normal, spec.seq_q)
        inputs["kv_segment_ids"] = _segment_ids(case, normal, spec.seq_kv)
    if isinstance(case, ContextCase) and case.documents:
        ids = torch.from_numpy(case.plan.document_ids).to(q.device).expand(case.batch, -1)
        inputs |= dict.fromkeys(("q_segment_ids", "kv_segment_ids"), ids.contiguous())
    if case.tree:
        packed = _trees(case, [(spec.seq_q, spec.seq_kv)] * spec.batch, q.device)
        sizes = {"q_depths": spec.seq_q}
        inputs |= {
            name: x.view(spec.batch, sizes.get(name, spec.seq_kv)) for name, x in packed.items()
        }
    if case.ranges:
        lengths = [(spec.seq_q, spec.seq_kv)] * spec.batch
        ranges = _ranges(case, lengths).to(q.device)
        inputs["q_ranges"] = ranges.view(spec.batch, spec.seq_q, *ranges.shape[1:])
    if case.gradients:
        inputs["dout"] = normal((spec.batch, spec.seq_q, spec.heads_q, spec.head_dim_v), dtype)
        inputs["dlse"] = normal((spec.batch, spec.heads_q, spec.seq_q), torch.float32)
    for name, of in (("q", "q"), ("k", "kv"), ("v", "kv"), ("dout", "q")):
        if case.segments and name in inputs:
            inputs[name][inputs[f"{of}_segment_ids"] < 0] = torch.nan
    return inputs


def _terms(case: FlashCase | VarlenCase, normal: Normal, batch: int) -> Tensors:
    """Make the terms of the scores, and a seed; slopes are not negative."""
    inputs: Tensors = {}
    if isinstance(case, FlashCase) and case.bias is not None:
        dtype = getattr(torch, case.dtype) if case.terms_in_q_dtype else torch.float32
        inputs["bias"] = normal(bias_shape(case), dtype)
    if case.relative is not None:
        dtype = getattr(torch, case.dtype) if case.terms_in_q_dtype else torch.float32
        inputs["relative_bias"] = normal((case.heads_q, 2 * case.relative + 1), dtype)
    if case.alibi:
        inputs["alibi_slopes"] = _slopes(case, batch, normal)
    if case.dropout_rate:
        inputs["dropout_seed"] = (1e9 * normal((2,), torch.float32)).int()
    return inputs


def bias_shape(case: FlashCase) -> tuple[int, ...]:
    axes = zip("bhqk", (case.batch, case.heads_q, case.seq_q, case.seq_kv), strict=True)
    return tuple(size if name in (case.bias or "") else 1 for name, size in axes)


def _segment_ids(case: FlashCase, normal: Normal, size: int) -> torch.Tensor:
    if case.segments == "shuffled":
        return (2 * normal((case.batch, size), torch.float32).abs()).int() - 1
    number = torch.linspace(0, 4.5, size, device=normal((1,), torch.float32).device).int()
    return torch.where(number < 4, number, -1).int().expand(case.batch, size).contiguous()


def _trees(
    case: FlashCase | VarlenCase, lengths: Sequence[tuple[int, int]], device: torch.device | str
) -> Tensors:
    random = Random(case.name)
    trees = [make_tree(case.tree, *pair, random) for pair in lengths]
    names = ("kv_ends", "q_depths", "kv_depths") if case.depths else ("kv_ends",)
    nothing = torch.empty(0, dtype=torch.int32)
    return {name: torch.cat([nothing, *(x[name] for x in trees)]).to(device) for name in names}


def _ranges(
    case: FlashCase | VarlenCase | PagedCase, lengths: Sequence[tuple[int, int]]
) -> torch.Tensor:
    random = Random(case.name)
    nothing = torch.empty((0, KINDS[case.ranges], 2), dtype=torch.int32)
    return torch.cat([nothing, *(make_ranges(case.ranges, *pair, random) for pair in lengths)])


def _block_mask(case: BlockSparseCase, device: torch.device) -> torch.Tensor:
    """Make the mask of a block-sparse case, the same on every device."""
    generator = torch.Generator().manual_seed(crc32(case.name.encode()))
    return (torch.rand(case.mask_shape, generator=generator) < case.kept).to(device)


def _varlen_inputs(case: VarlenCase, normal: Normal, device: str) -> Tensors:
    spec, dtype = case.spec, getattr(torch, case.dtype)
    queries, keys = (
        torch.tensor([0, *accumulate(pair[side] for pair in case.lengths)], dtype=torch.int32)
        for side in (0, 1)
    )
    inputs = {
        "q": normal((spec.seq_q, spec.heads_q, spec.head_dim), dtype),
        "k": normal((spec.seq_kv, spec.heads_kv, spec.head_dim), dtype),
        "v": normal((spec.seq_kv, spec.heads_kv, spec.head_dim_v), dtype),
        "cu_seqlens_q": queries.to(device),
        "cu_seqlens_kv": keys.to(device),
    }
    if case.sinks:
        inputs["sinks"] = normal((spec.heads_q,), torch.float32)
    inputs |= _terms(case, normal, spec.num_sequences)
    if case.tree:
        inputs |= _trees(case, (*case.lengths, case.padding), device)
    if case.ranges:
        inputs["q_ranges"] = _ranges(case, (*case.lengths, case.padding)).to(device)
    inputs["dout"] = normal((spec.seq_q, spec.heads_q, spec.head_dim_v), dtype)
    inputs["dlse"] = normal((spec.heads_q, spec.seq_q), torch.float32)
    for name, offsets in (("q", queries), ("k", keys), ("v", keys), ("dout", queries)):
        inputs[name][int(offsets[-1]) :] = torch.nan
    return inputs


def _merge_inputs(case: MergeCase, normal: Normal) -> Tensors:
    spec, dtype = case.spec, getattr(torch, case.dtype)
    rows = (spec.batch, spec.tokens, spec.heads)
    outs = normal((spec.num_states, *rows, spec.head_dim_v), dtype)
    lses = 3 * normal((spec.num_states, *rows), torch.float32)
    nothing = normal(lses.shape, torch.float32) < -0.84  # one in five
    nothing[:, :1, :1, :1] = True
    outs[nothing] = torch.nan
    dlse = normal((spec.batch, spec.heads, spec.tokens), torch.float32)
    return {
        "outs": outs,
        "lses": lses.masked_fill_(nothing, -torch.inf).mT.contiguous(),
        "dout": normal((*rows, spec.head_dim_v), dtype),
        "dlse": dlse,
    }


def _slopes(case: FlashCase | VarlenCase | DecodeCase, batch: int, normal: Normal) -> torch.Tensor:
    shape = (batch, case.heads_q) if case.alibi == "all" else (case.heads_q,)
    return 0.2 * normal(shape, torch.float32).abs()


def _decode_inputs(case: DecodeCase, normal: Normal, order: torch.Tensor) -> Tensors:
    spec, cache = case.spec, case.spec.cache
    dtype, device = getattr(torch, case.dtype), order.device
    inputs = {"q": normal((*_rows(case), spec.heads_q, spec.head_dim), dtype)}

    inputs |= _pools(case, normal)
    pages = order[: spec.batch * cache.max_pages].view(spec.batch, cache.max_pages)
    _share_pages(case, pages)
    tables, exists = _tables(case, pages)
    times = torch.zeros(cache.num_pages, cache.page_size, dtype=torch.int32, device=device)
    used = times.index_add_(0, pages.flatten(), exists.flatten(0, 1).int()) > 0
    for name in {"k_pages", "v_pages"} & inputs.keys():
        _poison(inputs[name], ~used)
    inputs |= tables
    if isinstance(case, PagedCase):
        offsets = torch.tensor([0, *accumulate(case.new_tokens)], dtype=torch.int32)
        inputs["cu_seqlens_q"] = offsets.to(device)
        inputs["q"][int(offsets[-1]) :] = torch.nan
        if case.ranges:
            lengths = [*zip(case.new_tokens, case.lengths, strict=True), (case.padding, 0)]
            inputs["q_ranges"] = _ranges(case, lengths).to(device)
    if case.sinks:
        inputs["sinks"] = normal((spec.heads_q,), torch.float32)
    if case.tree:
        inputs["tree_ends"] = _tree_ends(case).to(device)
    if case.alibi:
        inputs["alibi_slopes"] = _slopes(case, spec.batch, normal)
    return inputs


def _tree_ends(case: DecodeCase) -> torch.Tensor:
    """Make the ends of a tree of each sequence's new tokens; padding has any."""
    random, spec = Random(case.name), case.spec
    is_packed = isinstance(case, PagedCase)
    ends: list[int] = []
    for count in (*case.new_tokens, case.padding) if is_packed else (spec.tokens,) * spec.batch:
        if case.tree == "drafts":
            ends += tree_of(_random_parents(random, count)).ends.tolist()
        else:
            wrong = -(2**31), -1, count + 2, 2**31 - 1
            ends += random.choices((*wrong, *range(count + 1)), k=count)
    found = torch.tensor(ends, dtype=torch.int32)
    return found if is_packed else found.view(spec.batch, spec.tokens)


def _random_parents(random: Random, count: int) -> list[int]:
    """Return depth-first parents: each is on the path to the token before."""
    path: list[int] = []
    parents = []
    for token in range(count):
        if random.random() < 0.4:
            del path[random.randint(0, len(path)) :]
        parents.append(path[-1] if path else -1)
        path.append(token)
    return parents


def _append_inputs(case: AppendCase, normal: Normal, order: torch.Tensor) -> Tensors:
    spec, dtype = case.spec, getattr(torch, case.dtype)
    rows = (spec.tokens,) if spec.packed else (spec.batch, spec.tokens)
    inputs = {
        f"{x}_new": normal((*rows, spec.cache.heads, size), dtype)
        for x, size in _columns(spec.cache).items()
    }
    if case.heads_q:
        inputs["q"] = normal((*rows, case.heads_q, spec.head_dim), dtype)
    if case.new_tokens is not None:
        offsets = torch.tensor([0, *accumulate(case.new_tokens)], dtype=torch.int32)
        for x in inputs.values():
            x[int(offsets[-1]) :] = torch.nan
        inputs["cu_seqlens_q"] = offsets.to(order.device)
    if case.rotary_dim:
        angles = 3 * normal((case.positions, case.rotary_dim // 2), torch.float32)
        inputs |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    pages = order[: spec.batch * spec.cache.max_pages].view(spec.batch, spec.cache.max_pages)
    return inputs | _pools(case, normal) | _tables(case, pages)[0]


def _pools(case: DecodeCase | AppendCase, normal: Normal) -> Tensors:
    cache, pools = case.spec.cache, {}
    for x, head_dim in _columns(cache).items():
        shape = (cache.num_pages, cache.page_size, cache.heads, head_dim)
        pool = normal(shape, getattr(torch, case.dtype))
        if cache.is_quantized:
            factor = 1 + torch.sigmoid(normal(case.scale_shape, torch.float32))
            scale = pools[f"{x}_scale"] = factor * SMALLEST_SCALE[cache.dtype]
            pool = quantize(pool, scale, cache, getattr(torch, cache.dtype))
        pools[f"{x}_pages"] = pool
    return pools


def _columns(cache: PagedCache) -> dict[str, int]:
    return {"k": cache.head_dim} | ({} if cache.latent else {"v": cache.head_dim_v})


def _share_pages(case: DecodeCase, pages: torch.Tensor) -> None:
    """Let sequences share the first pages of one of three groups, in `pages`."""
    random, firsts = Random(case.name), {}
    for sequence in range(len(pages) if case.common_pages else 0):
        first = firsts.setdefault(random.randrange(3), sequence)
        count = random.choice((case.common_pages, random.randint(0, case.common_pages)))
        pages[sequence, :count] = pages[first, :count]


def _tables(case: DecodeCase | AppendCase, pages: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    cache, device = case.spec.cache, pages.device
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    key = torch.arange(cache.capacity, device=device).view(cache.max_pages, cache.page_size)
    exists = key < lengths[:, None, None]  # [B, max_pages, page_size]
    no_pages = torch.tensor(NO_PAGES, device=device)[torch.arange(cache.max_pages) % 2]
    tables = torch.where(exists[:, :, 0], pages, no_pages).int()
    return {"block_tables": tables, "seq_lens": lengths}, exists


def _rows(case: DecodeCase) -> tuple[int, ...]:
    if isinstance(case, PagedCase):
        return (case.spec.tokens,)
    return (case.spec.batch,) if case.tokens is None else (case.spec.batch, case.tokens)


def _poison(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Spoil the `slots` [P, page_size] of a pool in place."""
    if pool.itemsize == 1:
        pool.view(torch.uint8).masked_fill_(slots[:, :, None, None], POISON_BYTE)
    else:
        pool.masked_fill_(slots[:, :, None, None], float("nan"))
    return pool

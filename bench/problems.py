"""Jobs of the problems that suites time: their tensors, costs and checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from bench.dilation import dilated_check, dilated_flops
from bench.job import Call, Check, Entry, Job, Operation
from bench.ranges import RangeCase
from bench.trees import TreeCase
from twin_attention.contract import cost
from twin_attention.contract.block_mask import BlockMask, global_tiles, local_tiles, random_tiles
from twin_attention.contract.operands import CONSTANTS
from twin_attention.interop.parity.cases import (
    BlockSparseCase,
    DecodeCase,
    DilatedCase,
    FlashCase,
    PagedCase,
    VarlenCase,
)
from twin_attention.interop.parity.subjects.absent import Absent

if TYPE_CHECKING:
    from torch import Tensor

NO_PAGE = -1
SEED = 0  # of random masks
BAND, GLOBAL = 8, 1  # tiles that a tile of queries sees up to its own, and tiles that all see

AttentionCase = FlashCase | VarlenCase
# Returns an implementation's call from the case, the operation and q, k, v and dout.
Factory = Callable[[Any, str, "list[Tensor]"], Call]
Factories = Mapping[Entry, Factory]
DecodeFactory = Callable[[Any, "DecodeTensors"], Call]
DecodeFactories = dict[Entry, DecodeFactory]


@dataclass(frozen=True)
class SparseCase(BlockSparseCase):
    """One call of `block_sparse_attention` with a mask of a pattern.

    pattern: "random" for about `kept` of the tiles and the diagonal's, without a causal mask;
        "local" for a causal band and global tiles.
    """

    pattern: str = "random"

    @cached_property
    def mask(self) -> BlockMask[np.ndarray]:
        return BlockMask.of(self.tiles)

    @property
    def tiles(self) -> np.ndarray:
        """[tiles_q, tiles_kv] bool."""
        *_, q, kv = self.mask_shape
        if self.pattern == "local":
            return local_tiles(q, kv, left=BAND - 1, right=0) | global_tiles(q, kv, GLOBAL)
        others = max(0, round(self.kept * kv) - 1)
        return local_tiles(q, kv, left=0, right=0) | random_tiles(q, kv, others, SEED)


def document_lengths(case: VarlenCase) -> list[int]:
    return [queries for queries, _ in case.lengths]


def offsets_of(case: VarlenCase, device: Any) -> Tensor:
    import torch

    offsets = [0, *accumulate(document_lengths(case))]
    return torch.tensor(offsets, dtype=torch.int32, device=device)


def attention_jobs(
    cases: Iterable[AttentionCase],
    operations: Sequence[Operation],
    factories: Callable[[Any], Factories],
    heads: int | None = None,
) -> list[Job]:
    return [attention_job(c, name, factories(c), heads) for c in cases for name in operations]


def attention_job(
    case: AttentionCase, operation: Operation, factories: Factories, heads: int | None = None
) -> Job:
    """heads: how many to check; None is `sample_check`'s default."""
    flops = _flops(case)
    traffic = cost.forward_bytes(case.spec), cost.backward_bytes(case.spec)
    passes = {"forward": (1, 0), "backward": (0, 1), "both": (1, 1), "jvp": (1, 0)}[operation]
    if operation == "jvp":  # five products of a tile more than the forward's two
        flops, traffic = (7 * flops[0] // 2, 0), (0, 0)
    return Job(
        case=asdict(case),
        operation=operation,
        flops=sum(n * x for n, x in zip(passes, flops, strict=True)),
        bytes=sum(n * x for n, x in zip(passes, traffic, strict=True)),
        inputs=partial(attention_tensors, case),
        factories={s: partial(factory, case, operation) for s, factory in factories.items()},
        check=partial(attention_check, case, operation, heads=heads),
    )


def _flops(case: AttentionCase) -> tuple[int, int]:
    if isinstance(case, DilatedCase):
        return dilated_flops(case)
    if isinstance(case, VarlenCase):
        problem = case.spec, case.lengths
        return cost.varlen_forward_flops(*problem), cost.varlen_backward_flops(*problem)
    if isinstance(case, SparseCase):
        forward = cost.block_sparse_forward_flops(case.spec, case.mask)
        return forward, cost.block_sparse_backward_flops(case.spec, case.mask)
    if isinstance(case, TreeCase):
        forward = cost.tree_forward_flops(case.spec, case.ends)
        return forward, cost.tree_backward_flops(case.spec, case.ends)
    if isinstance(case, RangeCase):
        forward = cost.range_forward_flops(case.spec, case.bounds)
        return forward, cost.range_backward_flops(case.spec, case.bounds)
    return cost.forward_flops(case.spec), cost.backward_flops(case.spec)


def attention_tensors(case: AttentionCase, device: str = "cuda") -> list[Tensor]:
    """Return q, k, v, terms with a gradient, and dout: [B, S, H, D] or packed [T, H, D]."""
    from twin_attention.interop.parity.inputs import make_inputs

    inputs = make_inputs(case if isinstance(case, VarlenCase) else dense_case(case), device)
    return [inputs[name] for name in ("q", "k", "v", *varied_terms(case), "dout")]


def varied_terms(case: AttentionCase) -> tuple[str, ...]:
    return tuple(name for name in case.spec.terms if name not in CONSTANTS)


def constants_of(case: AttentionCase, device: Any) -> dict[str, Tensor]:
    import torch

    found = {}
    if case.alibi:
        powers = torch.arange(1, case.heads_q + 1, device=device) * (-8 / case.heads_q)
        found["alibi_slopes"] = powers.exp2()
    if case.dropout_rate:
        found["dropout_seed"] = torch.tensor([1, 2], dtype=torch.int32, device=device)
    return found


def dense_case(case: FlashCase) -> FlashCase:
    return FlashCase(**{x.name: getattr(case, x.name) for x in fields(FlashCase)})


def attention_check(
    case: AttentionCase, operation: str, tensors: list[Tensor], heads: int | None = None
) -> Check:
    if isinstance(case, DilatedCase):
        return dilated_check(case, operation, tensors)
    from twin_attention.interop.parity.check import check_of, sample_check
    from twin_attention.interop.parity.oracle import expectations, parts_of

    inputs = named_inputs(case, tensors[:-1])
    of_terms = tuple(f"d{name}" for name in varied_terms(case))
    names = {"forward": ("out",), "backward": ("dq", "dk", "dv", *of_terms)}
    names["both"] = names["forward"] + names["backward"]
    if operation != "forward":
        inputs["dout"] = tensors[-1]
    if operation == "jvp":
        inputs |= {f"t{name}": inputs[name] for name in "qkv"}
        return check_of(expectations(inputs, parts_of(case.spec)), ("out", "tout"))
    samples = {} if heads is None else {"samples": heads}
    return sample_check(inputs, case.spec, names[operation], **samples)


def named_inputs(case: AttentionCase, operands: list[Tensor]) -> dict[str, Tensor]:
    import torch

    inputs = dict(zip(("q", "k", "v", *varied_terms(case)), operands, strict=True))
    device = inputs["q"].device
    inputs |= constants_of(case, device)
    if isinstance(case, VarlenCase):
        inputs |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), offsets_of(case, device))
    if isinstance(case, SparseCase):
        inputs["block_mask"] = torch.tensor(case.tiles[None, None], device=device)
    if isinstance(case, TreeCase):
        inputs["kv_ends"] = torch.from_numpy(case.ends).to(device)
    if isinstance(case, RangeCase):
        inputs["q_ranges"] = torch.from_numpy(case.bounds).to(device)
    return inputs


def checked(call: Call, check: Check) -> Call:
    """Return a call after its own check, because its result is not the job's."""
    assert call.result is not None
    error = check(call.result(call.run()))
    if error > 1:
        raise ValueError(f"its error is {error:.3g} times the budget")
    return call._replace(result=None)


def absent(reason: str, *_: Any) -> NoReturn:
    raise Absent(reason)


@dataclass(frozen=True)
class DecodeTensors:
    """Arguments of a `paged_decode` or `paged_attention`; what is not used is None."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor | None
    block_tables: Tensor
    seq_lens: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    tree_ends: Tensor | None = None
    cu_seqlens_q: Tensor | None = None

    @property
    def arguments(self) -> dict[str, Tensor]:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: x for name, x in named.items() if x is not None}


def fitted(case: DecodeCase) -> DecodeCase:
    return replace(case, max_pages=-(-max(case.lengths) // case.page_size))


def decode_tensors(case: DecodeCase, device: str = "cuda") -> DecodeTensors:
    from torch.nn.functional import pad

    from twin_attention.interop.parity.inputs import make_inputs

    needed = fitted(case)
    inputs: dict[str, Any] = make_inputs(needed, device)
    wider = (0, case.max_pages - needed.max_pages)
    inputs["block_tables"] = pad(inputs["block_tables"], wider, value=NO_PAGE)
    inputs.setdefault("v_pages", None)
    return DecodeTensors(**inputs)


def decode_job(case: DecodeCase, factories: DecodeFactories) -> Job:
    """Return the job of a decode, with reads and writes, or of a `paged_attention`."""
    if isinstance(case, PagedCase):
        problem = case.spec, list(zip(case.new_tokens, case.lengths, strict=True))
        flops, total, writes = cost.paged_flops(*problem), cost.paged_bytes(*problem), None
        is_decode = set(case.new_tokens) == {1}
    else:
        spec = case.spec
        flops = cost.decode_flops(spec, case.lengths)
        total = cost.decode_bytes(spec, case.lengths)
        row = spec.head_dim_v * cost.ITEMSIZE[spec.dtype] + 4  # and its log-sum-exp
        writes, is_decode = spec.batch * spec.tokens * spec.heads_q * row, True
    return Job(
        case=asdict(case),
        operation="decode" if is_decode else "forward",  # whose rate is a bandwidth, or FLOPs
        flops=flops,
        bytes=total,
        inputs=partial(decode_tensors, case),
        factories={s: partial(factory, case) for s, factory in factories.items()},
        check=partial(_decode_check, case),
        reads=None if writes is None else total - writes,
        writes=writes,
    )


def _decode_check(case: DecodeCase, tensors: DecodeTensors) -> Check:
    from twin_attention.interop.parity.check import sample_check

    return sample_check(tensors.arguments, case.spec, ("out",))

"""Calls of the two sides' public functions, for each target.

"torch triton compiled" is torch_attn under `torch.compile`; pallas_attn is always jitted. Factories
take (case, operation, tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

from bench.calls import PREPARE, as_torch, torch_call
from bench.job import Call, Entry
from bench.problems import DecodeTensors, constants_of, named_inputs, offsets_of, varied_terms
from bench.ranges import RangeCase
from bench.trees import TreeCase, joined, separate
from twin_attention.contract.paged_spec import PagedSpec
from twin_attention.interop.parity.cases import DecodeCase, FlashCase, VarlenCase, absent_operands
from twin_attention.interop.parity.subjects.absent import Absent, refusals
from twin_attention.targets.family import Family, families_of
from twin_attention.targets.target import use_target

Factory = Callable[..., Call]
# Side and family.
FAMILY_NAMES = {
    "torch gluon": ("torch_attn", "gluon"),
    "jax mosaic": ("pallas_attn", "mosaic"),
    "torch triton": ("torch_attn", "triton"),
    "jax triton": ("pallas_attn", "triton"),
}
VARIANTS = {
    "torch gluon deterministic": ("torch_attn", "gluon"),
    "jax mosaic deterministic": ("pallas_attn", "mosaic"),
    "torch triton compiled": ("torch_attn", "triton"),
}
NAMES = FAMILY_NAMES | VARIANTS
FOREIGN_NAMES = {
    "jax gluon": ("pallas_attn", "gluon"),
    "jax torch_triton": ("pallas_attn", "torch_triton"),
}
CHOSEN_NAMES = (*FAMILY_NAMES, "jax gluon")  # those of them that None takes
_CALLS = NAMES | FOREIGN_NAMES


def flash_factories(targets: Sequence[str], variants: bool = True) -> dict[Entry, Factory]:
    """variants: add the other side's kernels, and compiled and deterministic calls."""
    names = _CALLS if variants else FAMILY_NAMES
    return _factories(_flash, filter(has_kernels, product(names, targets)))


def packed_factories(targets: Sequence[str]) -> dict[Entry, Factory]:
    names = (*FAMILY_NAMES, *FOREIGN_NAMES)
    keys = filter(has_kernels, product(names, targets))
    return _factories(partial(_or_absent, _packed), keys)


def tree_factories(case: TreeCase, targets: Sequence[str]) -> dict[Entry, Factory]:
    """Names say how the tree is given: a "tree" of ends, "separate" packed paths, or "segments"."""
    kinds = ("tree", "separate", *(["segments"] if case.has_roots_alone else []))
    keys = [*filter(has_kernels, product(CHOSEN_NAMES, targets))]
    return {
        Entry(f"{name} {kind}", target): partial(_or_absent, _tree, kind, name, target)
        for kind, (name, target) in product(kinds, keys)
    }


def range_factories(targets: Sequence[str]) -> dict[Entry, Factory]:
    """Names that end in "bias" hide the same pairs by a bias, of the portable kernels of torch."""
    keys = [*filter(has_kernels, product(CHOSEN_NAMES, targets))]
    found = _factories(partial(_or_absent, _ranges), keys)
    return found | {Entry("torch triton bias", x): partial(_or_absent, _masked, x) for x in targets}


def score_factories(targets: Sequence[str]) -> dict[Entry, Factory]:
    keys = filter(has_kernels, product(CHOSEN_NAMES, targets))
    return _factories(partial(_or_absent, _scores), keys)


def decode_factories(
    targets: Sequence[str], names: Sequence[str] = ("jax mosaic", "torch triton", "jax triton")
) -> dict[Entry, Factory]:
    """Factories take (case, tensors)."""
    return _factories(partial(_or_absent, _paged, "paged_decode"), product(names, targets))


def prefill_factories(spec: PagedSpec, targets: Sequence[str]) -> dict[Entry, Factory]:
    keys = [key for key in product(FAMILY_NAMES, targets) if has_chunks(key[0], spec, key[1])]
    return _factories(partial(_paged, "paged_attention"), keys)


def _factories(make: Factory, keys: Iterable[tuple[str, str]]) -> dict[Entry, Factory]:
    return {Entry(*key): partial(make, *key) for key in keys}


def kernels_of(name: str) -> tuple[str, str]:
    return _CALLS[name]


def has_chunks(name: str, spec: PagedSpec, target: str) -> bool:
    return any(x.supports("paged_attention", spec, target) is None for x in _families(name))


def has_kernels(key: tuple[str, str]) -> bool:
    name, target = key
    return any(family.folder in ("portable", target) for family in _families(name))


def _families(name: str) -> list[Family]:
    side, wanted = _CALLS[name]
    import_module(side)  # which then has its families
    return [family for family in families_of(side) if family.name == wanted]


def _flash(name: str, target: str, case: FlashCase, operation: str, tensors: Any) -> Call:
    side, family = _CALLS[name]
    attention = import_module(side).flash_attention
    if name.endswith(" deterministic"):
        if operation == "forward":
            raise Absent("every forward is deterministic")
        case = replace(case, deterministic=True)
    attend = partial(attention, **case.options, implementation=family)
    if name.endswith(" compiled"):
        from twin_attention.interop.parity.torch_calls import compiled

        attend = compiled(attend, fullgraph=True)
    with use_target(target):
        call = PREPARE[side](attend, operation, tensors)
    return for_target(call, target)


def _or_absent(make: Factory, *problem: Any) -> Call:
    with refusals():
        call = make(*problem)
        call.run()
    return call


def _scores(name: str, target: str, case: FlashCase, operation: str, tensors: Any) -> Call:
    side, family = _CALLS[name]
    constants: dict[str, Any] = constants_of(case, tensors[0].device)
    if side == "pallas_attn":
        from twin_attention.interop.exchange import to_jax

        constants = {name: to_jax(x) for name, x in constants.items()}
    options = case.options | constants | {"implementation": family}
    attention = partial(import_module(side).flash_attention, **options)

    def attend(q, k, v, *terms):
        found = attention(q, k, v, **dict(zip(varied_terms(case), terms, strict=True)))
        return found[0] if case.row_max else found

    with use_target(target):
        call = PREPARE[side](attend, operation, tensors)
    return for_target(call, target)


def _packed(name: str, target: str, case: VarlenCase, operation: str, tensors: Any) -> Call:
    side, family = _CALLS[name]
    attention = import_module(side).flash_attention_varlen
    attention = partial(attention, **case.options, implementation=family)

    def attend(q, k, v, offsets):
        return attention(q, k, v, offsets, offsets)

    offsets = offsets_of(case, tensors[0].device)
    return _with_integers(side, target, attend, operation, tensors, offsets)


def _tree(kind: str, name: str, target: str, case: TreeCase, operation: str, tensors: Any) -> Call:
    import torch

    side, family = _CALLS[name]
    api, options = import_module(side), case.options | {"implementation": family}
    if kind == "separate":
        own, offsets = separate(case, tensors)
        attention = partial(api.flash_attention_varlen, **options)
        call = _with_integers(
            side, target, lambda q, k, v, x: attention(q, k, v, x, x), operation, own, offsets
        )
        result = call.result
        assert result is not None
        return call._replace(result=lambda found: joined(case, [*map(as_torch, result(found))]))
    attention = partial(api.flash_attention, **options)
    if kind == "tree":
        numbers, names = case.ends, ("kv_ends",)
    else:
        numbers, names = case.segment_ids, ("q_segment_ids", "kv_segment_ids")
    integers = torch.tensor(numbers, device=tensors[0].device)

    def attend(q, k, v, x):
        return attention(q, k, v, **dict.fromkeys(names, x))

    return _with_integers(side, target, attend, operation, tensors, integers)


def _ranges(name: str, target: str, case: RangeCase, operation: str, tensors: Any) -> Call:
    import torch

    side, family = _CALLS[name]
    attention = partial(import_module(side).flash_attention, **case.options, implementation=family)
    ranges = torch.tensor(case.bounds, device=tensors[0].device)

    def attend(q, k, v, x):
        return attention(q, k, v, q_ranges=x)

    return _with_integers(side, target, attend, operation, tensors, ranges)


def _masked(target: str, case: RangeCase, operation: str, tensors: Any) -> Call:
    import torch

    from torch_attn import flash_attention
    from twin_attention.interop.parity.subjects.library import mask_of

    q, mask = tensors[0], mask_of(case, named_inputs(case, tensors[:-1]))
    seen = torch.from_numpy(mask).to(q.device)
    bias = torch.zeros((), dtype=q.dtype, device=q.device).where(seen, -torch.inf)
    attend = partial(flash_attention, bias=bias, implementation="triton")
    with use_target(target):
        call = torch_call(attend, operation, tensors)
    return for_target(call, target)


def _with_integers(
    side: str, target: str, attend: Factory, operation: str, tensors: Any, integers: Any
) -> Call:
    """Call `attend` on q, k, v and integers; JAX would fold constants into the program."""
    *qkv, dout = tensors
    with use_target(target):
        call = PREPARE[side](attend, operation, [*qkv, integers, dout])
    return for_target(call, target)


def _paged(function: str, name: str, target: str, case: DecodeCase, tensors: DecodeTensors) -> Call:
    side, family = _CALLS[name]
    attend = getattr(import_module(side), function)
    attend = partial(attend, **case.options, **absent_operands(case), implementation=family)
    arguments: dict[str, Any] = tensors.arguments
    if side == "pallas_attn":
        import jax

        from twin_attention.interop.exchange import to_jax

        attend = jax.jit(attend)
        arguments = {name: to_jax(x) for name, x in arguments.items()}
    return for_target(Call(partial(attend, **arguments), lambda out: (out,)), target)


def for_target(call: Call, target: str) -> Call:
    """Run a call with the target's kernels: JAX may compile at any call."""

    def run() -> Any:
        with use_target(target):
            return call.run()

    return call._replace(run=run)

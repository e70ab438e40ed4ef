"""Run one side, torch_attn or pallas_attn, on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import jax
import torch

import pallas_attn
import pallas_attn.distributed
import torch_attn
import torch_attn.distributed
from twin_attention.contract.context import shard_sequence
from twin_attention.contract.explain import Explanation
from twin_attention.contract.operands import CONSTANTS
from twin_attention.contract.spec import Placement
from twin_attention.interop.exchange import to_jax, to_torch
from twin_attention.interop.parity.cases import (
    AppendCase,
    BlockSparseCase,
    Case,
    ContextCase,
    DecodeCase,
    DilatedCase,
    MergeCase,
    PagedCase,
    VarlenCase,
)
from twin_attention.interop.parity.inputs import Tensors, has_gradient
from twin_attention.interop.parity.ranks import (
    AXIS,
    Room,
    SimulatedPeers,
    attend_in_threads,
    attend_under_vmap,
)
from twin_attention.targets.family import Family, families_of
from twin_attention.targets.target import TARGETS, use_target

Attend = Callable[..., Any]  # an array, or a tuple of arrays, from arrays
OUTPUTS, GRADIENTS, POOLS = ("out", "lse"), ("dout", "dlse"), ("k_pages", "v_pages")


@dataclass(frozen=True)
class Subject:
    """An implementation of one side; its target is None if nothing is compiled."""

    side: str
    implementation: str
    target: str | None = None

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.side, self.implementation, self.target)))


def plan(implementations: Sequence[str], targets: Sequence[str | None]) -> list[list[Subject]]:
    """Return the subjects by target; the reference goes with the first.

    A family whose folder is a target's name only runs for that target.
    """

    def runs(family: Family, target: str | None) -> bool:
        folder = family.folder
        if folder is None:
            return target == targets[0]
        if family.is_foreign and target is None:
            return False  # it has no interpreter here
        return folder == target or (folder not in TARGETS and (folder, target) != ("paged", None))

    return [
        [
            *dict.fromkeys(
                Subject(side, family.name, target if family.folder is not None else None)
                for implementation, side in product(implementations, SIDES)
                for family in families_of(side)
                if family.name == implementation and runs(family, target)
            )
        ]
        for target in targets
    ]


def supports(subject: Subject, case: Case) -> bool:
    kinds = {
        DecodeCase: ("paged_decode",), PagedCase: ("paged_attention",),
        AppendCase: ("append_kv",), MergeCase: ("combine",),
    }  # fmt: skip
    operations = kinds.get(type(case), ("flash_fwd", "flash_bwd"))
    families = [x for x in families_of(subject.side) if x.name == subject.implementation]
    spec = case.spec
    if subject.side == "torch_attn" and getattr(case, "layout", None) == "strided":
        spec = replace(spec, placement=Placement(compact=False))
    if isinstance(case, ContextCase):
        if subject.side == "pallas_attn" and case.way == "gather":
            return False  # under `vmap` JAX does not differentiate a sum over ranks
        spec = case.part
        if spec.is_part:
            operations = ("partial_fwd", "partial_bwd", "partial_dq")
    return all(
        any(family.supports(operation, spec, subject.target) is None for family in families)
        for operation in operations
    )


def twins(group: Sequence[Subject]) -> list[tuple[Subject, Subject]]:
    pairs = product(group, group)
    return [(a, b) for a, b in pairs if (a.side, b.side) == ("torch_attn", "pallas_attn")]


def run(subject: Subject, case: Case, inputs: Tensors) -> Tensors:
    with use_target(subject.target):
        # A new side, because a used one may have traced for another target.
        return call(SIDES[subject.side](), case, inputs, subject.implementation)


def call(
    side: Side, case: Case, inputs: Tensors, implementation: str, constants: Sequence[str] = ()
) -> Tensors:
    options = {**case.options, **absent_operands(case), "implementation": implementation}
    if isinstance(case, ContextCase):
        return _results_of_ranks(side, case, inputs, implementation)
    return results(side, _function(case), inputs, constants, **options)


def absent_operands(case: Case) -> dict[str, None]:
    """Return the required operands that a latent cache does not have."""
    if not getattr(case, "latent", False):
        return {}
    return dict.fromkeys(("v_new", "v_pages") if isinstance(case, AppendCase) else ("v_pages",))


def _results_of_ranks(
    side: Side, case: ContextCase, inputs: Tensors, implementation: str
) -> Tensors:
    """Return what the ranks of a case got, for the whole sequence."""
    operands = {x: inputs[x] for x in ("q", "k", "v", "sinks") if x in inputs}
    gradients = [inputs[name] for name in GRADIENTS if name in inputs]
    found = side.attend_on_ranks(case, operands, gradients, implementation=implementation)
    return dict(zip((*OUTPUTS, *(f"d{name}" for name in operands)), found, strict=False))


def explain(subject: Subject, case: Case, inputs: Tensors) -> Explanation:
    side = SIDES[subject.side]()
    operands = side.share({name: x for name, x in inputs.items() if name not in GRADIENTS})
    options = {**case.options, **absent_operands(case), "implementation": subject.implementation}
    if isinstance(case, ContextCase):
        operands = side.of_rank(case, operands)
        function = side.distributed.context_attention
    else:
        function = getattr(side.api, _function(case))
    with use_target(subject.target):
        return side.api.explain(function, **operands, **options)


def results(
    side: Side, function: str, inputs: Tensors, constants: Sequence[str] = (), **options: Any
) -> Tensors:
    """Call a function, and differentiate it if `inputs` has dout or dlse; return results by name.

    `constants` get no gradient. `append_kv` returns the pools, and q if given.
    """
    if constants:
        options["constants"] = tuple(constants)
    operands = {name: x for name, x in inputs.items() if name not in GRADIENTS}
    gradients = [inputs[name] for name in GRADIENTS if name in inputs]
    if function not in ("merge_states", "append_kv"):
        options["return_lse"] = True
    found = side.call(function, operands, gradients, **options)
    if function == "append_kv":
        names = [x for x in ("q", *POOLS) if x in operands]
        return dict(zip(names, found, strict=True))
    outputs = (*OUTPUTS, "row_max") if options.get("return_row_max") else OUTPUTS
    of = (x for x in operands if has_gradient(x, operands[x]) and x not in constants)
    return dict(zip((*outputs, *(f"d{name}" for name in of)), found, strict=False))


class TorchSide:
    api, distributed = torch_attn, torch_attn.distributed

    def of_rank(self, case: ContextCase, operands: dict[str, Any]) -> dict[str, Any]:
        """Return the first rank's tensors, plan and mesh."""
        own = {x: shard_sequence(operands[x], case.plan, 0) for x in "qkv"}
        mesh = SimulatedPeers(Room(case.ranks), 0)
        return own | {"sinks": operands.get("sinks"), "plan": case.plan, "mesh": mesh}

    attend_on_ranks = staticmethod(attend_in_threads)

    def share(self, tensors: Tensors) -> dict[str, Any]:
        """Return tensors as arrays of the side's framework."""
        return tensors

    def call(
        self,
        name: str,
        operands: Tensors,
        gradients: Sequence[torch.Tensor] = (),
        constants: Sequence[str] = (),
        **options: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Call a public function and return its outputs, then gradients if `gradients` are given.

        `constants` get none. `append_kv` gets copies of the pools, because it writes in place.
        """
        if name == "append_kv":
            operands = operands | {x: operands[x].clone() for x in POOLS if x in operands}
        bound = {x: operands[x] for x in (*CONSTANTS, *constants) if x in operands}
        operands = {x: operands[x] for x in operands if x not in bound}
        attend = _by_position(partial(getattr(self.api, name), **bound, **options), operands)
        call = prepare_torch(
            attend, "both" if gradients else "forward", [*operands.values()], gradients
        )
        return tuple(x.detach() for x in leaves(call()))


class PallasSide:
    """pallas_attn on torch tensors, jitted. An object caches its compiled calls."""

    api, distributed = pallas_attn, pallas_attn.distributed
    compiler_options: dict[str, bool] = {}  # noqa: RUF012 - of `jax.jit`; never changed

    def share(self, tensors: Tensors) -> dict[str, Any]:
        """Return JAX arrays that share the tensors' memory, or copies of strided views."""
        return {name: to_jax(x, copy=not x.is_contiguous()) for name, x in tensors.items()}

    def call(
        self,
        name: str,
        operands: Tensors,
        gradients: Sequence[torch.Tensor] = (),
        constants: Sequence[str] = (),
        **options: Any,
    ) -> tuple[torch.Tensor, ...]:
        # Constants come last.
        order = sorted(operands, key=lambda x: x in (*CONSTANTS, *constants))
        arrays = self.share({x: operands[x] for x in order})
        dout = self.share(dict(zip(GRADIENTS, gradients, strict=False)))
        chosen = tuple(sorted(options.items()))
        compiled = self._compile(name, (*arrays,), bool(dout), (*constants,), chosen)
        found = jax.block_until_ready(compiled(tuple(dout.values()), *arrays.values()))
        return tuple(map(to_torch, leaves(found)))

    def of_rank(self, case: ContextCase, operands: dict[str, Any]) -> dict[str, Any]:
        """Return arrays, plan and mesh of the call on all ranks; the devices need not exist."""
        own = {x: operands.get(x) for x in ("q", "k", "v", "sinks")}
        mesh = jax.sharding.AbstractMesh((case.ranks,), (AXIS,))
        return own | {"plan": case.plan, "axis_name": AXIS, "mesh": mesh}

    def attend_on_ranks(
        self, case: ContextCase, operands: Tensors, gradients: Sequence[Any], implementation: str
    ) -> tuple[torch.Tensor, ...]:
        """Return out, lse and gradients, as `call` does."""
        arrays = self.share(operands)
        dout = self.share(dict(zip(GRADIENTS, gradients, strict=False)))
        attend = _by_position(attend_under_vmap(case, implementation=implementation), arrays)
        call = _with_gradients(attend, len(arrays)) if dout else lambda _, *x: attend(*x)
        compiled = jax.jit(call, compiler_options=self.compiler_options or None)
        found = jax.block_until_ready(compiled(tuple(dout.values()), *arrays.values()))
        return tuple(map(to_torch, leaves(found)))

    @cache  # noqa: B019 - for as long as the side lives
    def _compile(
        self, name: str, operands: tuple[str, ...], both: bool, constants: tuple[str, ...], options
    ) -> Attend:
        attend = _by_position(partial(getattr(self.api, name), **dict(options)), operands)
        count = sum(x not in (*CONSTANTS, *constants) for x in operands)
        call = _with_gradients(attend, count) if both else lambda _, *arrays: attend(*arrays)
        return jax.jit(call, compiler_options=self.compiler_options or None)


Side = TorchSide | PallasSide
SIDES: dict[str, type[Side]] = {"torch_attn": TorchSide, "pallas_attn": PallasSide}


def prepare_torch(
    attend: Attend, operation: str, operands: Sequence[torch.Tensor], dout: Any
) -> Callable[[], Any]:
    """Return a call of `attend` that may run many times, with the backward's graph already made.

    Args:
        operation: "forward", "backward" or "both".
        dout: gradients of `attend`'s result or of its first parts; unused by a forward.

    Returns:
        A function that returns out, the operands' gradients, or (out, *gradients).
    """
    if operation == "forward":
        return partial(attend, *operands)
    operands = [x.detach().requires_grad_(x.is_floating_point()) for x in operands]
    inputs = [x for x in operands if x.requires_grad]
    if operation == "backward":
        out = attend(*operands)
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)

    def both() -> tuple[Any, ...]:
        out = attend(*operands)
        of = out[: len(dout)] if isinstance(out, tuple) else out
        return out, *torch.autograd.grad(of, inputs, dout)

    return both


def prepare_jax(attend: Attend, operation: str, operands: Sequence[Any], dout: Any) -> partial[Any]:
    """Return a jitted call on JAX arrays, like `prepare_torch`'s."""
    if operation == "forward":
        return partial(jax.jit(attend), *operands)
    if operation == "backward":
        _, pull = jax.jit(partial(jax.vjp, attend))(*operands)
        return partial(jax.jit(lambda pull, dout: pull(dout)), pull, dout)
    return partial(jax.jit(_with_gradients(attend)), dout, *operands)


def leaves(results: Any) -> tuple[Any, ...]:
    if isinstance(results, tuple | list):
        return tuple(leaf for result in results for leaf in leaves(result))
    return () if results is None else (results,)


def _function(case: Case) -> str:
    named = {
        VarlenCase: "flash_attention_varlen", BlockSparseCase: "block_sparse_attention",
        DilatedCase: "dilated_attention", DecodeCase: "paged_decode", PagedCase: "paged_attention",
        AppendCase: "append_kv", MergeCase: "merge_states",
    }  # fmt: skip
    return named.get(type(case), "flash_attention")


def _with_gradients(attend: Attend, count: int | None = None) -> Attend:
    """Return a function of dout and the operands; the first `count` have gradients."""

    def both(dout: Any, *operands: Any) -> tuple[Any, ...]:
        first, rest = operands[:count], operands[len(operands[:count]) :]
        out, pull = jax.vjp(lambda *x: attend(*x, *rest), *first)
        if isinstance(out, tuple):  # what has no gradient comes last
            dout = (*dout, *map(jax.numpy.zeros_like, out[len(dout) :]))
        return out, *(dx for dx in pull(dout) if dx.dtype != jax.dtypes.float0)

    return both


def _by_position(function: Attend, names: Iterable[str]) -> Attend:
    """Return a function of positional operands that returns a tuple."""

    def attend(*operands: Any) -> tuple[Any, ...]:
        results = function(**dict(zip(names, operands, strict=True)))
        return results if isinstance(results, tuple) else (results,)

    return attend

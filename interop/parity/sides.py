"""Run one side, torch_attn or pallas_attn, on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
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
from twin_attention import __version__
from twin_attention.contract.context import shard_sequence
from twin_attention.contract.explain import Explanation
from twin_attention.contract.operands import CONSTANTS
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
    absent_operands,
)
from twin_attention.interop.parity.inputs import (
    GRADIENTS,
    POOLS,
    TANGENTS,
    Tensors,
    has_gradient,
    operands_alone,
)
from twin_attention.interop.parity.jax_calls import run_jax, share, with_gradients
from twin_attention.interop.parity.oracle import OF_TANGENTS
from twin_attention.interop.parity.ranks import (
    AXIS,
    Room,
    SimulatedPeers,
    attend_in_threads,
    attend_under_vmap,
)
from twin_attention.interop.parity.subjects.subject import Run, Subject
from twin_attention.interop.parity.torch_calls import Attend, by_position, call_torch
from twin_attention.targets import invariant
from twin_attention.targets.family import Family, families_of
from twin_attention.targets.target import TARGETS, use_target

OUTPUTS = ("out", "lse")


@dataclass(frozen=True)
class Ours(Subject):
    side: str
    implementation: str | None  # None: what a call takes by default
    target: str | None = None
    package = "twin-attention"
    has_lse = has_gradients = has_dlse = has_tangents = is_guarded = True

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.side, self.implementation, self.target)))

    @property
    def framework(self) -> str:
        return {"torch_attn": "torch", "pallas_attn": "jax"}[self.side]

    @property
    def version(self) -> str:
        return __version__

    def supports(self, case: Case) -> str | None:
        kinds = {
            DecodeCase: ("paged_decode",), PagedCase: ("paged_attention",),
            AppendCase: ("append_kv",), MergeCase: ("combine",),
        }  # fmt: skip
        operations = kinds.get(type(case), ("flash_fwd", "flash_bwd"))
        families, spec = self._families(), case.spec
        if self.target is None and families[0].is_foreign and not invariant.is_asked_of(spec):
            return "the other side interprets the same kernels"
        if isinstance(case, ContextCase):
            if self.side == "pallas_attn" and case.way == "gather":
                return "under `vmap` JAX does not differentiate a sum over ranks"
            spec = case.part
            if spec.is_part:
                operations = ("partial_fwd", "partial_bwd", "partial_dq")
        return next(filter(None, (self._lacks(x, spec) for x in operations)), None)

    def _families(self) -> list[Family]:
        return [x for x in families_of(self.side) if self.implementation in (None, x.name)]

    def _lacks(self, operation: str, spec: Any) -> str | None:
        """Return why the subject's families do not run an operation, or None."""
        reasons = [x.supports(operation, spec, self.target) for x in self._families()]
        return None if None in reasons else "; ".join(filter(None, reasons))

    def by_default(self) -> Ours:
        return replace(self, implementation=None)

    def start(self) -> Run:
        side = SIDES[self.side]()  # a used one may have traced for another target

        def run(case: Case, inputs: Tensors, constants: Sequence[str] = ()) -> Tensors:
            if not inputs.keys().isdisjoint(TANGENTS) and self._lacks("flash_jvp", case.spec):
                inputs = {name: x for name, x in inputs.items() if name not in TANGENTS}
            with use_target(self.target):
                return call(side, case, inputs, self.implementation, constants)

        return run

    def explain(self, case: Case, inputs: Tensors) -> Explanation:
        side = SIDES[self.side]()
        operands = side.share(operands_alone(inputs))
        options = {**case.options, **absent_operands(case), "implementation": self.implementation}
        if isinstance(case, ContextCase):
            operands = side.of_rank(case, operands)
            function = side.distributed.context_attention
        else:
            function = getattr(side.api, _function(case))
        with use_target(self.target):
            return side.api.explain(function, **operands, **options)


def plan(implementations: Sequence[str], targets: Sequence[str | None]) -> list[list[Ours]]:
    """Return the subjects by target; the reference goes with the first.

    A family whose folder is a target's name only runs for that target.
    """

    def runs(family: Family, target: str | None) -> bool:
        folder = family.folder
        if folder is None:
            return target == targets[0]
        if target is None:
            return family.has_interpreter
        return folder == target or folder not in TARGETS

    return [
        [
            *dict.fromkeys(
                Ours(side, family.name, target if family.folder is not None else None)
                for implementation, side in product(implementations, SIDES)
                for family in families_of(side)
                if family.name == implementation and runs(family, target)
            )
        ]
        for target in targets
    ]


def call(
    side: Side, case: Case, inputs: Tensors, implementation: str | None,
    constants: Sequence[str] = (),
) -> Tensors:  # fmt: skip
    options = {**case.options, **absent_operands(case), "implementation": implementation}
    if isinstance(case, ContextCase):
        return _results_of_ranks(side, case, inputs, implementation)
    return results(side, _function(case), inputs, constants, **options)


def _results_of_ranks(
    side: Side, case: ContextCase, inputs: Tensors, implementation: str | None
) -> Tensors:
    operands = {x: inputs[x] for x in ("q", "k", "v", "sinks") if x in inputs}
    gradients = [inputs[name] for name in GRADIENTS if name in inputs]
    found = side.attend_on_ranks(case, operands, gradients, implementation=implementation)
    return dict(zip((*OUTPUTS, *(f"d{name}" for name in operands)), found, strict=False))


def results(
    side: Side, function: str, inputs: Tensors, constants: Sequence[str] = (), **options: Any
) -> Tensors:
    """Return a function's results by name, with gradients or tangents if `inputs` has some."""
    if constants:
        options["constants"] = tuple(constants)
    operands = operands_alone(inputs)
    gradients = [inputs[name] for name in GRADIENTS if name in inputs]
    if function not in ("merge_states", "append_kv"):
        options["return_lse"] = True
    found = side.call(function, operands, gradients, **options)
    if function == "append_kv":
        names = [x for x in ("q", *POOLS) if x in operands]
        return dict(zip(names, found, strict=True))
    outputs = (*OUTPUTS, "row_max") if options.get("return_row_max") else OUTPUTS
    of = (x for x in operands if has_gradient(x, operands[x]) and x not in constants)
    by_name = dict(zip((*outputs, *(f"d{name}" for name in of)), found, strict=False))
    tangents = {x: inputs[t] for t, x in TANGENTS.items() if t in inputs}
    if tangents:
        options.pop("constants", None)
        by_name |= zip(OF_TANGENTS, side.jvp(function, operands, tangents, **options), strict=True)
    return by_name


class TorchSide:
    api, distributed = torch_attn, torch_attn.distributed

    def of_rank(self, case: ContextCase, operands: dict[str, Any]) -> dict[str, Any]:
        own = {x: shard_sequence(operands[x], case.plan, 0) for x in "qkv"}
        mesh = SimulatedPeers(Room(case.ranks), 0)
        return own | {"sinks": operands.get("sinks"), "plan": case.plan, "mesh": mesh}

    attend_on_ranks = staticmethod(attend_in_threads)

    def share(self, tensors: Tensors) -> dict[str, Any]:
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
        return call_torch(partial(getattr(self.api, name), **bound, **options), operands, gradients)

    def jvp(
        self, name: str, operands: Tensors, tangents: Tensors, **options: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return the tangents of out and lse."""
        function = partial(getattr(self.api, name), **operands, **options)
        primals = {x: operands[x] for x in tangents}
        of_results = torch.func.jvp(lambda x: function(**x)[:2], (primals,), (tangents,))
        return of_results[1]


class PallasSide:
    """pallas_attn on torch tensors, jitted. An object caches its compiled calls."""

    api, distributed = pallas_attn, pallas_attn.distributed
    compiler_options: dict[str, bool] = {}  # noqa: RUF012 - of `jax.jit`; never changed

    share = staticmethod(share)

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
        return run_jax(compiled, arrays, dout)

    def jvp(
        self, name: str, operands: Tensors, tangents: Tensors, **options: Any
    ) -> tuple[torch.Tensor, ...]:
        def call(tangents: tuple[Any, ...], *arrays: Any) -> Any:
            given = dict(zip(operands, arrays, strict=True))
            primals = {x: given.pop(x) for x in of}
            function = partial(getattr(self.api, name), **given, **options)
            pairs = (primals,), (dict(zip(of, tangents, strict=True)),)
            return jax.jvp(lambda x: function(**x)[:2], *pairs)[1]

        of = (*tangents,)
        return run_jax(jax.jit(call), self.share(operands), self.share(tangents))

    def of_rank(self, case: ContextCase, operands: dict[str, Any]) -> dict[str, Any]:
        """Return arrays, plan and mesh of the call on all ranks; the devices need not exist."""
        own = {x: operands.get(x) for x in ("q", "k", "v", "sinks")}
        mesh = jax.sharding.AbstractMesh((case.ranks,), (AXIS,))
        return own | {"plan": case.plan, "axis_name": AXIS, "mesh": mesh}

    def attend_on_ranks(
        self,
        case: ContextCase,
        operands: Tensors,
        gradients: Sequence[Any],
        implementation: str | None,
    ) -> tuple[torch.Tensor, ...]:
        arrays = self.share(operands)
        dout = self.share(dict(zip(GRADIENTS, gradients, strict=False)))
        attend = by_position(attend_under_vmap(case, implementation=implementation), arrays)
        call = with_gradients(attend, len(arrays)) if dout else lambda _, *x: attend(*x)
        compiled = jax.jit(call, compiler_options=self.compiler_options or None)
        return run_jax(compiled, arrays, dout)

    @cache  # noqa: B019 - for as long as the side lives
    def _compile(
        self, name: str, operands: tuple[str, ...], both: bool, constants: tuple[str, ...], options
    ) -> Attend:
        attend = by_position(partial(getattr(self.api, name), **dict(options)), operands)
        count = sum(x not in (*CONSTANTS, *constants) for x in operands)
        call = with_gradients(attend, count) if both else lambda _, *arrays: attend(*arrays)
        return jax.jit(call, compiler_options=self.compiler_options or None)


Side = TorchSide | PallasSide
SIDES: dict[str, type[Side]] = {"torch_attn": TorchSide, "pallas_attn": PallasSide}


def _function(case: Case) -> str:
    named = {
        VarlenCase: "flash_attention_varlen", BlockSparseCase: "block_sparse_attention",
        DilatedCase: "dilated_attention", DecodeCase: "paged_decode", PagedCase: "paged_attention",
        AppendCase: "append_kv", MergeCase: "merge_states",
    }  # fmt: skip
    return named.get(type(case), "flash_attention")

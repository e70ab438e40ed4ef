"""Run an operation on the devices that hold its operands, each on its own batch and heads.

Where arrays lie is known

- under `jit` only to XLA: `custom_partitioning` makes a device's program once it is;
- while tracing, over a mesh with explicit axes: `shard_map` runs a device's program;
- inside `shard_map` to the caller: each device has a problem of its own. JAX's types then say over
  which mesh axes an array varies. Not all kernels take such operands, so none sees these types.

Gradients of what several devices share are summed over these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import chain, count
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pallas_attn.axes import Division, axes_of, divide, of_device, partition, shares_kv_heads
from pallas_attn.switches import promoting
from pallas_attn.varying import alike
from twin_attention import __version__
from twin_attention.contract.spec import AttentionSpec
from twin_attention.contract.validate.errors import fail
from twin_attention.targets.kernels import Spec


@dataclass(frozen=True, eq=False)
class _Operation:
    """An operation on arrays, and the axes of arrays and results; none if nobody divides it.

    Attributes:
        run: takes a problem and arrays, and returns a list.
        name: of what XLA compiles; others compute something else.
        maps: how many axes `vmap` maps.
    """

    run: Callable[..., list[Array | None]]
    spec: Any
    name: str
    axes: Sequence[str] = ()
    results: Sequence[str] = ()
    maps: int = 0


def run_on_shards(
    function: Callable[..., Any], operation: str, code: Any, spec: Spec, *args: Any
) -> Any:
    """Return an operation's results, which `function` computes from a problem and arguments.

    `code` says what the function runs; its `repr` does not change from process to process.
    """
    arrays, tree = jax.tree.flatten(args)
    mesh = jax.sharding.get_abstract_mesh()
    mesh = jax.typeof(arrays[0]).sharding.mesh if mesh.empty else mesh
    is_explicit = AxisType.Explicit in mesh.axis_types
    if not (mesh.manual_axes or is_explicit) and len(jax.devices()) == 1:
        return function(spec, *args)
    structure: Any = None

    def run(spec: Spec, *arrays: Array) -> list[Array | None]:
        nonlocal structure
        found = function(spec, *tree.unflatten(arrays))
        leaves, structure = jax.tree.flatten(found, is_leaf=_is_none)
        return leaves

    digest = sha256(repr((__version__, code, spec)).encode()).hexdigest()
    whole = _Operation(run, spec, f"{operation}_{digest[:16]}")
    if mesh.manual_axes:
        found = _bind(whole, alike(arrays))
    elif (names := axes_of(operation, args)) is None:
        return function(spec, *args)
    else:
        leaves = jax.tree.leaves(args, is_leaf=_is_none)
        axes = [x for x, array in zip(names[0], leaves, strict=True) if array is not None]
        divided = replace(whole, axes=axes, results=names[1])
        found = _over_mesh(divided, args, mesh) if is_explicit else _bind(divided, arrays)
    return jax.tree.unflatten(structure, found[: structure.num_leaves])


def _is_none(x: Any) -> bool:
    return x is None


def _device_program(
    operation: _Operation, division: Division, mesh: Mapping[str, int]
) -> Callable[..., list[Array | None]]:
    shares = shares_kv_heads(division)
    own = of_device(operation.spec, division, mesh)

    def own_head() -> Array:
        devices = prod(mesh[x] for x in division["h"])
        return lax.axis_index(division["h"]) // (devices // operation.spec.heads_kv)

    def start(letter: str, size: int) -> Array | int:
        return lax.axis_index(division[letter]) * size if letter in division else 0

    def take(names: str, x: Array) -> Array:
        if "s" in names and isinstance(own, AttentionSpec):
            first = jnp.array([0, 0, start("b", own.batch), start("h", own.heads_q)], x.dtype)
            return jnp.concatenate([x, jnp.zeros_like(x)], -1)[..., :4] + first
        if shares and "g" in names:
            return lax.dynamic_slice_in_dim(x, own_head(), 1, names.index("g"))
        return x

    def total(names: str, x: Array | None) -> Array | None:
        if x is None:
            return None
        if shares and "g" in names:
            axis = names.index("g")
            shape = *x.shape[:axis], operation.spec.heads_kv, *x.shape[axis + 1 :]
            x = lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, own_head(), axis)
        held = {axis for letter in names for axis in division.get(letter, ())}
        others = tuple({axis: None for axis in chain(*division.values()) if axis not in held})
        return lax.psum(x.astype(jnp.float32), others).astype(x.dtype) if others else x

    @promoting
    def program(*arrays: Array) -> list[Array | None]:
        arrays = tuple(map(take, operation.axes, arrays))
        found = operation.run(own, *arrays)
        return list(map(total, operation.results, [*found, *[None] * len(operation.results)]))

    return program


def _over_mesh(operation: _Operation, args: tuple[Any, ...], mesh: Any) -> list[Array | None]:
    """Run an operation over a mesh with explicit axes.

    Each device takes its part of an array that all have; nothing else is exchanged.
    """
    names, arrays = zip(*jax.tree_util.tree_leaves_with_path(args), strict=True)
    given = [jax.typeof(x).sharding.spec for x in arrays]
    sizes = dict(mesh.shape)
    division = divide(operation.axes, [x.shape for x in arrays], given, sizes, operation.spec)
    places = [partition(x, division) for x in operation.axes]
    for path, own, place in zip(names, given, places, strict=True):
        if any(x is not None and x != y for x, y in zip(own, place, strict=False)):
            name = jax.tree_util.keystr(path[-1:], simple=True)
            expected = f"sharding {place} over explicit axes (jax.sharding.reshard)"
            fail(NotImplementedError, name, expected, own)
    used = {*chain(*division.values())}
    placed = (
        jax.sharding.reshard(x, NamedSharding(mesh, place))
        for x, place in zip(arrays, places, strict=True)
    )

    program = _device_program(_hidden(operation), division, sizes)
    if not used:
        return program(*arrays)
    return jax.shard_map(
        program,
        mesh=mesh,
        in_specs=tuple(places),
        out_specs=[partition(x, division) for x in operation.results],
        axis_names=used,
        check_vma=False,
    )(*placed)


def _hidden(operation: _Operation) -> _Operation:
    """Return an operation that only its lowering looks into: `custom_partitioning` and `shard_map`
    see neither its constants nor its types.
    """

    def run(spec: Spec, *arrays: Array) -> list[Array | None]:
        return _bind(_Operation(operation.run, spec, operation.name), arrays)

    return replace(operation, run=run)


_shards = Primitive("attention_on_shards")
_shards.multiple_results = True


def _bind(operation: _Operation, arrays: Sequence[Array]) -> list[Array | None]:
    """Run an operation as one of JAX's, which only its lowering looks into."""
    kept: list[str] = []  # axes of the results that are no None
    places: list[bool] = []

    def run(*arrays: Array) -> list[Array]:
        own = _hidden(operation) if operation.axes else operation
        found = own.run(operation.spec, *arrays)
        places[:] = [x is not None for x in found]
        pairs = zip(operation.results, found, strict=False)
        kept[:] = [names for names, x in pairs if x is not None]
        return [x for x in found if x is not None]

    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    call = _partitioned(run, operation, kept) if operation.axes else run
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        jaxpr = jax.make_jaxpr(call)(*types)
    found = iter(_shards.bind(*arrays, jaxpr=jaxpr, operation=operation))
    return [next(found) if exists else None for exists in places]


def _partitioned(
    run: Callable[..., list[Array]], operation: _Operation, results: list[str]
) -> Callable[..., list[Array]]:
    """Return a function that XLA divides; `results` has their axes once it is traced.

    XLA's cache of programs on disk does not see into it, so its name says what it computes.
    """
    axes, spec = operation.axes, operation.spec

    def divided(mesh: Any, arrays: Sequence[Any]) -> tuple[Division, list[NamedSharding]]:
        parts = [getattr(x.sharding, "spec", ()) for x in arrays]
        division = divide(axes, [x.shape for x in arrays], parts, dict(mesh.shape), spec)
        return division, [NamedSharding(mesh, partition(x, division)) for x in results]

    def place(mesh: Any, arrays: Sequence[Any], _: Any) -> tuple[Any, ...]:
        division, of_results = divided(mesh, arrays)
        program = _device_program(_hidden(operation), division, dict(mesh.shape))

        def on_device(*arrays: Array) -> list[Array]:
            return [x for x in program(*arrays) if x is not None]

        own = tuple(NamedSharding(mesh, partition(x, division)) for x in axes)
        return mesh, on_device, of_results, own

    call = custom_partitioning(run)
    call.def_partition(
        place,
        infer_sharding_from_operands=lambda mesh, arrays, _: divided(mesh, arrays)[1],
        sharding_rule=lambda *_: _rule(axes, results, spec),
    )

    def named(*arrays: Array) -> list[Array]:
        return call(*arrays)

    named.__name__ = operation.name
    return jax.jit(named)


def _rule(axes: Sequence[str], results: Sequence[str], spec: Spec) -> SdyShardingRule:
    """Return how shardings propagate between arrays: along letters that both have."""
    alone = count()
    same = getattr(spec, "heads_q", 0) == getattr(spec, "heads_kv", None)

    def mapping(names: str) -> ArrayMapping:
        names = names.replace("g", "h") if same else names
        kinds = (f"axis{x}" if x.isalnum() and not x.isupper() else "" for x in names)
        return ArrayMapping(*(x or f"alone{next(alone)}" for x in kinds))

    return SdyShardingRule(tuple(map(mapping, axes)), tuple(map(mapping, results)))


@_shards.def_impl
def _run(*arrays, jaxpr, operation):
    return jaxpr_as_fun(jaxpr)(*arrays)


@_shards.def_abstract_eval
def _abstract(*arrays, jaxpr, operation):
    like = arrays[0]
    return [
        like.update(
            shape=x.shape,
            dtype=x.dtype,
            weak_type=False,
            sharding=like.sharding.update(spec=PartitionSpec(*[None] * len(x.shape))),
        )
        for x in jaxpr.out_avals
    ]


def _lower(ctx, *values, jaxpr, operation):
    rule = mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)
    return rule(ctx.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals), *values)


def _map(arrays, axes, *, jaxpr, operation):
    mapped = [axis is not None for axis in axes]
    pairs = [*zip(arrays, axes, strict=True)]
    for x, i in pairs:
        if i is not None and (axis := jax.typeof(x).sharding.spec[i]) is not None:
            expected = "mapped axes that no explicit mesh axis divides (jax.sharding.reshard)"
            fail(NotImplementedError, "vmap", expected, axis)
    arrays = [jnp.moveaxis(x, i, 0) if i is not None else x for x, i in pairs]
    in_axes = [0 if x else None for x in mapped]

    def run(spec, *arrays):
        return jax.vmap(partial(operation.run, spec), in_axes)(*arrays)

    larger = replace(operation, run=run, maps=operation.maps + 1)
    if operation.axes:
        letter = str(operation.maps)
        names = zip(operation.axes, mapped, strict=True)
        larger = replace(
            larger,
            axes=[letter * is_mapped + x for x, is_mapped in names],
            results=[letter + x for x in operation.results],
        )
    found = [x for x in _bind(larger, arrays) if x is not None]
    return found, [0] * len(found)


mlir.register_lowering(_shards, _lower)
batching.primitive_batchers[_shards] = _map

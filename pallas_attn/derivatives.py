"""Give results a tangent, refuse derivatives that have no formula, and mend a mapped function's.

`tangents` makes one rule of forward and reverse mode: an operation of JAX's that is linear, which
forward mode runs, and which reverse mode only transposes.

JAX's own error for forward mode of a `custom_vjp` names neither the function nor a way out. So
operands and results of a function with only a reverse mode pass through `once`.

Under `vmap`, JAX hands the gradient of an unmapped result to each mapped copy of a `custom_vjp`,
and adds up what they return. So several results pass through `together` inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from twin_attention.contract.validate.errors import not_constant, not_differentiable


def tangents(
    run: Callable[..., Sequence[jax.Array]],
    transpose: Callable[..., Any],
    results: Sequence[jax.Array],
    others: Any,
    given: Any,
    function: str,
) -> Sequence[jax.Array]:
    """Return the tangents of results, which are linear in the operands' given tangents.

    Args:
        run: computes them from results, others and given. It is traced when a program is lowered,
            over the mesh of this call.
        transpose: computes the gradients of what is given from those of results, None for zero, and
            from results and others.
        others: a tree of what else both need; given is one, too.
        function: the public function, whose second derivative is refused by name.
    """
    mesh, of_residuals = jax.sharding.get_abstract_mesh(), jax.tree.structure((results, others))
    arrays, tree = jax.tree.flatten((results, others, given))

    def run_over_mesh(*arrays: jax.Array) -> Sequence[jax.Array]:
        with jax.sharding.use_abstract_mesh(mesh):
            return run(*tree.unflatten(arrays))

    def transpose_leaves(gradients: Any, *residuals: jax.Array) -> Sequence[jax.Array]:
        return jax.tree.leaves(transpose(gradients, *of_residuals.unflatten(residuals)))

    return _linear.bind(
        *arrays, run=run_over_mesh, transpose=transpose_leaves, function=function,
        num_results=len(results), num_given=tree.num_leaves - of_residuals.num_leaves,
    )  # fmt: skip


def once(tree: Any, function: str) -> Any:
    """Return arrays unchanged; refuse derivatives but one in reverse mode, naming `function`."""

    def pass_on(x: jax.Array) -> jax.Array:
        return _once.bind(x, function=function) if isinstance(x, Tracer) else x

    return jax.tree.map(pass_on, tree)


def constant(name: str, x: Any) -> Any:
    """Return an operand unchanged; refuse a derivative by it, naming it."""
    return _constant.bind(x, function=name) if isinstance(x, Tracer) else x


def together(*results: jax.Array) -> tuple[jax.Array, ...]:
    """Return arrays unchanged; if `vmap` maps one of them, it maps all."""
    traced = any(isinstance(x, Tracer) for x in results)
    return tuple(_together.bind(*results)) if traced else results


def _identity(name: str) -> Primitive:
    """Return a primitive that is the identity under all transformations but derivatives."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, *, function: x)
    primitive.def_abstract_eval(lambda x, *, function: x)
    mlir.register_lowering(primitive, lambda _, x, *, function: [x])
    batching.defvectorized(primitive)
    return primitive


def _map_all(xs, axes):
    size = next(x.shape[i] for x, i in zip(xs, axes, strict=True) if i is not None)
    mapped = (batching.bdim_at_front(x, i, size) for x, i in zip(xs, axes, strict=True))
    return _together.bind(*mapped), [0] * len(xs)


def _linear_jvp(primals, tangents, *, function, num_results, **others):
    """Return the tangents, whose own tangents raise if a program uses them."""
    results = _linear.bind(*primals, function=function, num_results=num_results, **others)
    refuse = partial(_refuse_second_derivative, function=function)
    given = [x for x in tangents if not isinstance(x, ad.Zero)]
    return results, _linear.bind(
        *results, *given, run=refuse, transpose=refuse, function=function,
        num_results=num_results, num_given=len(given),
    )  # fmt: skip


def _linear_transpose(gradients, *arrays, transpose, function, num_given, **_):
    residuals = arrays[: len(arrays) - num_given]
    gradients = [None if isinstance(x, ad.Zero) else x for x in gradients]
    if all(x is None for x in gradients):
        return [None] * len(arrays)

    def mark(x):
        return _computed.bind(x, function=function) if isinstance(x, Tracer) else x

    gradients, residuals = jax.tree.map(mark, (gradients, residuals))
    return [*[None] * len(residuals), *transpose(gradients, *residuals)]


def _map_linear(arrays, axes, *, run, transpose, num_results, num_given, function):
    """Map all results: JAX then hands over their gradients mapped, too."""
    size = next(x.shape[i] for x, i in zip(arrays, axes, strict=True) if i is not None)
    results = [
        batching.bdim_at_front(x, i, size) for x, i in zip(arrays[:num_results], axes, strict=False)
    ]
    axes = [*[0] * num_results, *axes[num_results:]]
    of_residuals, of_given = axes[: len(axes) - num_given], axes[len(axes) - num_given :]

    def transpose_each(gradients, *residuals):
        found = jax.vmap(transpose, (0, *of_residuals))(gradients, *residuals)
        pairs = zip(found, of_given, strict=True)
        return [x.sum(0) if i is None else jnp.moveaxis(x, 0, i) for x, i in pairs]

    mapped = _linear.bind(
        *results, *arrays[num_results:], run=jax.vmap(run, axes), transpose=transpose_each,
        function=function, num_results=num_results, num_given=num_given,
    )  # fmt: skip
    return mapped, [0] * num_results


def _once_jvp(primals, tangents, *, function):
    (x,), (dx,) = primals, tangents
    return _computed.bind(x, function=function), _tangent.bind(dx, function=function)


def _refuse_second_derivative(*_, function: str) -> NoReturn:
    not_differentiable("a second derivative", "Compute it with jax.numpy operations.", function)


def _refuse_forward_mode(*_, function: str) -> NoReturn:
    not_differentiable("forward mode", "Use jax.vjp or jax.grad.", function)


# Marks what a gradient is computed from, which has no derivative itself.
_computed = _identity("attention_computed")
ad.primitive_jvps[_computed] = _refuse_second_derivative

# Takes results first, whose types its own results have.
_linear = Primitive("attention_tangents")
_linear.multiple_results = True
_linear.def_impl(lambda *arrays, run, **_: run(*arrays))
_linear.def_abstract_eval(lambda *types, num_results, **_: types[:num_results])
mlir.register_lowering(
    _linear, mlir.lower_fun(lambda *arrays, run, **_: run(*arrays), multiple_results=True)
)
batching.primitive_batchers[_linear] = _map_linear
ad.primitive_jvps[_linear] = _linear_jvp
ad.primitive_transposes[_linear] = _linear_transpose

_once = _identity("attention_once")
ad.primitive_jvps[_once] = _once_jvp

_constant = _identity("attention_constant")
ad.primitive_jvps[_constant] = lambda *_, function: not_constant(function)

_together = Primitive("attention_together")
_together.multiple_results = True
_together.def_impl(lambda *xs: xs)
_together.def_abstract_eval(lambda *xs: xs)
mlir.register_lowering(_together, lambda _, *xs: xs)
batching.primitive_batchers[_together] = _map_all

# The identity on tangents. Reverse mode transposes it and never computes it; forward mode does.
_tangent = Primitive("attention_tangent")
_tangent.def_impl(_refuse_forward_mode)
_tangent.def_abstract_eval(lambda x, *, function: x)
mlir.register_lowering(_tangent, _refuse_forward_mode)
batching.primitive_batchers[_tangent] = _refuse_forward_mode
ad.deflinear2(_tangent, lambda dx, _, *, function: [_computed.bind(dx, function=function)])

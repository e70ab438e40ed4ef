"""Refuse derivatives that have no formula here, and mend those of a mapped function.

JAX's own error for forward mode of a `custom_vjp` names neither the function nor a way out. So
operands and results of a differentiable function pass through `once`.

Under `vmap`, JAX hands the gradient of an unmapped result to each mapped copy of a `custom_vjp`,
and adds up what they return. So several results pass through `together` inside it.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from twin_attention.contract.validate.errors import not_constant, not_differentiable


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

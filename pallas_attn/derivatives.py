"""Refuse derivatives that have no formula here, with errors that name the function.

JAX's own error for forward mode of a `custom_vjp` names neither the function nor a way out. So the
operands and results of a differentiable function pass through `once`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from twin_attention.contract.validate.errors import not_differentiable


def once(tree: Any, function: str) -> Any:
    """Return arrays unchanged, and refuse all derivatives through them but one in reverse mode.

    Args:
        tree: the arrays, the operands or the results of the function.
        function: its name, for the errors.
    """

    def pass_on(x: jax.Array) -> jax.Array:
        return _once.bind(x, function=function) if isinstance(x, Tracer) else x

    return jax.tree.map(pass_on, tree)


def _identity(name: str) -> Primitive:
    """Return a primitive that is the identity under all transformations but derivatives."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, *, function: x)
    primitive.def_abstract_eval(lambda x, *, function: x)
    mlir.register_lowering(primitive, lambda _, x, *, function: [x])
    batching.defvectorized(primitive)
    return primitive


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

# The identity on tangents. Reverse mode transposes it and never computes it; forward mode does.
_tangent = Primitive("attention_tangent")
_tangent.def_impl(_refuse_forward_mode)
_tangent.def_abstract_eval(lambda x, *, function: x)
mlir.register_lowering(_tangent, _refuse_forward_mode)
batching.primitive_batchers[_tangent] = _refuse_forward_mode
ad.deflinear2(_tangent, lambda dx, _, *, function: [_computed.bind(dx, function=function)])

"""Run a family of `torch_attn` inside JAX: jaxlib launches its Triton or Gluon kernels.

While JAX traces, the host function is planned on shapes (`known`). Launches become operations of
JAX's program (`triton_call`), others XLA's. On a CPU the program calls Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.targets import capability, num_sms, shared_memory
from twin_attention.contract.operands import TERMS
from twin_attention.contract.spec import AttentionSpec
from twin_attention.contract.validate.errors import fail
from twin_attention.interop.kernels.known import Question, plan_of
from twin_attention.interop.kernels.plan import Kernel, Type, Value
from twin_attention.interop.kernels.triton_call import kernel_call
from twin_attention.targets.family import Backend
from twin_attention.targets.kernels import Spec
from twin_attention.targets.target import Card


def _pad(x: jax.Array, widths: tuple[int, ...], value: float = 0) -> jax.Array:
    """Pad axes; `widths` are (before, after) pairs, the last axis first as in torch."""
    pairs = [*zip(widths[::2], widths[1::2], strict=True)][::-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - len(pairs)) + pairs, constant_values=value)


# What host functions compute besides their launches, by torch's names.
_OPERATIONS = {
    "_to_copy": lambda x, dtype: x.astype(dtype),
    "add": jnp.add,
    "amax": jnp.max,
    "amin": jnp.min,
    "clone": lambda x: x,
    "constant_pad_nd": _pad,
    "exp2": jnp.exp2,
    "flip": jnp.flip,
    "ge": jnp.greater_equal,
    "lt": jnp.less,
    "masked_fill": lambda x, mask, value: jnp.where(mask, value, x),
    "mul": jnp.multiply,
    "neg": jnp.negative,
    "set": lambda x, axis, index, y: x.at[(slice(None),) * axis + (index,)].set(y),
    "slice": lambda x, axis, *range_: x[(slice(None),) * axis + (slice(*range_),)],
    "sub": jnp.subtract,
    "sum": lambda x, axes, keepdims=False: jnp.sum(x, axes, keepdims=keepdims),
    "unsqueeze": jnp.expand_dims,
    "view": jnp.reshape,
}


def run(backend: Backend, operation: str, spec: Spec, *operands: Any) -> Any:
    """Run an operation's function of a family of `torch_attn`, on arrays in tuples.

    `vmap` merges dense problems into a larger batch; for others it repeats the launches.
    """

    @jax.custom_batching.custom_vmap
    def call(*operands: Any) -> Any:
        return _run(backend, operation, spec, operands)

    @call.def_vmap
    def call_many(size: int, is_batched: Any, *operands: Any) -> Any:
        arrays, tree = jax.tree.flatten(operands)
        batched = jax.tree.leaves(is_batched)
        if type(spec) is AttentionSpec and not _has_sinks(operands):
            joined = [
                (x if y else jnp.broadcast_to(x, (size, *x.shape))).reshape(
                    size * spec.batch, *x.shape[1 + y :]
                )
                for x, y in zip(arrays, batched, strict=True)
            ]
            larger = replace(spec, batch=size * spec.batch)
            results = run(backend, operation, larger, *tree.unflatten(joined))
            results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
        else:

            def one(mapped: list[jax.Array]) -> Any:
                left = iter(mapped)
                every = [next(left) if y else x for x, y in zip(arrays, batched, strict=True)]
                return call(*tree.unflatten(every))

            results = jax.lax.map(one, [x for x, y in zip(arrays, batched, strict=True) if y])
        return results, jax.tree.map(lambda x: True, results)

    return call(*operands)


def _has_sinks(operands: tuple[Any, ...]) -> bool:
    """Return True if sinks, terms or a seed keep operands from joining a batch."""
    names = ("sinks", *TERMS, "dropout_seed")
    return any(getattr(x, name, None) is not None for x in operands for name in names)


def _run(backend: Backend, operation: str, spec: Spec, operands: tuple[Any, ...]) -> Any:
    target = backend.target or "sm80"  # the interpreter's results have the same types
    card = Card(capability(target), num_sms(target), shared_memory(target))
    types = jax.tree.map(lambda x: Type(x.shape, x.dtype.name), operands)
    assert backend.family.folder is not None
    plan = plan_of(Question(backend.family.folder, operation, spec, target, card, types))
    if backend.interpreted:
        results = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), plan.results)
        interpreted = partial(_interpret, backend.family.folder, operation, spec)
        return jax.pure_callback(interpreted, results, operands)
    values = dict(enumerate(jax.tree.leaves(operands)))

    def value_of(x: Any) -> Any:
        if not isinstance(x, Value):
            return x
        if x.number not in values:  # allocated, and not written
            values[x.number] = jnp.zeros(x.shape, x.dtype)
        return values[x.number]

    for step in plan.steps:
        if isinstance(step, Kernel):
            results = kernel_call([value_of(step.operands[i]) for i in step.read], step)
            for i, x in zip(step.written, results, strict=True):
                values[step.operands[i].number] = x
            continue
        if step.name not in _OPERATIONS:
            fail(NotImplementedError, operation, f"one of {[*_OPERATIONS]}", step.name)
        args = map(value_of, step.args)
        values[step.result.number] = _OPERATIONS[step.name](*args, **step.kwargs)
    return jax.tree.map(value_of, plan.results)


def _interpret(folder: str, operation: str, spec: Spec, operands: tuple[Any, ...]) -> Any:
    """Run an operation's function on a CPU, with copies of JAX's arrays."""
    import torch

    from twin_attention.interop.kernels.torch_host import run_operation

    def to_torch(x: Any) -> torch.Tensor:
        bits = torch.from_numpy(np.array(x).reshape(-1).view(np.uint8))
        return bits.view(getattr(torch, x.dtype.name)).view(x.shape)

    def to_numpy(x: torch.Tensor) -> np.ndarray:
        dtype = jnp.dtype(str(x.dtype).removeprefix("torch."))
        return x.reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(x.shape)

    with torch.no_grad():
        tensors = jax.tree.map(to_torch, operands)
        return jax.tree.map(to_numpy, run_operation(folder, operation, spec, None, tensors))

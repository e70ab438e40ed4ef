"""Four devices train a small transformer on shared documents, as one device does.

``python -m examples.jax_context_training`` uses four CPU devices and prints the losses before each
step, which equal those of one device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from examples.support.packed_documents import NO_TARGET, TOKENS, Packed, make_documents
from models.config import make_config
from models.jax_model import Transformer
from pallas_attn import flash_attention_varlen
from pallas_attn.distributed import ContextPlan, context_attention, context_plan, shard_sequence

SIZE, STEPS, RATE = 4, 4, 0.1
GAIN = 8.0  # of the first weights over the usual ones, by which attention hardly shows in the loss
TOLERANCE = 1e-4  # of the losses, which are between 0 and 6

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def train(
    tokens: jax.Array, targets: jax.Array, positions: jax.Array, attend: Attend
) -> list[float]:
    """Take steps of gradient descent, always from the same weights; return the loss before each.

    Args:
        tokens, targets: [T] int32, in the order that `attend` takes.
        positions: [T] within their documents, for the rotary embedding.
        attend: takes q, k and v of these tokens, [1, T, heads, head_dim].
    """
    structure, weights = nnx.split(Transformer(make_config("tiny"), rngs=nnx.Rngs(0)))
    weights = jax.tree.map(lambda x: x * (GAIN if x.ndim == 2 else 1), weights)

    def mean_loss(weights: nnx.State) -> jax.Array:
        model = nnx.merge(structure, weights)
        x, rotary = model.embed(tokens[None]), model.rotary(positions)
        for layer in model.layers:
            x = layer(x, rotary, attend)
        counts = targets != NO_TARGET
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model.logits(x)[0], jnp.where(counts, targets, 0)
        )
        return jnp.sum(losses, where=counts) / counts.sum()

    @jax.jit
    def step(weights: nnx.State) -> tuple[nnx.State, jax.Array]:
        loss, gradients = jax.value_and_grad(mean_loss)(weights)
        return jax.tree.map(lambda x, dx: x - RATE * dx, weights, gradients), loss

    losses = []
    for _ in range(STEPS):
        weights, loss = step(weights)
        losses.append(loss.item())
    return losses


def plan_of(packed: Packed, size: int) -> ContextPlan:
    return context_plan(TOKENS, size, "balanced", packed.offsets)


def train_on_devices(mesh: Mesh) -> list[float]:
    """Return the losses of training on the devices of a mesh with the axis "context".

    XLA distributes per-token work and sums the weights' gradients.
    """
    packed = make_documents()
    plan = plan_of(packed, mesh.size)
    positions = [plan.positions(rank) - plan.documents(rank) for rank in range(plan.size)]
    placement = NamedSharding(mesh, PartitionSpec("context"))
    tokens, targets = (shard_sequence(x, plan, axis=0) for x in packed[:2])
    given = jax.device_put((tokens, targets, np.concatenate(positions)), placement)
    attend = partial(
        context_attention, plan=plan, axis_name="context", mesh=mesh, exchange="ring", causal=True
    )
    return train(*given, attend)


def train_on_one_device() -> list[float]:
    packed = make_documents()
    offsets = jnp.asarray(packed.offsets)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flash_attention_varlen(q[0], k[0], v[0], offsets, offsets, causal=True)[None]

    positions = np.arange(TOKENS, dtype=np.int32) - plan_of(packed, 1).documents(0)
    return train(*map(jnp.asarray, (packed.tokens, packed.targets, positions)), attend)


def main() -> int:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", SIZE)
    mesh = jax.make_mesh((SIZE,), ("context",), axis_types=(AxisType.Auto,))
    print("loss before each step; several devices must agree with one:", flush=True)
    alone, together = train_on_one_device(), train_on_devices(mesh)
    for name, values in {"one device": alone, f"{SIZE} devices": together}.items():
        print(f"{name:10}", *(f"{x:.6f}" for x in values))
    return 0 if np.allclose(together, alone, rtol=0, atol=TOLERANCE) else 1


if __name__ == "__main__":
    sys.exit(main())

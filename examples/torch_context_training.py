"""Four ranks train a small transformer on shared documents, as one device does.

``python -m examples.torch_context_training`` starts the ranks as CPU processes and prints the
losses before each step, which equal those of one device.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from examples.support.packed_documents import NO_TARGET, TOKENS, Packed, make_documents
from models.config import make_config
from models.torch_model import Transformer
from torch_attn import flash_attention_varlen
from torch_attn.distributed import ContextPlan, context_attention, context_plan, shard_sequence

SIZE, STEPS, RATE = 4, 4, 0.1
GAIN = 8.0  # of the first weights over the usual ones, by which attention hardly shows in the loss
TOLERANCE = 1e-4  # of the losses, which are between 0 and 6


def make_model() -> Transformer:
    """Return the same model each time."""
    torch.manual_seed(0)
    model = Transformer(make_config("tiny"))
    with torch.no_grad():
        for x in model.parameters():
            x *= GAIN if x.ndim == 2 else 1
    return model


def train(
    packed: Packed,
    positions: np.ndarray,
    attend: Callable[..., Any],
    sum_over_ranks: Callable[[Tensor], object] = lambda x: None,
) -> list[float]:
    """Take steps of gradient descent; return the loss of all ranks' tokens before each.

    Args:
        packed: tokens and targets of a rank, or all of them.
        positions: of these tokens within their documents, for the rotary embedding.
        attend: takes q, k and v of these tokens, [1, T, heads, head_dim].
        sum_over_ranks: replaces a tensor by its sum over ranks, in place.
    """
    model = make_model()
    parameters = list(model.parameters())
    tokens, targets = (torch.from_numpy(x)[None].long() for x in packed[:2])
    num_targets = (targets != NO_TARGET).sum()
    sum_over_ranks(num_targets)
    losses = []
    for _ in range(STEPS):
        x, rotary = model.embed(tokens), model.rotary(torch.from_numpy(positions))
        for layer in model.layers:
            x = layer(x, rotary, attend)
        logits, ignored = model.logits(x)[0], {"ignore_index": NO_TARGET, "reduction": "sum"}
        loss = cross_entropy(logits, targets[0], **ignored) / num_targets
        gradients = torch.autograd.grad(loss, parameters)
        loss = loss.detach()
        for x in (loss, *gradients):
            sum_over_ranks(x)
        with torch.no_grad():
            for x, dx in zip(parameters, gradients, strict=True):
                x -= RATE * dx
        losses.append(loss.item())
    return losses


def plan_of(packed: Packed, size: int) -> ContextPlan:
    return context_plan(TOKENS, size, "balanced", packed.offsets)


def train_on_a_rank(
    rank: int, size: int, mesh: Any, sum_over_ranks: Callable[[Tensor], object]
) -> list[float]:
    """Train with a rank's tokens; return the losses of all ranks' tokens."""
    packed = make_documents()
    plan = plan_of(packed, size)
    tokens, targets = (shard_sequence(x, plan, rank, axis=0) for x in packed[:2])
    positions = plan.positions(rank) - plan.documents(rank)
    attend = partial(context_attention, plan=plan, mesh=mesh, exchange="ring", causal=True)
    own = packed._replace(tokens=tokens, targets=targets)
    return train(own, positions, attend, sum_over_ranks)


def run_rank(rank: int, size: int, store: str) -> list[float]:
    """Train as one of the ranks, in a process of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("context",))["context"]
    losses = train_on_a_rank(rank, size, mesh, dist.all_reduce)
    dist.destroy_process_group()
    return losses


def train_on_ranks() -> list[list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        with ProcessPoolExecutor(SIZE, get_context("spawn")) as pool:
            return list(pool.map(partial(run_rank, size=SIZE, store=store), range(SIZE)))


def train_on_one_device() -> list[float]:
    packed = make_documents()
    offsets = torch.from_numpy(packed.offsets)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention_varlen(q[0], k[0], v[0], offsets, offsets, causal=True)[None]

    begins = plan_of(packed, 1).documents(0)
    return train(packed, np.arange(TOKENS, dtype=np.int32) - begins, attend)


def main() -> int:
    print("loss before each step; every rank must agree with one device:", flush=True)
    losses = {f"rank {rank}": values for rank, values in enumerate(train_on_ranks())}
    alone = train_on_one_device()
    for name, values in ({"one device": alone} | losses).items():
        print(f"{name:10}", *(f"{x:.6f}" for x in values))
    return 0 if np.allclose([*losses.values()], alone, rtol=0, atol=TOLERANCE) else 1


if __name__ == "__main__":
    sys.exit(main())

import pytest
import torch

pytest.importorskip("flax")

import jax.numpy as jnp

from models import jax_decode, torch_decode
from tests.models.pairs import TINY, batch_of, make_pair
from twin_attention.interop.exchange import to_jax, to_torch

# The prompt is a chunk and one token. Pages hold 12 tokens, so that chunks cross them.
PROMPT, NEW, PAGE_SIZE = 17, 12, 12


def test_greedy_tokens_are_those_without_a_cache(torch_device):
    config = TINY["modern"]
    in_torch, in_jax = make_pair(config, ("eager", "xla"), torch_device)
    prompts = batch_of(torch_device, step=48, length=PROMPT - 1)
    sizes = config, len(prompts), PROMPT + NEW
    pages = torch.randperm(6, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    tables = pages.reshape(2, 3).to(torch_device)

    cache = torch_decode.make_cache(
        *sizes, page_size=PAGE_SIZE, dtype=torch.float16, device=torch_device
    )
    cache.block_tables = tables
    of_torch = torch_decode.generate(in_torch, prompts, NEW, cache)
    cache = jax_decode.make_cache(*sizes, page_size=PAGE_SIZE, dtype=jnp.float16)
    cache.block_tables = to_jax(tables, copy=True)
    of_jax = to_torch(jax_decode.generate(in_jax, to_jax(prompts), NEW, cache))

    assert of_torch.shape == (2, NEW)
    assert torch.equal(of_torch, of_jax)
    sequences = torch.cat([prompts, of_torch], dim=1)
    with torch.no_grad():
        top = in_torch(sequences[:, :-1])[:, PROMPT - 1 :].topk(2, dim=-1)
    assert torch.equal(top.indices[..., 0].int(), of_torch)
    # With this prompt no rounding of a float16 cache changes which token leads.
    assert (top.values[..., 0] - top.values[..., 1]).min() > 0.1

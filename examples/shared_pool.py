"""Both frameworks continue the same sequences from one pool of pages.

``python -m examples.shared_pool``: torch writes the prompts, JAX reads them from the same memory,
and both sample the same tokens.
"""

from __future__ import annotations

import os
import sys

# JAX would otherwise take most of a GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
import torch

from examples.support import jax_decoding, torch_decoding, toy_model
from twin_attention.interop.exchange import to_jax


def decode_in_both(device: str, implementation: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens [B, NEW_TOKENS] that torch and JAX sample from one pool on `device`."""
    toy = jax.tree.map(lambda x: torch.tensor(x, device=device), toy_model.make_toy())
    # A slot's content does not matter before its token is appended.
    k_pages, v_pages = torch.empty(2, *toy_model.POOL_SHAPE, dtype=torch.float16, device=device)
    pool = k_pages, v_pages

    torch_decoding.prefill(
        toy.weights, toy.prompts, pool, toy.block_tables, toy.seq_lens, implementation
    )
    arguments = (toy.weights, toy.last_tokens, pool, toy.block_tables, toy.seq_lens, toy.noise)
    shared = jax.tree.map(to_jax, arguments)
    # JAX must finish first, because torch's writes would show in its arrays.
    in_jax = np.asarray(jax_decoding.generate(*shared, implementation))
    in_torch = torch_decoding.generate(*arguments, implementation)
    return in_torch.cpu().numpy(), in_jax


def main() -> int:
    print("tokens that both frameworks sample from one pool; they must agree:", flush=True)
    in_torch, in_jax = decode_in_both("cuda" if torch.cuda.is_available() else "cpu")
    for ours, theirs in zip(in_torch, in_jax, strict=True):
        print("torch", *ours)
        print("jax  ", *theirs)
    return 0 if np.array_equal(in_torch, in_jax) else 1


if __name__ == "__main__":
    sys.exit(main())

"""The libraries that the twins are compared with, each of which may be absent.

A flash factory takes (case, operation, tensors), with torch's q, k, v and dout [B, S, H, D], or
packed [T, H, D]; a decode or prefill factory takes (case, tensors), a
`bench.problems.DecodeTensors`. They import their peer, and return a `bench.job.Call` or raise
`bench.job.Absent`.
"""

from collections.abc import Callable, Mapping
from functools import partial

from bench.job import Call
from bench.peers import (
    flashinfer,
    jax_fa3,
    jax_peers,
    packed_peers,
    score_peers,
    sparse_peers,
    torch_peers,
    tree_peers,
)

FLASH: Mapping[str, Callable[..., Call]] = {
    "eager": torch_peers.eager,
    "FA2": partial(torch_peers.sdpa, "FLASH_ATTENTION"),
    "FA3": torch_peers.fa3,
    "FA4": torch_peers.fa4,
    "cuDNN": partial(torch_peers.sdpa, "CUDNN_ATTENTION"),
    "FlexAttention": torch_peers.flex,
    "jax.nn XLA": partial(jax_peers.jax_nn, "xla"),
    "jax.nn cuDNN": partial(jax_peers.jax_nn, "cudnn"),
    "jax FA3": jax_fa3.fa3,
    "jax Pallas mha": jax_peers.pallas_mha,
    "tokamax Mosaic": partial(jax_peers.tokamax, "mosaic"),
    "tokamax Triton": partial(jax_peers.tokamax, "triton"),
}
PACKED: Mapping[str, Callable[..., Call]] = {
    "FA2 varlen": packed_peers.fa2_varlen,
    "FA3 varlen": packed_peers.fa3_varlen,
    "FA4 varlen": packed_peers.fa4_varlen,
    "jax FA3 varlen": jax_fa3.fa3_varlen,
    "FlexAttention": packed_peers.flex,
    "FA2 padded": partial(packed_peers.padded, FLASH["FA2"]),
    "cuDNN padded": partial(packed_peers.padded, FLASH["cuDNN"]),
    "tokamax Mosaic padded": partial(packed_peers.padded, FLASH["tokamax Mosaic"]),
    "jax.nn cuDNN padded": partial(packed_peers.padded, FLASH["jax.nn cuDNN"]),
    "jax.nn XLA": packed_peers.jax_masked,
}
SPARSE: Mapping[str, Callable[..., Call]] = {
    "FlexAttention": sparse_peers.flex,
    "jax.nn XLA": sparse_peers.jax_masked,
}
TREE: Mapping[str, Callable[..., Call]] = {
    "FlexAttention": tree_peers.flex,
    "FlexAttention, mask made": partial(tree_peers.flex, makes_mask=True),
    "FlexAttention, mask made uncompiled": partial(
        tree_peers.flex, makes_mask=True, compiles_mask=False
    ),
}
SCORES: Mapping[str, Callable[..., Call]] = {
    "FlexAttention": score_peers.flex,
    "SDPA": score_peers.sdpa,
    "jax.nn cuDNN": score_peers.jax_nn,
    "flash-attn": score_peers.flash_attn,
}
DECODE: Mapping[str, Callable[..., Call]] = {
    "FlashInfer": flashinfer.decode,
    "FA2 dense": partial(torch_peers.sdpa_decode, "FLASH_ATTENTION"),
    "cuDNN dense": partial(torch_peers.sdpa_decode, "CUDNN_ATTENTION"),
}
PREFILL: Mapping[str, Callable[..., Call]] = {"FlashInfer": flashinfer.prefill}

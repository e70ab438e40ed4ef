"""What the twins are compared with: one adapter a peer, which may be absent.

A flash maker takes (case, operation, tensors), tensors q, k, v and dout [B, S, H, D] of torch; a
decode maker takes (case, tensors), a `bench.suites.decode_inputs.DecodeTensors`. Both give a
`bench.job.Call` and raise `bench.job.Absent` where the peer is not installed or does not do the
case. Peers are imported when they are asked for a call.
"""

from collections.abc import Callable, Mapping
from functools import partial

from bench.job import Call
from bench.peers import eager, flashinfer, flex, jax_nn, jax_pallas, sdpa, tokamax

FLASH: Mapping[str, Callable[..., Call]] = {
    "eager": eager.flash,
    "FA2": partial(sdpa.flash, "FLASH_ATTENTION"),
    "cuDNN": partial(sdpa.flash, "CUDNN_ATTENTION"),
    "FlexAttention": flex.flash,
    "jax.nn XLA": partial(jax_nn.flash, "xla"),
    "jax.nn cuDNN": partial(jax_nn.flash, "cudnn"),
    "jax Pallas mha": jax_pallas.flash,
    "tokamax Mosaic": partial(tokamax.flash, "mosaic"),
    "tokamax Triton": partial(tokamax.flash, "triton"),
}
DECODE: Mapping[str, Callable[..., Call]] = {
    "FlashInfer": flashinfer.decode,
    "FA2 dense": partial(sdpa.decode, "FLASH_ATTENTION"),
    "cuDNN dense": partial(sdpa.decode, "CUDNN_ATTENTION"),
}

"""The libraries that parity runs and `bench` times, each of which may be absent."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from twin_attention.interop.parity.subjects import (
    cudnn_frontend,
    flashinfer,
    jax_fa3,
    jax_libraries,
    torch_libraries,
)
from twin_attention.interop.parity.subjects.library import Library, Make
from twin_attention.interop.parity.subjects.torch_libraries import CUDNN, EFFICIENT, FLASH, MATH

DENSE, PACKED, BLOCKS = "flash_attention", "flash_attention_varlen", "block_sparse_attention"
SIZES = {"D > 128", "D not 64, 128 or 256"}
HALF = {"float16", "bfloat16", "scale", "causal", "gradients", "strided", *SIZES}
LSE = {"lse", "gradient of lse"}
EDGES = {"GQA", "Sq != Skv"}
ANY = HALF | EDGES | {"float32", "D > 256", "Dv != D"}
MASKED = ANY | {"window", "segments", "tree"}  # by a mask that the user makes
SIGNED = "scale of 0 or less"  # which kernels that take row maxima before they scale do not have
ONE_SIZE, PLAIN = {"Dv != D"}, {"GQA", "scale", "Dv != D"}  # that some do not have
FORWARD = HALF - {"float16", "gradients"}
PAGED = {"paged_decode", "float16", "bfloat16", "scale", "several tokens", *EDGES, *SIZES}
TERMS = ("softcap", "bias", "relative", "alibi", "wide terms", "rows without a key")
FLAT = ("empty sequences", "rows without a key")

HEADS_FIRST = (
    torch_libraries.eager, torch_libraries.sdpa, torch_libraries.sdpa_by_default,
    torch_libraries.flex, torch_libraries.transformers, torch_libraries.gpt_oss,
    torch_libraries.jvp_flash, torch_libraries.ffpa_attn, cudnn_frontend.wide,
)  # fmt: skip
Where = Literal["all", "forward", "nothing"]
LIBRARIES: dict[str, Library] = {}


def _add(package: str, *rows: tuple[str, Make, set[str]], on_cpu: Where = "nothing") -> None:
    for label, make, claims in rows:
        is_jax = _function(make).__module__.rpartition(".")[2].startswith("jax")
        LIBRARIES[label] = Library(
            label, "jax" if is_jax else "torch", package, make, frozenset(claims),
            _function(make) in HEADS_FIRST, "lse" in claims, on_cpu,
        )  # fmt: skip


def _function(make: Any) -> Any:
    return getattr(make, "func", make)


def _sdpa(backend: str) -> Make:
    return partial(torch_libraries.sdpa, backend)


def _flash_attn(module: str) -> Make:
    return partial(torch_libraries.flash_attn, module)


_add(
    "torch",
    ("eager", torch_libraries.eager, {DENSE, *MASKED, SIGNED}),
    ("SDPA", torch_libraries.sdpa_by_default, {DENSE, *ANY, "bias"}),
    ("SDPA math", _sdpa(MATH), {DENSE, *MASKED, SIGNED, "bias"}),
    ("FA2", _sdpa(FLASH), {DENSE, *HALF, *EDGES, "lse"}),
    ("FA2 dense", partial(torch_libraries.sdpa_decode, FLASH), PAGED),
    ("nn.MultiheadAttention", torch_libraries.multi_head, {DENSE, *ANY} - PLAIN),
    on_cpu="all",
)
_add(
    "torch",
    ("FlexAttention", torch_libraries.flex, {DENSE, *MASKED, SIGNED, *TERMS, *LSE, "ranges"}),
    ("FlexAttention packed", torch_libraries.flex, {PACKED, *ANY, SIGNED, *LSE, "window", *FLAT}),
    ("FlexAttention blocks", torch_libraries.flex, {BLOCKS, *ANY, SIGNED, *LSE, "window", *FLAT}),
    on_cpu="forward",
)
_add(
    "torch",
    ("efficient", _sdpa(EFFICIENT), {DENSE, *HALF, "float32", "D > 256", "lse"}),
    ("cuDNN", _sdpa(CUDNN), {DENSE, *HALF, "GQA", "lse"}),
    ("FA2 varlen", torch_libraries.fa2_varlen, {PACKED, *HALF, "GQA", "empty sequences", "lse"}),
    ("cuDNN dense", partial(torch_libraries.sdpa_decode, CUDNN), PAGED - {"several tokens"}),
)
_add(
    "transformers",
    ("transformers eager", partial(torch_libraries.transformers, "eager"),
     {DENSE, *MASKED, SIGNED, "softcap"}),
    ("transformers gpt-oss", torch_libraries.gpt_oss, {DENSE, *MASKED, SIGNED, "sinks"}),
    ("transformers sdpa", partial(torch_libraries.transformers, "sdpa"), {DENSE, *MASKED}),
    on_cpu="all",
)  # fmt: skip
_add(
    "fa3-fwd",
    ("FA3", _flash_attn("fa3_fwd_interface"), {DENSE, *FORWARD, *EDGES}),
    ("FA3 varlen", _flash_attn("fa3_fwd_interface"), {PACKED, *FORWARD, "GQA"}),
)
_add(
    "flash-attn-4",
    ("FA4", _flash_attn("flash_attn.cute"), {DENSE, *HALF, *EDGES, *LSE, "Dv != D"}),
    ("FA4 varlen", _flash_attn("flash_attn.cute"),
     {PACKED, *HALF, *LSE, "GQA", "Dv != D", "empty sequences"}),
)  # fmt: skip
_add("flash-attn", ("flash-attn", _flash_attn("flash_attn"),
                    {DENSE, *HALF, *EDGES, "alibi", "lse"}))  # fmt: skip
_add("ffpa-attn", ("ffpa-attn", torch_libraries.ffpa_attn, {DENSE, *HALF, "GQA", "D > 256"}))
_add(
    "nvidia-cudnn-frontend",
    ("cuDNN frontend", cudnn_frontend.wide,
     {DENSE, *HALF, *EDGES, SIGNED, "D > 256", "Dv != D", "window", "lse"} - {"gradients"}),
    ("cuDNN frontend flex", cudnn_frontend.flex,
     {DENSE, *HALF, *EDGES, *LSE, "Dv != D", "window", "tree", "ranges"}),
)  # fmt: skip
_add("jvp-flash-attention", ("jvp-flash-attention", torch_libraries.jvp_flash, {DENSE, *HALF}))
_add("flashinfer-python", ("FlashInfer", flashinfer.paged, {
    *PAGED, "paged_attention", "several lengths", "softcap", "window", "float8_e4m3fn", "lse",
}))  # fmt: skip
_add(
    "jax",
    ("jax.nn XLA", partial(jax_libraries.jax_nn, "xla"),
     {DENSE, *MASKED, SIGNED, "bias"} - ONE_SIZE),
    ("jax.nn XLA packed", partial(jax_libraries.jax_nn, "xla"),
     {PACKED, *HALF, "float32", "GQA", "empty sequences"}),
    ("jax.nn XLA blocks", partial(jax_libraries.jax_nn, "xla"), {BLOCKS, *ANY} - ONE_SIZE),
    on_cpu="all",
)  # fmt: skip
_add(
    "jax",
    ("jax.nn cuDNN", partial(jax_libraries.jax_nn, "cudnn"), {DENSE, *HALF, "GQA", "bias"}),
    ("jax Pallas mha", jax_libraries.pallas_mha, {DENSE, *HALF}),
)
_add("flax", ("flax", jax_libraries.flax, {DENSE, *MASKED, "bias"} - PLAIN), on_cpu="all")
_add(
    "tokamax",
    ("tokamax Mosaic", partial(jax_libraries.tokamax, "mosaic"), {DENSE, *HALF, "GQA"}),
    ("tokamax Triton", partial(jax_libraries.tokamax, "triton"), {DENSE, *HALF, "GQA"}),
)
_add(
    "dew-flash-attn-cu13",
    ("jax FA3", jax_fa3.fa3, {DENSE, *HALF, *EDGES, "lse"}),
    ("jax FA3 varlen", jax_fa3.fa3, {PACKED, *HALF, "GQA", "lse"}),
)
_WIDE = {*HALF, *EDGES, "Dv != D", "window", "lse", "rows without a key"}
_add(
    "fa4-jax",
    ("fa4-jax", jax_libraries.fa4, {DENSE, *_WIDE}),
    ("fa4-jax varlen", jax_libraries.fa4, {PACKED, *_WIDE, "empty sequences", "padding"}),
)

"""Judge every shipped configuration by its compiled code (docs/targets.md).

A kernel also fails if it reads a uniform register that nothing wrote, or lost loop bounds. SM90's
configurations are chosen by times, which include the cost of spills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

from tuning.static.resources import Resources, measure
from twin_attention.contract.paged_spec import (
    LATENT_DIM_MAX,
    QUANTIZED_DTYPES,
    DecodeSpec,
    PagedSpec,
)
from twin_attention.contract.spec import HEAD_DIM_MIN, AttentionSpec, PartialSpec, VarlenSpec
from twin_attention.interop.parity.cases import BlockSparseCase, DecodeCase, FlashCase, PagedCase
from twin_attention.targets import sm80, sm90
from twin_attention.targets.config import HEAD_DIMS, config_of_smaller_cards, padded_head_dim
from twin_attention.targets.kernels import DecodeConfig, KernelConfig, find_kernel
from twin_attention.targets.target import (
    SHARED_MEMORY_LIMIT,
    SHARED_MEMORY_OF_SMALLER_CARDS,
    TARGETS,
)

FRAMEWORKS = {"torch": "torch_attn", "jax": "pallas_attn"}
# Fields of the feature's case, added to those in `Problem.spec`. Without a causal mask or a window
# a kernel has one of the causal one's two loops, sometimes with other tiles.
FLASH_FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "short": {"causal": True, "batch": 32, "seq_q": 512, "seq_kv": 512},
    "long": {"causal": True, "seq_q": 16384, "seq_kv": 16384},
    "all-options": {"window_size": (256, 128), "softcap": 30.0, "sinks": True},
    "softcap": {"softcap": 30.0},
    "odd-head-size": {"causal": True},
    "tf32": {"causal": True, "precision": "tf32"},
    "tf32-all-options": {
        "precision": "tf32", "window_size": (256, 128), "softcap": 30.0, "sinks": True,
    },
    "few-kv-heads": {"causal": True, "batch": 1},
    "few-kv-heads-window": {"window_size": (256, 128), "batch": 1},
    "few-kv-heads-odd-length": {
        "causal": True, "batch": 1, "seq_q": 3000, "seq_kv": 3000, "heads_q": 16, "heads_kv": 4,
    },
    "packed": {"causal": True, "seq_q": 16384, "seq_kv": 16384},  # of 8 sequences
    "segments": {"causal": True},
    "part": {},
    "row-max": {"causal": True, "sinks": True, "row_max": True},
    "terms": {"causal": True, "relative": 128, "alibi": "heads"},
    "bias": {"bias": "hqk"},
    "dropout": {"causal": True, "dropout_rate": 0.1},
    "dropout-packed": {
        "causal": True, "seq_q": 16384, "seq_kv": 16384, "dropout_rate": 0.1,
    },
    "terms-packed": {
        "causal": True, "seq_q": 16384, "seq_kv": 16384, "relative": 128, "alibi": "heads",
    },
    "tree": {"causal": True, "tree": "nested"},
    "tree-packed": {"causal": True, "seq_q": 16384, "seq_kv": 16384, "tree": "nested"},
    "tree-depths": {
        "causal": True, "window_size": (256, None), "tree": "nested", "depths": True,
    },
    "tree-all-options": {
        "causal": True, "window_size": (256, None), "softcap": 30.0, "sinks": True,
        "tree": "nested", "depths": True,
    },
    "ranges": {"causal": True, "ranges": "both"},
    "ranges-packed": {"causal": True, "seq_q": 16384, "seq_kv": 16384, "ranges": "spans"},
    "invariant": {"causal": True, "batch_invariant": True},
    "tangents": {"causal": True},
    "tf32-tangents": {"causal": True, "precision": "tf32"},
    "tangents-all-options": {"window_size": (256, 128), "softcap": 30.0, "sinks": True},
    "tangents-bias": {"bias": "hqk"},
    "tangents-packed": {"causal": True, "seq_q": 16384, "seq_kv": 16384, "relative": 128},
    "tiles-of-128": {"causal": True},
    "tiles-of-64": {"causal": True},
}  # fmt: skip
_LATENT = {"latent": True, "head_dim": LATENT_DIM_MAX, "head_dim_v": 512, "heads_kv": 1}
DECODE_FEATURES: dict[str, dict[str, Any]] = {
    "decode": {"tokens": 1, "num_splits": 4},
    "decode-short": {"tokens": 1, "max_pages": 16},
    "decode-crowded": {"tokens": 1},
    "decode-16-tokens": {"tokens": 16, "num_splits": 4},
    "decode-tree": {"tokens": 64, "num_splits": 4, "tree": "drafts"},
    "decode-cascade": {"tokens": 1, "cascade": True},
    "decode-invariant": {"tokens": 1, "num_splits": 4, "batch_invariant": True, "max_pages": 1088},
    "decode-invariant-short": {"tokens": 1, "num_splits": 4, "batch_invariant": True},
    "decode-invariant-16-tokens": {"tokens": 16, "batch_invariant": True},
    "decode-alibi": {"tokens": 1, "num_splits": 4, "alibi": "heads"},
    "decode-latent": {"tokens": 8, "num_splits": 4, **_LATENT},
    "decode-latent-1-token": {"tokens": 1, "num_splits": 4, **_LATENT},
    "decode-all-options": {
        "tokens": 4, "page_size": 256, "max_pages": 4, "window_size": (600, None),
        "softcap": 30.0, "num_splits": 1,
    },
}  # fmt: skip
CHUNK_FEATURES: dict[str, dict[str, Any]] = {
    "chunks": {"num_splits": 2},
    "chunks-tree": {"num_splits": 2, "tree": "drafts"},
    "chunks-alibi": {"num_splits": 2, "alibi": "heads"},
    "chunks-invariant": {"num_splits": 1, "batch_invariant": True, "max_pages": 256},
    "chunks-latent": {"num_splits": 2, **_LATENT},
    "chunks-ranges": {"num_splits": 2, "ranges": "both"},
    "chunks-narrow-values": {"num_splits": 1, "head_dim_v": 32},
    "chunks-all-options": {
        "page_size": 256, "max_pages": 4, "window_size": (600, None), "softcap": 30.0,
        "num_splits": 1,
    },
}  # fmt: skip
EXPLICIT_CHUNK_FEATURES: dict[str, dict[str, Any]] = {
    "chunks-in-one-part": {"num_splits": 1},
    "chunks-all-options": CHUNK_FEATURES["chunks-all-options"],
}
EXPLICIT_DECODE_FEATURES: dict[str, dict[str, Any]] = {
    "decode-latent-128-heads": {"heads_q": 128, "page_size": 64, "num_splits": 4, **_LATENT},
    "decode-latent-all-options": {
        "heads_q": 64, "tokens": 2, "window_size": (600, None), "softcap": 30.0, "num_splits": 1,
        **_LATENT,
    },
}  # fmt: skip
FEATURES = (
    *FLASH_FEATURES, *DECODE_FEATURES, *CHUNK_FEATURES, "chunks-in-one-part",
    *EXPLICIT_DECODE_FEATURES,
)  # fmt: skip
DTYPES = {16: ("bfloat16",), 32: ("float32",), 8: QUANTIZED_DTYPES}
FAMILIES = {
    "torch": {"triton": TARGETS, "gluon": TARGETS},
    "jax": {"triton": TARGETS, "mosaic": TARGETS},
}

_AOT = {
    ("torch", "triton"): "tuning.static.triton_aot",
    ("torch", "gluon"): "tuning.static.triton_aot",
    ("jax", "triton"): "tuning.static.pallas_aot",
    ("jax", "mosaic"): "tuning.static.mosaic_aot",
}
# Features that only some kernels have: the portable ones are compiled in bfloat16, or float32 for
# TF32, with these head sizes.
_PORTABLE_FEATURES = {
    "packed": (64, 128), "segments": (64, 128), "part": HEAD_DIMS,
    "row-max": (64, 128), "terms": HEAD_DIMS, "terms-packed": (64, 128),
    "bias": HEAD_DIMS, "dropout": HEAD_DIMS, "dropout-packed": (64, 128),
    "decode-alibi": (64, 128), "chunks-alibi": (64, 128),
    **dict.fromkeys((
        "invariant", "decode-invariant", "decode-invariant-short", "decode-invariant-16-tokens",
        "chunks-invariant",
    ), (64, 128)),
    "tree": HEAD_DIMS, "tree-packed": (64, 128), "tree-depths": (),
    "tree-all-options": (64, 128), "ranges": HEAD_DIMS, "ranges-packed": (64, 128),
    "tangents": HEAD_DIMS[:-1], "tf32-tangents": HEAD_DIMS[:-1],
    **dict.fromkeys(("tangents-all-options", "tangents-bias", "tangents-packed"), (64, 128)),
    "tiles-of-128": HEAD_DIMS, "tiles-of-64": (64, 128),
    "softcap": (), "few-kv-heads": (), "few-kv-heads-window": (),
    "few-kv-heads-odd-length": (), "short": (), "long": (), "full": (128,),
    "tf32": HEAD_DIMS, "tf32-all-options": HEAD_DIMS,
}  # fmt: skip
# Terms and tangents in SM90's explicit kernels, with these head sizes: with Triton 3.9 dropout in
# the fused backward at 64 spills as much as a tile.
_TERM_FEATURES = {
    "bias": (64, 128, 256), "row-max": (64, 128, 256),
    "terms": (128, 256), "terms-packed": (128, 256),
    "dropout": (128, 256), "dropout-packed": (128, 256),
    "tangents": (16, 64, 80, 128),
    **dict.fromkeys(("tangents-all-options", "tangents-packed"), (64, 128)),
}  # fmt: skip
# Those that a target's explicit kernels have. No windows of depths on SM90: with Triton 3.9 the
# fused backward at head dimension 64 spills as much as a tile.
_EXPLICIT_FEATURES = {
    ("packed", "sm80"), ("packed", "sm90"), ("tiles-of-128", "sm90"), ("few-kv-heads", "sm90"),
    ("few-kv-heads-window", "sm90"), ("softcap", "sm90"), ("part", "sm90"), ("long", "sm90"),
    ("tree-depths", "sm80"),
    *product(("segments", "tree", "tree-packed", "ranges", "ranges-packed"), TARGETS),
    *product(_TERM_FEATURES, ("sm90",)),
}  # fmt: skip
# The explicit kernels' head sizes: each row's largest, and all in two column pieces.
_EXPLICIT_HEAD_DIMS = (16, 32, 64, 80, 96, 128, 192, 256)
_WIDE_HEAD_DIMS = (320, 512)
# Mosaic's, which compile slower: each row's largest, and one in two pieces; those with features
# other than a mask; those of paged caches.
_MOSAIC_HEAD_DIMS = (64, 96, 128, 192, 240, 256)
_MOSAIC_HEAD_DIMS_WITH_FEATURES = (64, 128)
_MOSAIC_HEAD_DIMS_OF_SHORT = (192, 256)  # of rows of their own under a mask
_PAGED_HEAD_DIMS = (64, 128, 256)
_PAGED_FEATURES = ("decode", "decode-all-options")
# Bytes that a thread of an explicit kernel may spill and reload in a step: bounds, addresses, and
# rows of lse and delta. The least tile, 64x64 scores over 128 threads, would make 256.
_LOOP_SPILLS_MAX = 255
# Bytes that a thread of a portable kernel may spill in a step, and in all: less than the least tile
# takes. paged_attention keeps 112 for its last lines (Triton 3.9, head size 64).
_SCALAR_SPILLS_MAX = 32
_SPILLS_MAX = 127
# The kernel of shared pages keeps its main loop's addresses while it searches, up to 200 bytes
# (JAX 0.11.2, SM80, head size 256).
_SPILLS_MAX_OF_CASCADES = 255
# With `batch_invariant` a thread keeps the sum of the spans before, of 256 bytes.
_SPILLS_MAX_OF_SPANS = 319
_WGMMA_ROWS = 64  # which a wgmma instruction multiplies


@dataclass(frozen=True)
class Problem:
    """A row of the configuration tables, with a feature of the kernels that reach it.

    dtype: of k and v.
    head_dim: the padded head size of the row.
    shared_memory: of a block, in bytes; None for the target's own cards.
    """

    framework: str
    target: str
    dtype: str
    head_dim: int
    feature: str
    family: str = "triton"
    shared_memory: int | None = None

    @property
    def spec(self) -> AttentionSpec | DecodeSpec:
        if self.feature in FLASH_FEATURES:
            head_dim = self.head_dim - 8 if self.feature == "odd-head-size" else self.head_dim
            options = FLASH_FEATURES[self.feature]
            shape: dict[str, Any] = {
                "batch": 8, "seq_q": 2048, "seq_kv": 2048, "heads_q": 4, "heads_kv": 2,
            }  # fmt: skip
            case = FlashCase("", head_dim=head_dim, dtype=self.dtype, **shape | options)
            if self.feature.endswith("packed"):
                return VarlenSpec(**vars(replace(case.spec, batch=1)), num_sequences=8)
            if self.feature == "segments":
                return replace(case.spec, segmented=True)
            if self.feature == "part":
                return PartialSpec(**vars(case.spec))
            if self.feature.startswith("tiles-of-"):
                tile = int(self.feature.removeprefix("tiles-of-"))
                sizes = {"tile_q": tile, "tile_kv": tile, "own_masks": "heads"}
                return BlockSparseCase(**vars(case), **sizes).spec
            return case.spec
        batch = 4
        if self.feature == "decode-cascade":
            batch = 64  # whose tiles have as many rows as there are
        if self.feature == "decode-crowded":
            batch = 256 if self.dtype in QUANTIZED_DTYPES else 128
        chunks = CHUNK_FEATURES | EXPLICIT_CHUNK_FEATURES
        if self.feature in chunks:
            return paged_spec(self.dtype, **{"head_dim": self.head_dim} | chunks[self.feature])
        options = {"head_dim": self.head_dim, "heads_kv": 4, "max_pages": 64}
        options |= (DECODE_FEATURES | EXPLICIT_DECODE_FEATURES)[self.feature]
        return decode_spec(self.dtype, batch=batch, **options)

    @property
    def sinks(self) -> bool:
        return FLASH_FEATURES.get(self.feature, {}).get("sinks", False)


def decode_spec(
    kv_dtype: str, head_dim: int, batch: int, heads_kv: int, **options: Any
) -> DecodeSpec:
    dtype = "float16" if kv_dtype in QUANTIZED_DTYPES else kv_dtype
    options = {"heads_q": 16} | options
    return DecodeCase(
        "", (1,) * batch, heads_kv=heads_kv, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype,
        **options,
    ).spec  # fmt: skip


def paged_spec(kv_dtype: str, head_dim: int, **options: Any) -> PagedSpec:
    """Return a batch of 4 chunks of a prompt, otherwise as `decode_spec`."""
    dtype = "float16" if kv_dtype in QUANTIZED_DTYPES else kv_dtype
    options = {"heads_q": 16, "heads_kv": 4, "max_pages": 64} | options
    return PagedCase(
        "", (1,) * 4, new_tokens=(512,) * 4, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype,
        **options,
    ).spec  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    problem: Problem
    kernel: str
    config: KernelConfig
    resources: Resources
    failures: tuple[str, ...]


def problems(framework: str, target: str, family: str = "triton") -> Iterator[Problem]:
    if family == "mosaic":
        yield from _mosaic_problems(target)
        return
    if family != "triton":
        wide = _WIDE_HEAD_DIMS if target == "sm90" else ()
        for head_dim, feature in product((*_EXPLICIT_HEAD_DIMS, *wide), FLASH_FEATURES):
            problem = Problem(framework, target, "bfloat16", head_dim, feature, family)
            has_feature = (
                feature not in _PORTABLE_FEATURES or (feature, target) in _EXPLICIT_FEATURES
            )
            has_feature &= head_dim in _TERM_FEATURES.get(feature, (head_dim,))
            if head_dim in wide:
                has_feature &= sm90.supports("flash_fwd", problem.spec, target) is None
            if has_feature and problem.spec.head_dim >= HEAD_DIM_MIN:
                yield problem
        chunks = EXPLICIT_CHUNK_FEATURES if target == "sm90" else ()
        for head_dim, feature in product(_EXPLICIT_HEAD_DIMS, chunks):
            yield Problem(framework, target, "bfloat16", head_dim, feature, family)
        for feature in EXPLICIT_DECODE_FEATURES if target == "sm90" else ():
            yield Problem(framework, target, "bfloat16", HEAD_DIMS[-1], feature, family)
        return
    paged = DECODE_FEATURES | CHUNK_FEATURES
    for features, dtype_bits in ((FLASH_FEATURES, (16, 32)), (paged, (8, 16))):
        for bits, head_dim in product(dtype_bits, HEAD_DIMS):
            for dtype, feature in product(DTYPES[bits], features):
                problem = Problem(framework, target, dtype, head_dim, feature)
                size = problem.spec.head_dim
                if framework == "jax" and problem.spec.batch_invariant:
                    continue
                wanted = "float32" if feature.startswith("tf32") else "bfloat16"
                if feature in _PORTABLE_FEATURES and (
                    dtype != wanted or size not in _PORTABLE_FEATURES[feature]
                ):
                    continue
                padded = min(padded_head_dim(size), HEAD_DIMS[-1])
                if size >= HEAD_DIM_MIN and padded == head_dim:
                    yield problem


def _mosaic_problems(target: str) -> Iterator[Problem]:
    flash = [("bfloat16", *x) for x in product(_MOSAIC_HEAD_DIMS, ("causal",))]
    features = [
        feature
        for feature in FLASH_FEATURES
        if feature not in ("causal", *_PORTABLE_FEATURES) or (feature, target) in _EXPLICIT_FEATURES
        if feature not in ("part", "long")  # which Gluon alone has, or has code of its own for
    ]
    if target == "sm90":  # whose code depends on lengths
        features.append("few-kv-heads-odd-length")
    flash += [("bfloat16", *x) for x in product(_MOSAIC_HEAD_DIMS_WITH_FEATURES, features)]
    short = _MOSAIC_HEAD_DIMS_OF_SHORT if target == "sm90" else ()
    flash += [("bfloat16", head_dim, "short") for head_dim in short]
    paged = product((*DTYPES[16], *DTYPES[8]), _PAGED_HEAD_DIMS, _PAGED_FEATURES)
    chunks = EXPLICIT_CHUNK_FEATURES if target == "sm90" else ()
    chunks = (("bfloat16", *x) for x in product(_PAGED_HEAD_DIMS, chunks))
    for dtype, head_dim, feature in (*flash, *paged, *chunks):
        problem = Problem("jax", target, dtype, head_dim, feature, "mosaic")
        leaves = (
            partial(sm90.mosaic_leaves, "flash_fwd") if target == "sm90" else sm80.mosaic_leaves
        )
        if leaves(problem.spec):
            continue
        yield problem
        if target == "sm80" and feature in ("causal", "decode"):
            yield replace(problem, shared_memory=SHARED_MEMORY_OF_SMALLER_CARDS)


def not_compiled(problem: Problem) -> str | None:
    if problem.family != "mosaic":
        return None
    return import_module(_AOT["jax", "mosaic"]).missing(problem.spec, problem.target)


def compiler(
    framework: str, family: str = "triton"
) -> Callable[..., list[tuple[str, KernelConfig, Any]]]:
    return import_module(_AOT[framework, family]).compile_kernels


def check(problem: Problem) -> list[Verdict]:
    verdicts = []
    for kernel, config, binary in _compile(problem):
        is_portable = "ttir" in getattr(binary, "asm", ())
        if problem.family == "gluon" and is_portable and find_kernel(kernel, type(config)).products:
            continue  # of the gradients of terms: the portable family's, with its configuration
        resources = measure(binary, problem.target)
        found = failures(problem, kernel, config, resources)
        verdicts.append(Verdict(problem, kernel, config, resources, found))
    return verdicts


def _compile(problem: Problem) -> list[tuple[str, KernelConfig, Any]]:
    compile_kernels = compiler(problem.framework, problem.family)
    options: dict[str, Any] = {"sinks": problem.sinks}
    if problem.family == "gluon":
        options["family"] = problem.family
    if "tangents" in problem.feature:
        options["tangents"] = True
    if problem.framework == "jax":
        options["shared_memory"] = problem.shared_memory
    if problem.family != "mosaic" and problem.shared_memory is not None:
        limit = problem.shared_memory
        with suppress(NotImplementedError):
            return compile_kernels(problem.spec, problem.target, lambda kernel: limit, **options)
    return compile_kernels(problem.spec, problem.target, **options)


def shared_memory_limit(kernel: str, target: str) -> int:
    if target == "sm80" and not kernel.startswith("flash_bwd"):
        return SHARED_MEMORY_OF_SMALLER_CARDS
    return SHARED_MEMORY_LIMIT[target]


def failures(
    problem: Problem, kernel: str, config: KernelConfig, resources: Resources
) -> tuple[str, ...]:
    target, is_explicit = problem.target, problem.family != "triton"
    found = []
    if is_explicit:
        if resources.loop_spills > _LOOP_SPILLS_MAX:
            found.append(f"spills {resources.loop_spills} B in a step of its main loop")
    elif target == "sm80" and not _unrolls_wide_heads(problem.spec):
        stores, loads = resources.spill_stores, resources.spill_loads
        is_cascade = problem.feature == "decode-cascade"
        most = _SPILLS_MAX_OF_CASCADES if is_cascade else _SPILLS_MAX
        if problem.spec.batch_invariant:
            most = _SPILLS_MAX_OF_SPANS
        if resources.loop_spills > _SCALAR_SPILLS_MAX or max(stores, loads) > most:
            found.append(f"spills {stores} B of stores, {loads} B of loads")
    if resources.unwritten:
        found.append(f"reads registers that nothing wrote in {resources.unwritten} instructions")
    if resources.overwritten:
        found.append(f"overwrites the numbers of {resources.overwritten} barriers too early")
    if resources.fixed_bounds:
        found.append(f"begins or ends {resources.fixed_bounds} loops always at the same place")
    limit = problem.shared_memory or (
        SHARED_MEMORY_LIMIT[target]  # compiled for each size of card
        if problem.family == "mosaic" or _has_row_of_smaller_cards(problem, kernel, config)
        else shared_memory_limit(kernel, target)
    )
    if resources.shared > limit:
        found.append(f"{resources.shared} B of shared memory, of {limit}")
    described = find_kernel(kernel, type(config))
    if not (described.products and uses_tensor_cores(problem.spec)):
        return tuple(found)
    if isinstance(config, DecodeConfig):
        if not resources.mma + resources.wgmma:
            found.append("no mma.sync or wgmma")
    elif target == "sm90" and _needs_wgmma(problem, kernel, config, described.stationary):
        if not resources.wgmma:
            found.append("no wgmma")
    elif not resources.mma:
        found.append("no mma.sync")
    has_own_copies = problem.family == "mosaic" and isinstance(config, DecodeConfig)
    is_specialized = target == "sm90" and is_explicit and not has_own_copies
    copies_itself = is_explicit and not is_specialized
    is_pipelined = target == "sm80" and config.num_stages > 1
    if (is_pipelined or copies_itself) and not resources.cp_async:
        found.append("no cp.async")
    if copies_itself and not resources.ldmatrix:
        found.append("no ldmatrix")
    if is_specialized and not resources.tma:
        found.append("no TMA")
    if is_specialized and resources.serialized:
        found.append("waits for each wgmma")
    return tuple(found)


def uses_tensor_cores(spec: AttentionSpec | DecodeSpec) -> bool:
    """Return False for products in IEEE float32, which tensor cores do not have."""
    if spec.dtype_bits < 32:
        return True
    return isinstance(spec, AttentionSpec) and spec.precision == "tf32"


def _unrolls_wide_heads(spec: Any) -> bool:
    """Return True for float32 without tensor cores above 256, whose least tile spills as well."""
    wide = max(spec.head_dim, spec.head_dim_v) > sm80.EXPLICIT_HEAD_DIM_MAX
    return wide and isinstance(spec, AttentionSpec) and not uses_tensor_cores(spec)


def _has_row_of_smaller_cards(problem: Problem, kernel: str, config: KernelConfig) -> bool:
    """Return True if cards with less shared memory have another row of a Gluon kernel."""
    if (problem.family, problem.target) != ("gluon", "sm80") or kernel != "flash_fwd":
        return False
    package = FRAMEWORKS[problem.framework]
    smaller = config_of_smaller_cards(package, "sm80", problem.spec, "sm80", kernel, config)
    return smaller != config


def _needs_wgmma(problem: Problem, kernel: str, config: KernelConfig, stationary: str) -> bool:
    """Return False for a tile of too few rows, and for a kernel that multiplies with mma.sync."""
    if problem.family == "triton" and not sm90.portable_uses_wgmma(kernel, problem.spec):
        return False
    return getattr(config, stationary) >= _WGMMA_ROWS

"""The gate: every shipped configuration compiles into code that is fit to ship.

A kernel fails when it takes more shared memory than the target has or, on 16-bit inputs, has lost
its tensor-core instructions. On SM80 it also fails when it spills registers, or has lost the
asynchronous copies of a load pipeline (more than one stage), and forward and decode have to fit the
smaller cards that run SM80 code; SM90's configurations are chosen by times, which show what a spill
costs. float32 multiplies in IEEE precision, without tensor cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from typing import Any

from tuning.static.bound import Bound, bound
from tuning.static.resources import Resources, measure
from twin_attention.contract.spec import (
    HEAD_DIM_MIN,
    QUANTIZED_DTYPES,
    AttentionSpec,
    DecodeSpec,
    PagedCache,
    Window,
)
from twin_attention.targets.config import HEAD_DIMS, padded_head_dim, use_configs
from twin_attention.targets.kernels import KERNELS, DecodeConfig, KernelConfig
from twin_attention.targets.target import SHARED_MEMORY_LIMIT, SHARED_MEMORY_OF_SMALLER_CARDS

FRAMEWORKS = {"torch": "torch_attn", "jax": "pallas_attn"}
FLASH_FEATURES = ("full", "causal", "window-softcap", "odd-head-size")
DECODE_FEATURES = (
    "decode", "decode-short", "decode-crowded", "decode-16-tokens", "decode-all-options",
)  # fmt: skip
FEATURES = (*FLASH_FEATURES, *DECODE_FEATURES)
DTYPES = {16: ("bfloat16",), 32: ("float32",), 8: QUANTIZED_DTYPES}

_AOT = {"torch": "tuning.static.triton_aot", "jax": "tuning.static.pallas_aot"}
_WGMMA_ROWS = 64  # a wgmma instruction multiplies this many rows


@dataclass(frozen=True)
class Problem:
    """A row of the configuration tables, with a feature of the kernels that reach it.

    Attributes:
        framework: one of `FRAMEWORKS`.
        target: "sm80" or "sm90".
        dtype: of k and v, one of those of `DTYPES`.
        head_dim: the padded head size of the row.
        feature: one of `FEATURES`.
    """

    framework: str
    target: str
    dtype: str
    head_dim: int
    feature: str

    @property
    def spec(self) -> AttentionSpec | DecodeSpec:
        """A problem that reaches the row and has the feature."""
        return self._decode() if self.feature in DECODE_FEATURES else self._flash()

    def _flash(self) -> AttentionSpec:
        head_dim = self.head_dim - 8 if self.feature == "odd-head-size" else self.head_dim
        capped = self.feature == "window-softcap"
        window = Window() if self.feature == "full" else Window(right=0)
        return AttentionSpec(
            batch=2,
            seq_q=1024,
            seq_kv=1024,
            heads_q=4,
            heads_kv=2,
            head_dim=head_dim,
            head_dim_v=head_dim,
            dtype=self.dtype,
            scale=1 / math.sqrt(head_dim),
            window=Window(left=256, right=128) if capped else window,
            softcap=30.0 if capped else None,
        )

    def _decode(self) -> DecodeSpec:
        """Plainly: one token or 16, small pages, split, or a few keys, or many sequences. With all
        options: 4 tokens, one split.
        """
        plain = self.feature != "decode-all-options"
        tokens = {"decode-16-tokens": 16, "decode-all-options": 4}.get(self.feature, 1)
        capacity = 256 if self.feature == "decode-short" else 1024
        page_size = 16 if plain else 256
        splits = {"decode-short": None, "decode-crowded": None, "decode-all-options": 1}
        crowd = 256 if self.dtype in QUANTIZED_DTYPES else 128
        return DecodeSpec(
            batch=crowd if self.feature == "decode-crowded" else 4,
            tokens=tokens,
            heads_q=16,
            cache=PagedCache(
                num_pages=4096 // page_size,
                page_size=page_size,
                max_pages=capacity // page_size,
                heads=4,
                head_dim=self.head_dim,
                head_dim_v=self.head_dim,
                dtype=self.dtype,
            ),
            dtype="float16" if self.dtype in QUANTIZED_DTYPES else self.dtype,
            scale=1 / math.sqrt(self.head_dim),
            window_left=None if plain else 600,
            softcap=None if plain else 30.0,
            num_splits=splits.get(self.feature, 4),
        )


@dataclass(frozen=True)
class Verdict:
    """One compiled kernel: what it takes, what bounds it, and what is wrong with it."""

    problem: Problem
    kernel: str
    config: KernelConfig
    resources: Resources
    bound: Bound
    failures: tuple[str, ...]


def problems(framework: str, target: str) -> Iterator[Problem]:
    """Every problem that the gate compiles for one framework and target."""
    for features, dtype_bits in ((FLASH_FEATURES, (16, 32)), (DECODE_FEATURES, (8, 16))):
        for bits, head_dim in product(dtype_bits, HEAD_DIMS):
            for dtype, feature in product(DTYPES[bits], features):
                problem = Problem(framework, target, dtype, head_dim, feature)
                size = problem.spec.head_dim
                if size >= HEAD_DIM_MIN and padded_head_dim(size) == head_dim:
                    yield problem


def compiler(framework: str) -> Callable[..., list[tuple[str, KernelConfig, Any]]]:
    """What compiles the kernels of a problem for a target: a framework's `compile_kernels`."""
    return import_module(_AOT[framework]).compile_kernels


def check(problem: Problem, changes: Mapping[str, Mapping[str, int]] = {}) -> list[Verdict]:
    """Compile the kernels of one problem and judge them.

    Args:
        changes: fields of the shipped configurations to change first, by kernel.
    """
    with use_configs(changes, FRAMEWORKS[problem.framework]):
        compiled = compiler(problem.framework)(problem.spec, problem.target)
    verdicts = []
    for kernel, config, binary in compiled:
        resources = measure(binary, problem.target)
        limits = bound(kernel, problem.spec, config, problem.target)
        found = failures(problem, kernel, config, resources)
        verdicts.append(Verdict(problem, kernel, config, resources, limits, found))
    return verdicts


def shared_memory_limit(kernel: str, target: str) -> int:
    """Bytes of shared memory that a block of a kernel may have on every card that it is for."""
    if target == "sm80" and not kernel.startswith("flash_bwd"):
        return SHARED_MEMORY_OF_SMALLER_CARDS
    return SHARED_MEMORY_LIMIT[target]


def failures(
    problem: Problem, kernel: str, config: KernelConfig, resources: Resources
) -> tuple[str, ...]:
    """What is wrong with one compiled kernel; empty when it is fit to ship."""
    target = problem.target
    found = []
    if target == "sm80" and (resources.spill_stores or resources.spill_loads):
        found.append(
            f"spills {resources.spill_stores} B of stores, {resources.spill_loads} B of loads"
        )
    limit = shared_memory_limit(kernel, target)
    if resources.shared > limit:
        found.append(f"{resources.shared} B of shared memory, of {limit}")
    if problem.dtype == "float32" or not KERNELS[kernel].products:
        return tuple(found)
    if isinstance(config, DecodeConfig):
        if not resources.mma + resources.wgmma:
            found.append("no mma.sync or wgmma")
    elif target == "sm90" and getattr(config, KERNELS[kernel].stationary) >= _WGMMA_ROWS:
        if not resources.wgmma:
            found.append("no wgmma")
    elif not resources.mma:
        found.append("no mma.sync")
    if target == "sm80" and config.num_stages > 1 and not resources.cp_async:
        found.append("no cp.async")
    return tuple(found)

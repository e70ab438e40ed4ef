"""Named problems, shared by the tests, the parity harness and the benchmark.

A case's name says what it covers; its suite says how large it is:

- ``quick``: small enough for the frameworks' interpreters on a CPU;
- ``full``: every feature, dtype and awkward size, a few hundred tokens long (contains quick);
- ``large``: sizes that only a GPU takes, tensors past 2^31 elements among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from interop.contract.spec import AttentionSpec, Window

SUITES = ("quick", "full", "large")


@dataclass(frozen=True)
class FlashCase:
    """One call of `flash_attention`.

    Attributes:
        name: unique, and what `--filter` matches.
        batch ... dtype: shapes and dtype of q [B, Sq, Hq, D], k [B, Skv, Hkv, D] and
            v [B, Skv, Hkv, Dv].
        causal, scale, window_size, softcap: the call's options.
        gradients: run the backward as well.
        layout: "contiguous", or "strided" for q, k, v that are views of one packed torch tensor
            (JAX arrays have no strides: there the case runs contiguous).
    """

    name: str
    batch: int = 2
    seq_q: int = 128
    seq_kv: int = 128
    heads_q: int = 2
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    causal: bool = False
    scale: float | None = None
    window_size: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    gradients: bool = True
    layout: str = "contiguous"

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the call."""
        return {
            "causal": self.causal,
            "scale": self.scale,
            "window_size": self.window_size,
            "softcap": self.softcap,
        }

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of q, k and v."""
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        return (
            (self.batch, self.seq_q, self.heads_q, self.head_dim),
            (self.batch, self.seq_kv, self.heads_kv, self.head_dim),
            (self.batch, self.seq_kv, self.heads_kv, head_dim_v),
        )

    @property
    def spec(self) -> AttentionSpec:
        """The problem with its defaults resolved."""
        return AttentionSpec(
            batch=self.batch,
            seq_q=self.seq_q,
            seq_kv=self.seq_kv,
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            head_dim=self.head_dim,
            head_dim_v=self.shapes[2][3],
            dtype=self.dtype,
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            window=Window.of(self.causal, self.window_size),
            softcap=self.softcap,
        )


def flash_cases(suite: str = "quick", pattern: str = "") -> list[FlashCase]:
    """The cases of a suite whose names contain `pattern`."""
    groups = {"quick": [_quick()], "full": [_quick(), _full()], "large": [_large()]}[suite]
    return [case for group in groups for case in group if pattern in case.name]


def _quick() -> Iterator[FlashCase]:
    base = FlashCase("", batch=1, seq_q=160, seq_kv=160, heads_q=2, heads_kv=2)
    yield replace(base, name="bf16")
    yield replace(base, name="bf16-causal", causal=True)
    yield replace(base, name="fp16-causal", causal=True, dtype="float16")
    yield replace(base, name="fp32-causal", causal=True, dtype="float32")
    yield replace(base, name="gqa", heads_q=4, heads_kv=2, causal=True)
    yield replace(base, name="mqa-d128", heads_q=4, heads_kv=1, head_dim=128)
    yield replace(base, name="prime-cross", seq_q=37, seq_kv=131, causal=True)
    yield replace(base, name="more-queries", seq_q=131, seq_kv=37, causal=True)
    yield replace(base, name="window", window_size=(48, 16))
    yield replace(base, name="softcap", softcap=20.0, dtype="float16")
    yield replace(base, name="d80-dv48", head_dim=80, head_dim_v=48)
    yield replace(
        base, name="all-options", seq_q=97, heads_q=4, heads_kv=2, head_dim=72, causal=True,
        window_size=(64, None), softcap=30.0, scale=0.2,
    )  # fmt: skip
    yield replace(base, name="strided", layout="strided", causal=True)
    yield replace(base, name="one-token", seq_q=1, seq_kv=1)
    yield replace(base, name="no-keys", seq_q=5, seq_kv=0)
    yield replace(base, name="no-batch", batch=0)


def _full() -> Iterator[FlashCase]:
    base = FlashCase("", batch=2, seq_q=333, seq_kv=333, heads_q=4, heads_kv=2)
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    for dtype, prefix in short.items():
        for head_dim in (16, 24, 32, 40, 64, 80, 96, 128, 160, 192, 256):
            for causal in (False, True):
                name = f"full-{prefix}-d{head_dim}" + ("-causal" if causal else "")
                yield replace(base, name=name, dtype=dtype, head_dim=head_dim, causal=causal)
        for head_dim, head_dim_v in ((16, 256), (256, 16), (64, 128), (192, 128), (104, 72)):
            name = f"full-{prefix}-d{head_dim}-dv{head_dim_v}"
            yield replace(
                base, name=name, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, causal=True
            )
        for seq_q, seq_kv in ((1, 1), (1, 509), (509, 1), (127, 641), (641, 127), (512, 512),
                              (129, 255), (0, 64), (64, 0)):  # fmt: skip
            for causal in (False, True):
                name = f"full-{prefix}-{seq_q}x{seq_kv}" + ("-causal" if causal else "")
                yield replace(
                    base, name=name, dtype=dtype, seq_q=seq_q, seq_kv=seq_kv, causal=causal
                )
        for window in ((0, 0), (17, 0), (100, 60), (None, 40), (200, None), (0, None), (None, 0)):
            name = f"full-{prefix}-window-{window[0]}-{window[1]}"
            yield replace(base, name=name, dtype=dtype, window_size=window, seq_q=401)
            yield replace(
                base,
                name=name + "-causal",
                dtype=dtype,
                window_size=window,
                causal=True,
                seq_kv=450,
            )
        for softcap in (1.0, 30.0):
            name = f"full-{prefix}-softcap{softcap:g}"
            yield replace(base, name=name, dtype=dtype, softcap=softcap, causal=True)
            yield replace(
                base, name=name + "-window", dtype=dtype, softcap=softcap, window_size=(70, 5),
                head_dim=128,
            )  # fmt: skip
        for heads_q, heads_kv in ((8, 8), (8, 1), (6, 2)):
            name = f"full-{prefix}-heads{heads_q}-{heads_kv}"
            yield replace(base, name=name, dtype=dtype, heads_q=heads_q, heads_kv=heads_kv)
        for scale in (0.0, -0.3, 1.0):
            yield replace(
                base, name=f"full-{prefix}-scale{scale:g}", dtype=dtype, scale=scale, causal=True
            )
        yield replace(base, name=f"full-{prefix}-strided", dtype=dtype, layout="strided")


def _large() -> Iterator[FlashCase]:
    base = FlashCase("", batch=4, seq_q=4096, seq_kv=4096, heads_q=16, heads_kv=16, head_dim=128)
    for causal in (False, True):
        suffix = "-causal" if causal else ""
        yield replace(base, name="large-d128" + suffix, causal=causal)
        yield replace(
            base, name="large-d64" + suffix, heads_q=32, heads_kv=32, head_dim=64, causal=causal
        )
        yield replace(
            base, name="large-d256-gqa" + suffix, batch=1, heads_q=8, heads_kv=2, head_dim=256,
            causal=causal,
        )  # fmt: skip
    # 2^31 elements are passed by the batch stride, and by the row stride within one sequence.
    window = {"window_size": (64, 0), "head_dim": 64}
    yield replace(
        base, name="large-2g-elements-batch", batch=520, seq_q=2048, seq_kv=2048, heads_q=33,
        heads_kv=33, gradients=False, **window,
    )  # fmt: skip
    yield replace(
        base, name="large-2g-elements-rows", batch=1, seq_q=1 << 20, seq_kv=1 << 20, heads_q=33,
        heads_kv=33, **window,
    )  # fmt: skip

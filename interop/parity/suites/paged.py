"""The named problems of `paged_attention`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from twin_attention.interop.parity.cases import PagedCase
from twin_attention.interop.parity.suites.choose import Change, choose, in_dtypes


def paged_cases(suite: str = "small", pattern: str = "") -> list[PagedCase]:
    return choose(suite, pattern, _small_paged, _full_paged, _large_paged)


def _small_paged() -> Iterator[PagedCase]:
    # A chunk in the middle of its prompt, a whole prompt, decodes.
    yield PagedCase("paged-mixed", (170, 41, 90, 1), new_tokens=(37, 41, 1, 1), max_pages=11)
    yield PagedCase(
        "paged-all-options", (150, 9, 70), new_tokens=(20, 9, 2), padding=3, page_size=32,
        dtype="float16", kv_dtype="int8", scale_shape=(2,), window_size=(40, 0), softcap=20.0,
        sinks=True, scale=0.2, num_splits=2,
    )  # fmt: skip
    # Sequences without new tokens, without keys, and with more tokens than keys.
    yield PagedCase(
        "paged-page-7", (60, 33, 0, 4), new_tokens=(20, 0, 3, 7), padding=9, page_size=7,
        max_pages=19, heads_q=6, head_dim=72, head_dim_v=48,
    )  # fmt: skip

    yield PagedCase(
        "paged-tree", (150, 41, 33, 5, 0), new_tokens=(64, 1, 33, 7, 2), padding=3, tree="drafts",
        heads_q=6, max_pages=11,
    )  # fmt: skip
    yield PagedCase(
        "paged-alibi", (90, 41, 3), new_tokens=(37, 1, 3), padding=3, max_pages=6, alibi="all",
        sinks=True, softcap=20.0,
    )  # fmt: skip
    yield PagedCase(
        "paged-ranges", (150, 41, 33, 5, 0), new_tokens=(64, 1, 33, 7, 2), padding=3, ranges="both",
        heads_q=6, max_pages=11, window_size=(20, 0), sinks=True,
    )  # fmt: skip
    yield PagedCase(
        "paged-batch-invariant", (70, 0, 9), new_tokens=(20, 2, 9), padding=2, heads_q=6,
        head_dim=24, sinks=True, batch_invariant=True,
    )  # fmt: skip
    # Keys that are not split, so that explicit kernels have them.
    yield PagedCase(
        "paged-chunks", (200, 70), new_tokens=(70, 5), padding=3, heads_q=8, page_size=32,
        max_pages=7, window_size=(90, 0), sinks=True, num_splits=1,
    )  # fmt: skip


def _full_paged() -> Iterator[PagedCase]:
    yield PagedCase(
        "paged-latent", (90, 41, 3), new_tokens=(37, 1, 3), padding=3, max_pages=6, latent=True,
        head_dim=96, head_dim_v=64, tree="drafts",
    )  # fmt: skip
    base = PagedCase(
        "paged-full", (700, 333, 1, 0, 511, 64), new_tokens=(333, 333, 1, 0, 65, 64), padding=40,
        heads_q=8, page_size=64, max_pages=11,
    )  # fmt: skip
    yield from in_dtypes(base, _full_paged_changes, "float32")


def _full_paged_changes() -> Iterator[Change]:
    for kv_dtype, d in product((None, "int8", "float8_e4m3fn"), (16, 64, 128, 256, 512)):
        yield (
            f"d{d}{'' if kv_dtype is None else '-' + kv_dtype}",
            {"head_dim": d, "kv_dtype": kv_dtype},
        )
    for d in (32, 128, 256):
        yield f"softcap-d{d}", {"head_dim": d, "softcap": 5.0}
    yield "d192-dv128", {"head_dim": 192, "head_dim_v": 128}
    for kv_dtype, (d, dv) in product(("int8", "float8_e4m3fn"), ((128, 64), (64, 16), (32, 256))):
        sizes = {"head_dim": d, "head_dim_v": dv, "kv_dtype": kv_dtype}
        yield f"d{d}-dv{dv}-{kv_dtype}", sizes
    for (d, dv), kv_dtype in product(
        ((576, 512), (320, 256), (64, 64), (72, 40)), (None, "int8", "float8_e4m3fn")
    ):
        sizes = {"head_dim": d, "head_dim_v": dv, "kv_dtype": kv_dtype, "heads_kv": 1}
        yield f"latent-d{d}-dv{dv}-{kv_dtype or 'wide'}", {**sizes, "latent": True}
    many = {"heads_q": 128, "heads_kv": 1, "head_dim": 576, "head_dim_v": 512}
    yield "latent-128-heads", {**many, "latent": True}
    for kv_dtype, alibi in product((None, "int8"), ("heads", "all")):
        sizes = {"alibi": alibi, "kv_dtype": kv_dtype, "window_size": (300, 0)}
        yield f"alibi-{alibi}-{kv_dtype or 'wide'}", sizes
    for size in (1, 48, 256):
        yield f"page{size}", {"page_size": size, "max_pages": -(-701 // size)}
    for heads_q, heads_kv in ((4, 4), (6, 2), (32, 1)):
        yield f"heads{heads_q}-{heads_kv}", {"heads_q": heads_q, "heads_kv": heads_kv}
    for splits in (1, 2, 7):
        yield f"splits{splits}", {"num_splits": splits}
    for d in (80, 128, 256):
        yield f"one-part-d{d}", {"head_dim": d, "num_splits": 1}
    for heads_q, size in ((2, 16), (16, 128), (64, 256)):
        yield (
            f"one-part-heads{heads_q}-page{size}",
            {
                "heads_q": heads_q, "page_size": size, "max_pages": -(-701 // size),
                "softcap": 5.0, "num_splits": 1,
            },
        )  # fmt: skip
    for left in (0, 63, 5000):
        yield f"window{left}", {"window_size": (left, 0)}
    yield "sinks", {"sinks": True, "num_splits": 3}
    for d in (64, 128):
        yield f"invariant-d{d}", {"head_dim": d, "batch_invariant": True}
    for tree, d in product(("drafts", "any"), (64, 128, 256)):
        yield f"tree-{tree}-d{d}", {"tree": tree, "head_dim": d}
    options = {"sinks": True, "softcap": 5.0, "num_splits": 1}
    for kv_dtype in ("int8", "float8_e4m3fn"):
        yield f"tree-{kv_dtype}", {"tree": "drafts", "kv_dtype": kv_dtype, **options}
    for kind, window in (("spans", None), ("any", (100, None))):
        yield f"ranges-{kind}", {"ranges": kind, "window_size": window}
    one_each = {"new_tokens": (1,) * 6, "padding": 0, "tree": "any"}
    yield "tree-one-each", one_each
    # One token each, and more sequences than a step of the search reads offsets of.
    yield "one-each", {"new_tokens": (1,) * 6, "padding": 0, "num_splits": 2}
    many = tuple(i % 5 for i in range(300))
    lengths = tuple(i % 60 for i in range(300))
    yield "300-sequences", {"lengths": lengths, "new_tokens": many, "max_pages": 1}


def _large_paged() -> Iterator[PagedCase]:
    base = PagedCase("", heads_q=32, heads_kv=8, head_dim=128, max_pages=512)
    chunks, decodes = (4096, 8192, 1000), tuple(range(1, 8192, 512))
    yield replace(
        base, name="large-paged-mixed", lengths=(*chunks, *decodes),
        new_tokens=(512, 512, 1000, *(1 for _ in decodes)),
    )  # fmt: skip

"""The named problems of `paged_decode`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from twin_attention.interop.parity.cases import DecodeCase
from twin_attention.interop.parity.suites.choose import Change, choose, in_dtypes

# DeepSeek's latent attention, with fewer query heads.
MLA = {"latent": True, "head_dim": 576, "head_dim_v": 512, "heads_kv": 1}


def decode_cases(suite: str = "small", pattern: str = "") -> list[DecodeCase]:
    return choose(suite, pattern, _small_decode, _full_decode, _large_decode)


def _small_decode() -> Iterator[DecodeCase]:
    # Lengths around a page's end, none at all, and the table's capacity.
    base = DecodeCase("", lengths=(0, 1, 15, 16, 17, 128))
    yield replace(base, name="decode-bf16")
    yield replace(base, name="decode-fp16-one-split", dtype="float16", num_splits=1)
    # Several tiles, so that they are split.
    several = replace(base, lengths=(0, 1, 15, 16, 17, 304), max_pages=19)
    yield replace(base, name="decode-mha-d128", heads_q=2, head_dim=128)
    yield replace(base, name="decode-d80-dv72", head_dim=80, head_dim_v=72, heads_kv=1)
    yield replace(several, name="decode-alibi", alibi="all", tokens=3, sinks=True, num_splits=3)
    yield replace(
        several, name="decode-latent-all-options", latent=True, head_dim=96,
        head_dim_v=64, tokens=3, kv_dtype="float8_e4m3fn", sinks=True, softcap=25.0, cascade=True,
        common_pages=17,
    )  # fmt: skip
    yield replace(base, name="decode-page-7", page_size=7, max_pages=19, lengths=(0, 6, 7, 8, 133))
    yield replace(base, name="decode-int8", kv_dtype="int8", dtype="float16")
    yield replace(base, name="decode-fp8", kv_dtype="float8_e4m3fn", scale_shape=(2,))
    yield replace(
        several, name="decode-all-options", tokens=5, sinks=True, window_size=(150, 0),
        softcap=25.0, scale=0.2, num_splits=4,
    )  # fmt: skip
    yield replace(several, name="decode-tree", tokens=9, tree="drafts", sinks=True, num_splits=2)
    yield replace(
        base, name="decode-cascade", lengths=(140, 0, 128, 17, 144), max_pages=9, sinks=True,
        cascade=True, common_pages=8,
    )  # fmt: skip
    yield replace(
        base, name="decode-batch-invariant", lengths=(70, 0, 128, 1), tokens=17, scale=-0.2,
        batch_invariant=True,
    )  # fmt: skip
    yield replace(base, name="decode-no-sequence", lengths=())


def _full_decode() -> Iterator[DecodeCase]:
    base = DecodeCase("", lengths=(0, 1, 15, 16, 17, 128))
    several = replace(base, lengths=(0, 1, 15, 16, 17, 304), max_pages=19)
    yield replace(several, name="decode-tokens", tokens=4, num_splits=3)
    yield replace(base, name="decode-d512-dv264", head_dim=512, head_dim_v=264, heads_kv=1)
    yield replace(base, name="decode-latent", **MLA)
    base = DecodeCase("decode-full", (0, 1, 63, 64, 65, 511, 700), page_size=64, max_pages=11)
    # So few keys that they are not split.
    few = replace(base, lengths=(0, 1, 63, 64, 65, 128, 129, 255, 256), max_pages=4)
    # As many sequences and kv heads as an H200 runs at once, and several times as many.
    many = replace(base, heads_q=16, heads_kv=8)
    yield from in_dtypes(base, _full_decode_changes, "float32")
    for d in (128, 256):
        sizes = {"heads_q": 10, "heads_kv": 2, "tokens": 8, "head_dim": d}
        yield replace(base, name=f"{base.name}-40-rows-d{d}", **sizes)
    for kv_dtype, d in product(("int8", "float8_e4m3fn"), (16, 32, 256, 512)):
        name = f"{base.name}-{kv_dtype}-d{d}"
        yield replace(base, name=name, kv_dtype=kv_dtype, head_dim=d)
    for kv_dtype, d in product((None, "int8", "float8_e4m3fn"), (64, 128, 256)):
        name = f"{base.name}-short-{kv_dtype or few.dtype}-d{d}"
        yield replace(few, name=name, kv_dtype=kv_dtype, head_dim=d)
    crowds = ((None, 56), ("int8", 96), ("float8_e4m3fn", 96))
    for (kv_dtype, sequences), d in product(crowds, (128, 256)):
        name = f"{base.name}-crowded-{kv_dtype or many.dtype}-d{d}"
        lengths = tuple(11 * i % 700 for i in range(sequences))
        yield replace(many, name=name, kv_dtype=kv_dtype, head_dim=d, lengths=lengths)


def _full_decode_changes() -> Iterator[Change]:
    for d in (16, 32, 64, 72, 96, 128, 192, 256, 512):
        yield f"d{d}", {"head_dim": d}
    for size in (1, 3, 16, 48, 128, 256):
        yield f"page{size}", {"page_size": size, "max_pages": -(-701 // size)}
    for tokens in (1, 2, 3, 8, 16, 64):
        yield f"tokens{tokens}", {"tokens": tokens}
    for tree, tokens in product(("drafts", "any"), (1, 9, 64)):
        yield f"tree-{tree}-{tokens}", {"tree": tree, "tokens": tokens}
    for heads_q, heads_kv in ((1, 1), (8, 8), (8, 1), (6, 2), (32, 2)):
        heads = {"heads_q": heads_q, "heads_kv": heads_kv}
        yield f"heads{heads_q}-{heads_kv}", {**heads, "tokens": 3}
    for splits in (1, 2, 7, 64):
        yield f"splits{splits}", {"num_splits": splits}
    for left in (0, 1, 63, 200, 5000):
        yield f"window{left}", {"window_size": (left, 0), "tokens": 3}
    spans = {"lengths": (2100, 40, 0, 2048, 4099), "max_pages": 65, "num_splits": 2}
    invariant = {**spans, "batch_invariant": True}
    for tokens in (1, 20):
        yield f"invariant-{tokens}", {**invariant, "tokens": tokens}
    yield "invariant-heads", {**invariant, "heads_q": 16, "heads_kv": 16}
    options = {
        "tokens": 4, "sinks": True, "window_size": (300, None), "softcap": 20.0, "head_dim": 128,
    }  # fmt: skip
    scales = (("tensor", ()), ("heads", (2,)))
    for kv_dtype, (kind, shape) in product(("int8", "float8_e4m3fn"), scales):
        cache = {"kv_dtype": kv_dtype, "scale_shape": shape}
        yield f"{kv_dtype}-{kind}", cache
        yield f"{kv_dtype}-{kind}-all-options", {**cache, **options}
        tree = {"tree": "drafts", "tokens": 40, "sinks": True, "softcap": 20.0}
        yield f"{kv_dtype}-{kind}-tree", {**cache, **tree}
    cascade = {"cascade": True, "lengths": (700, 0, 64, 699, 512, 1, 700, 640, 300)}
    for common in (0, 1, 8):
        yield f"cascade-{common}", {**cascade, "common_pages": common}
    for size, tokens in ((7, 1), (48, 3), (128, 8)):
        pages = {"page_size": size, "max_pages": -(-700 // size), "common_pages": 600 // size}
        yield f"cascade-page{size}", {**cascade, **pages, "tokens": tokens, "softcap": 20.0}
    for kv_dtype, d in (("int8", 64), ("float8_e4m3fn", 128), (None, 256)):
        cache = {"kv_dtype": kv_dtype, "head_dim": d, "common_pages": 9, "sinks": True}
        yield f"cascade-{kv_dtype or 'wide'}", {**cascade, **cache}
    tree = {"tree": "drafts", "tokens": 9, "common_pages": 9, "heads_q": 6}
    yield "cascade-tree", {**cascade, **tree}
    for (d, dv), kv_dtype in product(
        ((576, 512), (320, 256), (64, 64), (72, 40)), (None, "int8", "float8_e4m3fn")
    ):
        sizes = {"head_dim": d, "head_dim_v": dv, "kv_dtype": kv_dtype, "tokens": 2}
        yield f"latent-d{d}-dv{dv}-{kv_dtype or 'wide'}", {**MLA, **sizes}
    for kv_dtype, alibi in product((None, "int8", "float8_e4m3fn"), ("heads", "all")):
        yield f"alibi-{alibi}-{kv_dtype or 'wide'}", {"alibi": alibi, "kv_dtype": kv_dtype}
    yield "alibi-all-options", {**options, "alibi": "all"}
    yield "alibi-cascade", {**cascade, "common_pages": 9, "alibi": "heads"}
    yield "latent-64-rows", {**MLA, "heads_q": 64, "num_splits": 3, "window_size": (300, 0)}
    pages = {"page_size": 16, "max_pages": 44, "num_splits": 1}
    yield "latent-64-rows-page16", {**MLA, **pages, "heads_q": 64, "softcap": 20.0}
    yield "latent-128-heads", {**MLA, "heads_q": 128, "tokens": 2, "sinks": True}
    yield "latent-cascade", {**MLA, **cascade, "common_pages": 9, "sinks": True}
    yield "sinks", {"sinks": True}
    yield "softcap", {"softcap": 5.0}
    yield "no-pages", {"max_pages": 0}


def _large_decode() -> Iterator[DecodeCase]:
    base = DecodeCase("", heads_q=32, heads_kv=8, head_dim=128, max_pages=512)
    yield replace(base, name="large-decode-batch", lengths=(8192,) * 32)
    yield replace(base, name="large-decode-ragged", lengths=tuple(range(1, 8192, 257)))
    # 2^31 elements of a pool are passed by page id times page size.
    yield replace(base, name="large-decode-2g-elements", lengths=(8192,) * 260, heads_kv=8)

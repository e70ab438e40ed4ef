"""The named problems of `flash_attention`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.suites.choose import Change, choose, in_dtypes


def flash_cases(suite: str = "small", pattern: str = "") -> list[FlashCase]:
    return choose(suite, pattern, _small, _full, _large)


def _small() -> Iterator[FlashCase]:
    base = FlashCase("", batch=1, seq_q=160, seq_kv=160, heads_q=2, heads_kv=2)
    yield replace(base, name="bf16-causal", causal=True)
    yield replace(base, name="fp32-causal", causal=True, dtype="float32")
    yield replace(base, name="tf32-causal", causal=True, dtype="float32", precision="tf32")
    yield replace(base, name="mqa-d128", heads_q=4, heads_kv=1, head_dim=128)
    yield replace(base, name="softcap-far", softcap=2.0, seq_kv=200, causal=True, sinks=True)
    yield replace(
        base, name="d320-dv512", seq_q=37, seq_kv=50, heads_kv=1, head_dim=320, head_dim_v=512,
        causal=True, sinks=True,
    )  # fmt: skip
    yield replace(
        base, name="all-options", seq_q=97, heads_q=4, heads_kv=2, head_dim=72, causal=True,
        window_size=(64, None), softcap=30.0, sinks=True, scale=0.2,
    )  # fmt: skip
    # Queries without a key, and sinks that are no scores.
    yield replace(
        base, name="row-max", seq_q=131, seq_kv=37, heads_q=4, heads_kv=2, causal=True, sinks=True,
        scale=-0.3, row_max=True,
    )  # fmt: skip
    yield replace(base, name="row-max-softcap", softcap=3.0, row_max=True, dtype="float16")
    yield replace(
        base, name="segments-shuffled", segments="shuffled", batch=2, seq_q=70, seq_kv=90,
        heads_kv=1, dtype="float16",
    )  # fmt: skip
    # Ends before their key, behind all keys, and of no tree.
    yield replace(
        base, name="tree-any", tree="any", batch=2, seq_q=70, seq_kv=90, heads_kv=1, causal=True,
        dtype="float16",
    )  # fmt: skip
    # Ranges outside the keys, backwards and empty.
    yield replace(
        base, name="ranges-any", ranges="any", batch=2, seq_q=70, seq_kv=90, heads_kv=1,
        window_size=(9, 3), dtype="float16",
    )  # fmt: skip
    # Distances on both sides, none of them clipped, with rows that have no key.
    yield replace(
        base, name="relative-wide", relative=300, seq_q=131, seq_kv=37, heads_q=4, heads_kv=2,
        dtype="float16", window_size=(60, 9), terms_in_q_dtype=True,
    )  # fmt: skip
    # The kernel of dq stores the bias gradient, summed over sequences, heads, rows and keys.
    yield replace(base, name="bias", bias="bhqk", causal=True, heads_q=4)
    yield replace(
        base, name="bias-keys", bias="bk", seq_q=61, seq_kv=97, dtype="float32", head_dim=32,
        window_size=(40, 9),
    )  # fmt: skip
    yield replace(
        base, name="bias-all-options", bias="qk", relative=20, alibi="all", batch=2,
        segments="documents", tree="nested", seq_q=97, heads_kv=1, head_dim=72, head_dim_v=48,
        causal=True, window_size=(40, None), softcap=30.0, sinks=True, scale=0.2,
        dropout_rate=0.2, dtype="float16",
    )  # fmt: skip
    yield replace(base, name="deterministic", causal=True, deterministic=True)
    yield replace(
        base, name="batch-invariant", seq_q=70, seq_kv=130, heads_q=3, heads_kv=1, head_dim_v=88,
        window_size=(9, 30), sinks=True, row_max=True, batch_invariant=True,
    )  # fmt: skip
    yield replace(base, name="strided", layout="strided", causal=True)
    yield replace(base, name="one-token", seq_q=1, seq_kv=1)
    yield replace(base, name="no-keys", seq_q=5, seq_kv=0)
    yield replace(base, name="no-batch", batch=0)


def _full() -> Iterator[FlashCase]:
    base = FlashCase("", batch=1, seq_q=160, seq_kv=160, heads_q=2, heads_kv=2)
    yield replace(
        base, name="segments-all-options", segments="documents", seq_q=97, heads_q=4, head_dim=72,
        head_dim_v=48, causal=True, window_size=(40, None), softcap=30.0, sinks=True, scale=0.2,
        deterministic=True,
    )  # fmt: skip
    yield replace(
        base, name="ranges-all-options", ranges="both", bias="qk", relative=20, alibi="heads",
        batch=2, segments="documents", tree="nested", depths=True, seq_q=97, heads_q=4, head_dim=72,
        head_dim_v=48, causal=True, window_size=(20, None), softcap=30.0, sinks=True, scale=0.2,
        dropout_rate=0.2,
    )  # fmt: skip
    yield replace(base, name="relative-one", relative=0, dtype="float32", head_dim=32)
    yield replace(
        base, name="dropout-all-options", dropout_rate=0.5, seq_q=61, seq_kv=97, head_dim=72,
        head_dim_v=48, dtype="float16", window_size=(40, 9), relative=20, softcap=30.0, sinks=True,
    )  # fmt: skip
    yield replace(
        base, name="terms-all-options", relative=31, alibi="all", batch=2, segments="documents",
        tree="nested", seq_q=97, heads_q=4, head_dim=72, head_dim_v=48, causal=True,
        window_size=(40, None), softcap=30.0, sinks=True, scale=0.2, deterministic=True,
    )  # fmt: skip
    yield replace(
        base, name="tree-all-options", tree="nested", depths=True, segments="documents", seq_q=97,
        heads_q=4, head_dim=72, head_dim_v=48, causal=True, window_size=(40, None), softcap=30.0,
        sinks=True, scale=0.2, deterministic=True,
    )  # fmt: skip
    yield replace(base, name="bf16")
    yield replace(base, name="fp16-causal", causal=True, dtype="float16")
    yield replace(base, name="gqa", heads_q=4, heads_kv=2, causal=True)
    yield replace(base, name="prime-cross", seq_q=37, seq_kv=131, causal=True)
    yield replace(base, name="more-queries", seq_q=131, seq_kv=37, causal=True)
    yield replace(base, name="window", window_size=(48, 16))
    yield replace(base, name="softcap", softcap=20.0, dtype="float16")
    yield replace(base, name="d80-dv48", head_dim=80, head_dim_v=48)
    # Queries without a key among them.
    yield replace(
        base, name="sinks", seq_q=131, seq_kv=37, heads_q=4, heads_kv=2, causal=True, sinks=True
    )
    yield replace(base, name="segments", segments="documents", causal=True)
    yield replace(base, name="tree", tree="nested", causal=True)
    yield replace(base, name="ranges", ranges="both", causal=True)
    yield replace(base, name="relative", relative=20, causal=True)
    yield replace(base, name="alibi", alibi="heads", causal=True)
    yield replace(base, name="bias-pairs", bias="hqk", seq_kv=97, batch=2, terms_in_q_dtype=True)
    # SM90's forward reads the bias by TMA: a fence, then a barrier.
    yield replace(
        base, name="bias-segments", bias="qk", segments="documents", batch=2, seq_q=131, seq_kv=208,
        heads_q=4, head_dim=120, causal=True, dropout_rate=0.1,
    )  # fmt: skip
    yield replace(base, name="dropout", dropout_rate=0.2, causal=True, heads_q=4)
    base = FlashCase("full", 2, 333, 333, heads_q=4, heads_kv=2)
    yield from in_dtypes(base, _full_changes)
    invariant = replace(base, causal=True, batch_invariant=True)
    for d in (64, 128):
        yield replace(invariant, name=f"full-invariant-d{d}", head_dim=d)
    base = replace(base, dtype="float32", precision="tf32")
    for name, changes in _full_tf32_changes():
        yield replace(base, name=f"full-tf32-{name}", **changes)


def _full_tf32_changes() -> Iterator[Change]:
    for d, causal in product((16, 32, 40, 64, 80, 96, 128, 192, 256, 512), (False, True)):
        yield f"d{d}{'-causal' if causal else ''}", {"head_dim": d, "causal": causal}
    yield "d64-dv128", {"head_dim": 64, "head_dim_v": 128, "causal": True}
    for seq_q, seq_kv in ((1, 1), (1, 509), (509, 1), (127, 641), (641, 127), (0, 64), (64, 0)):
        yield f"{seq_q}x{seq_kv}", {"seq_q": seq_q, "seq_kv": seq_kv, "causal": True}
    for d in (32, 64, 128, 256):
        yield f"softcap-d{d}", {"softcap": 5.0, "head_dim": d, "causal": True}
    yield "window", {"window_size": (70, 5)}
    yield "sinks", {"sinks": True, "causal": True}
    yield "segments", {"segments": "documents", "causal": True}
    yield "tree", {"tree": "nested", "causal": True}
    yield "heads8-1", {"heads_q": 8, "heads_kv": 1}
    yield "scale-0.3", {"scale": -0.3}
    yield "strided", {"layout": "strided"}


def _full_changes() -> Iterator[Change]:
    masks = (("", {}), ("-causal", {"causal": True}))
    sizes = (16, 24, 32, 40, 64, 80, 96, 112, 128, 160, 192, 240, 256, 320, 512)
    for d, (mask, causal) in product(sizes, masks):
        yield f"d{d}{mask}", {"head_dim": d, **causal}
    for d, dv in ((16, 256), (256, 16), (512, 264), (64, 128), (192, 128), (104, 72)):
        yield f"d{d}-dv{dv}", {"head_dim": d, "head_dim_v": dv, "causal": True}
    lengths = (
        (1, 1), (1, 509), (509, 1), (127, 641), (641, 127), (512, 512), (129, 255), (0, 64),
        (64, 0),
    )  # fmt: skip
    for (seq_q, seq_kv), (mask, causal) in product(lengths, masks):
        yield f"{seq_q}x{seq_kv}{mask}", {"seq_q": seq_q, "seq_kv": seq_kv, **causal}
    for d, (mask, causal) in product((16, 40, 64, 128), masks):  # dq summed in any order
        yield f"130x2100-d{d}{mask}", {"seq_q": 130, "seq_kv": 2100, "head_dim": d, **causal}
    long = {"seq_q": 130, "seq_kv": 1100, "head_dim": 256}
    yield "130x1100-d256-causal", {**long, "causal": True}  # with fewer keys another row
    yield "130x1100-d256-window-20-5", {**long, "window_size": (20, 5)}
    for window in ((0, 0), (17, 0), (100, 60), (None, 40), (200, None), (0, None), (None, 0)):
        name = f"window-{window[0]}-{window[1]}"
        yield name, {"window_size": window, "seq_q": 401}
        yield f"{name}-causal", {"window_size": window, "causal": True, "seq_kv": 450}
    for cap in (1.0, 30.0):
        yield f"softcap{cap:g}", {"softcap": cap, "causal": True}
        yield f"softcap{cap:g}-window", {"softcap": cap, "window_size": (70, 5), "head_dim": 128}
    for d in (16, 32):
        yield f"softcap-d{d}", {"softcap": 5.0, "head_dim": d}
    sinks = {"sinks": True, "causal": True}
    yield "sinks", sinks
    yield "sinks-641x127", {**sinks, "seq_q": 641, "seq_kv": 127}
    yield "sinks-64x0", {**sinks, "seq_q": 64, "seq_kv": 0}
    yield "sinks-softcap", {**sinks, "softcap": 5.0, "head_dim": 128}
    yield "sinks-window", {"sinks": True, "window_size": (70, 5)}
    for d in (64, 128, 256):
        yield f"row-max-d{d}", {"row_max": True, "head_dim": d, "causal": True}
    yield "row-max-sinks", {**sinks, "row_max": True, "seq_q": 641, "seq_kv": 127}
    yield "row-max-softcap", {"row_max": True, "softcap": 5.0, "window_size": (70, 5)}
    yield "row-max-64x0", {"row_max": True, "seq_q": 64, "seq_kv": 0}
    for d in (16, 32, 64, 128, 256):
        documents = {"segments": "documents", "head_dim": d}
        yield f"segments-d{d}", {**documents, "causal": True}
    yield "segments-shuffled", {"segments": "shuffled", "seq_kv": 401, "sinks": True}
    yield "segments-softcap", {"segments": "documents", "softcap": 5.0, "head_dim": 128}
    yield "segments-window", {"segments": "shuffled", "window_size": (70, 5)}
    for d in (16, 32, 64, 128, 256):
        yield f"tree-d{d}", {"tree": "nested", "head_dim": d, "causal": True}
    tree = {"tree": "nested", "seq_q": 641, "seq_kv": 641, "causal": True}
    yield "tree-641", {**tree, "sinks": True}
    yield "tree-window", {**tree, "window_size": (70, None)}
    for d in (64, 128):
        yield (
            f"tree-depths-d{d}",
            {**tree, "window_size": (70, None), "depths": True, "head_dim": d},
        )
        yield f"tree-any-d{d}", {**tree, "tree": "any", "seq_q": 333, "head_dim": d, "softcap": 5.0}
    yield "tree-any-depths", {**tree, "tree": "any", "window_size": (70, None), "depths": True}
    ranges = {"causal": True, "window_size": (70, None), "seq_q": 641, "seq_kv": 641}
    for kind, d in product(("prefix", "spans", "both", "any"), (64, 128)):
        yield f"ranges-{kind}-d{d}", {**ranges, "ranges": kind, "head_dim": d}
    yield "ranges-segments", {**ranges, "ranges": "spans", "segments": "documents"}
    yield "ranges-tree", {**tree, "ranges": "both"}
    yield "ranges-bias", {"ranges": "any", "bias": "hqk", "causal": True, "relative": 9}
    yield "tree-segments", {**tree, "segments": "documents"}
    for d in (16, 32, 64, 128, 256, 512):
        yield f"relative-d{d}", {"relative": 50, "head_dim": d, "causal": True}
    for radius in (0, 1, 64, 700):
        yield f"relative-{radius}", {"relative": radius, "seq_kv": 450, "alibi": "heads"}
    yield "relative-641x127", {"relative": 30, "seq_q": 641, "seq_kv": 127, "causal": True}
    yield "relative-64x0", {"relative": 30, "seq_q": 64, "seq_kv": 0}
    yield "relative-softcap", {"relative": 128, "softcap": 5.0, "terms_in_q_dtype": True}
    yield "relative-segments", {"relative": 20, "segments": "shuffled", "window_size": (70, 5)}
    yield "relative-tree", {"relative": 20, "tree": "any", "causal": True, "sinks": True}
    for d in (64, 128):
        yield f"alibi-d{d}", {"alibi": "all", "head_dim": d, "causal": True, "row_max": True}
    for d in (16, 32, 64, 128, 256, 512):
        yield f"bias-d{d}", {"bias": "hqk", "head_dim": d}
    for axes in ("", "h", "q", "k", "bq", "hk", "qk", "hqk", "bhqk"):
        yield f"bias-{axes}", {"bias": axes, "seq_kv": 450, "terms_in_q_dtype": True}
    yield "bias-641x127", {"bias": "bhqk", "seq_q": 641, "seq_kv": 127, "causal": True}
    yield "bias-64x0", {"bias": "hqk", "seq_q": 64, "seq_kv": 0}
    yield "bias-1x300", {"bias": "bhqk", "seq_q": 1, "seq_kv": 300}
    yield "bias-softcap", {"bias": "qk", "softcap": 5.0, "heads_q": 8, "heads_kv": 1}
    yield "bias-segments", {"bias": "bhqk", "segments": "shuffled", "window_size": (70, 5)}
    yield "bias-tree", {"bias": "hqk", "tree": "any", "causal": True, "sinks": True, "relative": 9}
    for d in (64, 128, 192, 256):  # with a bias whose rows begin at multiples of 16 bytes
        pair = {"seq_q": 160, "seq_kv": 320, "heads_q": 6, "head_dim": d}
        yield f"bias-alibi-d{d}", {**pair, "bias": "bhqk", "alibi": "heads"}
        yield f"bias-relative-d{d}", {**pair, "bias": "hqk", "relative": 31}
        yield f"alibi-relative-d{d}", {**pair, "alibi": "all", "relative": 31}
        ordered = {**pair, "alibi": "all", "relative": 31, "deterministic": True}
        yield f"alibi-relative-deterministic-d{d}", ordered
        lists = {"segments": "documents", "tree": "any", "causal": True, "seq_q": 320}
        yield f"bias-tree-segments-d{d}", {**pair, **lists, "bias": "qk", "scale": -0.07}
        yield f"relative-tree-segments-d{d}", {**pair, **lists, "relative": 31}
    for d in (16, 32, 64, 128, 256, 512):
        yield f"dropout-d{d}", {"dropout_rate": 0.1, "head_dim": d, "causal": True}
    dropout = {"dropout_rate": 0.3}
    yield "dropout-641x127", {**dropout, "seq_q": 641, "seq_kv": 127, "sinks": True}
    yield "dropout-64x0", {**dropout, "seq_q": 64, "seq_kv": 0}
    yield "dropout-softcap", {**dropout, "softcap": 5.0, "window_size": (70, 5), "row_max": True}
    yield "dropout-terms", {**dropout, "relative": 64, "alibi": "all", "segments": "shuffled"}
    yield "dropout-tree", {**dropout, "tree": "any", "causal": True, "seq_q": 333}
    yield "dropout-heads8-1", {"dropout_rate": 0.9, "heads_q": 8, "heads_kv": 1}
    for heads_q, heads_kv in ((8, 8), (8, 1), (6, 2)):
        yield f"heads{heads_q}-{heads_kv}", {"heads_q": heads_q, "heads_kv": heads_kv}
    for mask, causal in masks:  # several tiles for each SM
        many = {"batch": 8, "heads_q": 20, "heads_kv": 10, **causal}
        yield f"many-tiles{mask}", many
        yield f"many-tiles-130x2100{mask}", {**many, "seq_q": 130, "seq_kv": 2100}
        yield f"few-kv-heads{mask}", {"seq_kv": 2100, "heads_q": 8, "heads_kv": 1, **causal}
    for d in (64, 96, 128, 256):  # and each of many steps
        long = {"seq_q": 200, "seq_kv": 8300, "head_dim": d, "causal": True}
        long |= {"batch": 8, "heads_q": 10, "gradients": False}
        yield f"many-long-tiles-d{d}", long
        options = {"window_size": (8250, None), "softcap": 5.0, "sinks": True}
        yield f"many-long-tiles-all-options-d{d}", {**long, **options}
    for d in (120, 128):  # few kv heads
        window = {"window_size": (300, 50), "head_dim": d, "heads_q": 8, "heads_kv": 1}
        yield f"few-kv-heads-window-d{d}", {"seq_kv": 2100, **window}
    for scale in (0.0, -0.3, 1.0):
        yield f"scale{scale:g}", {"scale": scale, "causal": True}
    for d in (136, 192, 256):  # with a kernel each for dq, dk and dv
        options = {"window_size": (70, 5), "softcap": 5.0, "sinks": True}
        yield f"all-options-d{d}", {"head_dim": d, "seq_kv": 450, **options}
        yield f"d{d}-641x127-causal", {"head_dim": d, "seq_q": 641, "seq_kv": 127, "causal": True}
    for d in (64, 96, 128, 256):
        yield f"deterministic-d{d}", {"head_dim": d, "causal": True, "deterministic": True}
    yield "strided", {"layout": "strided"}


def _large() -> Iterator[FlashCase]:
    base = FlashCase("", batch=4, seq_q=4096, seq_kv=4096, heads_q=16, heads_kv=16, head_dim=128)
    d256 = replace(base, batch=1, heads_q=8, heads_kv=2, head_dim=256)
    for causal in (False, True):
        suffix = "-causal" if causal else ""
        heads = {"heads_q": 32, "heads_kv": 32, "head_dim": 64}
        yield replace(base, name="large-d128" + suffix, causal=causal)
        yield replace(base, name="large-d64" + suffix, causal=causal, **heads)
        yield replace(d256, name="large-d256-gqa" + suffix, causal=causal)
    # 2^31 elements are passed by the batch stride, and by the row stride within one sequence.
    base = replace(base, window_size=(64, 0), head_dim=64, heads_q=33, heads_kv=33)
    yield replace(
        base, name="large-2g-elements-batch", batch=520, seq_q=2048, seq_kv=2048, gradients=False
    )
    yield replace(base, name="large-2g-elements-rows", batch=1, seq_q=1 << 20, seq_kv=1 << 20)
    heads = {"heads_q": 33, "heads_kv": 3, "head_dim": 192}
    yield replace(base, name="large-2g-elements-d192", batch=170, seq_q=2048, seq_kv=2048, **heads)

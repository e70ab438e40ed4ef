"""Small problems for both sides' transformations."""

from __future__ import annotations

from typing import Any

from twin_attention.interop.parity.cases import FlashCase, VarlenCase
from twin_attention.interop.parity.inputs import Tensors, make_inputs

SIZES: dict[str, Any] = {
    "batch": 2, "seq_q": 9, "seq_kv": 11, "head_dim": 16, "head_dim_v": 24, "dtype": "float32",
}  # fmt: skip
IN_A_TREE: dict[str, Any] = {"tree": "nested", "depths": True, "window_size": (3, None)}
CASES = {
    "segments": FlashCase("segments", **SIZES, segments="shuffled"),
    "tree": FlashCase("tree", **SIZES, causal=True, **IN_A_TREE),
    "ranges": FlashCase("ranges", **SIZES, window_size=(1, 0), ranges="any"),
    "terms": FlashCase("terms", **SIZES, causal=True, relative=3, alibi="heads"),
    "own slopes": FlashCase("own slopes", **SIZES, causal=True, relative=3, alibi="all"),
    "dropout": FlashCase("dropout", **SIZES, causal=True, bias="hqk", dropout_rate=0.3),
}
OF_SEQUENCES: dict[str, Any] = {
    "lengths": ((5, 6), (4, 4)), "padding": (0, 1), "head_dim": 16, "dtype": "float32",
}  # fmt: skip
PACKED = {
    "tree": VarlenCase("packed tree", **OF_SEQUENCES, **IN_A_TREE),
    "ranges": VarlenCase("packed ranges", **OF_SEQUENCES, window_size=(1, 0), ranges="any"),
    "terms": VarlenCase("packed terms", **OF_SEQUENCES, relative=3, alibi="all"),
    "row_max": VarlenCase("packed row maxima", **OF_SEQUENCES, row_max=True),
}
MAPPED = {
    "segments": "kv_segment_ids", "tree": "kv_ends", "ranges": "q_ranges",
    "terms": "relative_bias", "own slopes": "relative_bias", "dropout": "bias",
}  # fmt: skip


def operands_of(case: FlashCase | VarlenCase, device: str = "cpu") -> Tensors:
    """Padding holds numbers too."""
    inputs = make_inputs(case, device)
    return {
        name: x.nan_to_num(1.0) if x.is_floating_point() else x
        for name, x in inputs.items()
        if name not in ("dout", "dlse")
    }

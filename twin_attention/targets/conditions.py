"""The conditions of the configuration tables: which problems a row is for, beyond its sizes."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TypeGuard

from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.spec import AttentionSpec, VarlenSpec, Window
from twin_attention.targets.invariant import SPAN
from twin_attention.targets.kernels import Spec
from twin_attention.targets.steps import keys_of_query
from twin_attention.targets.target import NUM_SMS

# Up to this many keys, one program is faster than a split plus a merge launch.
KEYS_OF_ONE_SPLIT = 256


def _has_terms(spec: Spec) -> bool:
    """Terms and dropout need more registers."""
    return isinstance(spec, AttentionSpec) and (bool(spec.terms) or spec.dropout is not None)


def _has_keys(count: int) -> Callable[[Spec], bool]:
    """Return the condition of at least `count` keys.

    N packed sequences of T keys count as 2T / (N + 1): the expected length of a random key's
    sequence.
    """

    def has_keys(spec: Spec) -> bool:
        sequences = spec.num_sequences if isinstance(spec, VarlenSpec) else 1
        # Results go from one kernel to the next, so all parts count as the queries of each.
        keys = "seq_q" if spec.is_part else "seq_kv"
        return isinstance(spec, AttentionSpec) and 2 * getattr(spec, keys) >= count * (
            sequences + 1
        )

    return has_keys


def _sees_on_average(count: int) -> Callable[[Spec], bool]:
    """Queries see at least `count` keys on average; parts count as in `_has_keys`."""

    def sees_on_average(spec: Spec) -> bool:
        if not isinstance(spec, AttentionSpec):
            return False
        return (spec.seq_q if spec.is_part else keys_of_query(spec)) >= count

    return sees_on_average


def _sees_keys(count: int) -> Callable[[Spec], bool]:
    """A dense batch's last query sees at least `count` keys."""

    def sees_keys(spec: Spec) -> bool:
        if not isinstance(spec, AttentionSpec) or spec.is_packed:
            return False
        return len(spec.visible_keys(spec.seq_q - 1)) >= count

    return sees_keys


def _has_many_rows(spec: Spec) -> bool:
    """A decode has more than 32 query rows (tokens × query heads) per kv head."""
    return isinstance(spec, DecodeSpec) and spec.rows > 32


def _has_few_keys(spec: Spec) -> bool:
    """A decode is too short to split, with an SM of an A100 per program."""
    return (
        _chooses_splits(spec)
        and spec.batch * spec.heads_kv <= NUM_SMS["sm80"]
        and spec.reach <= KEYS_OF_ONE_SPLIT
    )


def _has_many_programs(spec: Spec) -> bool:
    """A decode trades pipeline depth for occupancy.

    Otherwise its last wave would leave most SMs of an H200 idle.
    """
    if not _chooses_splits(spec):
        return False
    rows, programs = spec.rows, spec.batch * spec.heads_kv
    large = max(spec.head_dim, spec.head_dim_v) > 128
    if spec.cache.is_quantized:
        return (384 if large else 640) < programs <= 2048
    if large:
        return 384 < programs <= 528 and rows <= 16
    return programs > 384 and (programs <= 640 or rows > 16)


def _has_few_spans(spec: Spec) -> bool:
    """With `batch_invariant`, the spans of a decode have an SM of an H200 each."""
    if not (isinstance(spec, DecodeSpec) and spec.batch_invariant):
        return False
    spans = -(-spec.cache.capacity // SPAN)
    return spans * spec.batch * spec.heads_kv <= NUM_SMS["sm90"]


def _chooses_splits(spec: Spec) -> TypeGuard[DecodeSpec]:
    """The shapes of a decode of few query rows choose its splits.

    With `num_splits` given, the rest of the batch must not change a sequence's result.
    """
    return isinstance(spec, DecodeSpec) and not _has_many_rows(spec) and spec.num_splits is None


# What the tables' column `when` may say.
CONDITIONS: dict[str, Callable[[Spec], bool]] = {
    "softcap": lambda x: isinstance(x, AttentionSpec | DecodeSpec) and x.softcap is not None,
    "tf32": lambda x: isinstance(x, AttentionSpec) and x.precision == "tf32",
    "window": lambda x: isinstance(x, AttentionSpec) and x.window != Window(),
    "segments": lambda x: isinstance(x, AttentionSpec) and x.segmented,
    "tree": lambda x: isinstance(x, AttentionSpec) and (x.tree or x.ranges > 0),
    "terms": _has_terms,
    "wide bias": lambda x: isinstance(x, AttentionSpec) and x.wide_bias,
    "batch invariant": lambda x: isinstance(x, AttentionSpec | DecodeSpec) and x.batch_invariant,
    "few spans": _has_few_spans,
    "block mask": attrgetter("has_lists"),
    "packed": attrgetter("is_packed"),
    "part": attrgetter("is_part"),
    ">= 1024 keys": _has_keys(1024),
    ">= 2048 keys": _has_keys(2048),
    "sees 8192 keys": _sees_keys(8192),
    "sees 640 keys on average": _sees_on_average(640),
    "> 32 rows": _has_many_rows,
    "<= 256 keys": _has_few_keys,
    "many programs": _has_many_programs,
}

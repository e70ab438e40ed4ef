"""A second oracle: the formulas once more in numpy, a head at a time, in float64.

It shares no code with `contract.reference`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from twin_attention.interop.parity.cases import (
    BlockSparseCase,
    Case,
    DecodeCase,
    FlashCase,
    PagedCase,
    VarlenCase,
)
from twin_attention.interop.parity.inputs import TANGENTS, Tensors

Arrays = dict[str, np.ndarray]


class OneSequence(NamedTuple):
    """One sequence: where its queries, keys and rows of the log-sum-exp are in each array."""

    queries: Any
    keys: Any
    rows: Any
    batch: int


def formulas(case: Case, inputs: Arrays) -> Arrays | None:
    """Return out, lse, their tangents and gradients in float64; None for a case without formula."""
    if not is_known(case):
        return None
    tangents = {x: inputs[t] for t, x in TANGENTS.items() if t in inputs}
    if tangents:
        plain = {x: y for x, y in inputs.items() if x not in TANGENTS}
        found = formulas(case, plain)
        assert found is not None
        return found | _differences(case, plain, tangents)
    shape = inputs["q"].shape
    if isinstance(case, DecodeCase):
        inputs = _unpaged(case, inputs)
    sinks = inputs.get("sinks")
    q, v = inputs["q"], inputs["v"]
    of_rows = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    found = {"out": np.zeros((*q.shape[:-1], v.shape[-1])), "lse": np.zeros(of_rows)}
    found["lse"][:] = -np.inf if sinks is None else sinks[:, None]
    if "dout" in inputs:
        names = [x for x in ("q", "k", "v", "sinks", "bias", "relative_bias") if x in inputs]
        found |= {f"d{x}": np.zeros(inputs[x].shape) for x in names}
        if sinks is not None and "dlse" in inputs and isinstance(case, VarlenCase):
            found["dsinks"] += inputs["dlse"][:, inputs["cu_seqlens_q"][-1] :].sum(1)
    for one in _sequences(case, inputs):
        for head in range(q.shape[-2]):
            _add_head(case, inputs, found, one, head)
    if isinstance(case, DecodeCase) and not isinstance(case, PagedCase):
        found["out"] = found["out"].reshape(*shape[:-1], v.shape[-1])
        of_tokens = found["lse"].reshape(q.shape[-2], shape[0], *shape[1:-2])
        found["lse"] = np.swapaxes(of_tokens, 0, 1)
    return found


def _differences(case: Case, inputs: Arrays, tangents: Arrays) -> Arrays:
    """Return the tangents of out and lse by central differences of fourth order, 0 of -inf."""
    step, found = 1e-4, {"tout": 0.0, "tlse": 0.0}
    inputs = {x: y for x, y in inputs.items() if x not in ("dout", "dlse")}
    for n, weight in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
        moved = {x: inputs[x] + n * step * dx for x, dx in tangents.items()}
        for x, y in (formulas(case, inputs | moved) or {}).items():
            found[f"t{x}"] += weight / (12 * step) * np.where(np.isinf(y), 0.0, y)
    return found


def confirm(case: Case, inputs: Tensors, ref: Tensors) -> None:
    """Raise AssertionError if the float64 oracle's results are not these formulas'."""
    arrays = {x: (y.double() if y.is_floating_point() else y).cpu().numpy()
              for x, y in inputs.items()}  # fmt: skip
    for name, x in (formulas(case, arrays) or {}).items():
        if not np.allclose(x, ref[name].cpu().numpy(), 1e-6, 1e-6, equal_nan=True):
            raise AssertionError(f"two oracles disagree on {name}")


def visible(
    case: Any, inputs: Arrays, one: OneSequence, seq_q: int, seq_kv: int, head: int = 0
) -> np.ndarray:
    """Return the mask [Sq, Skv] of a head of a sequence."""
    window = getattr(case, "window_size", None) or (None, None)
    left, right = window
    if getattr(case, "causal", True):
        right = 0 if right is None else min(right, 0)
    key = np.arange(seq_kv)
    position = np.arange(seq_q)[:, None] + seq_kv - seq_q
    seen = np.ones((seq_q, seq_kv), bool)
    if left is not None:
        seen &= key >= position - left
    if right is not None:
        seen &= key <= position + right
    if "kv_ends" in inputs:
        seen &= position < inputs["kv_ends"][one.keys]
    if "q_ranges" in inputs:
        for begins, ends in np.moveaxis(inputs["q_ranges"][one.queries], (1, 2), (0, 1)):
            seen |= (begins[:, None] <= key) & (key < ends[:, None])
    if "q_segment_ids" in inputs:
        ids, others = (inputs[f"{x}_segment_ids"][one.batch] for x in ("q", "kv"))
        seen &= (ids[:, None] == others) & (ids[:, None] >= 0)
    if "block_mask" in inputs:
        tiles = inputs["block_mask"]
        tiles = tiles[min(one.batch, len(tiles) - 1), min(head, tiles.shape[1] - 1)]
        seen &= np.kron(tiles, np.ones((case.tile_q, case.tile_kv), bool))[:seq_q, :seq_kv]
    return seen


def is_known(case: Case) -> bool:
    if type(case) not in (FlashCase, BlockSparseCase, VarlenCase, DecodeCase, PagedCase):
        return False
    asked = ["dropout_rate", "row_max", "depths", "kv_dtype", "cascade", "latent"]
    if isinstance(case, DecodeCase):
        asked += ["tree", "alibi"]
    return not any(getattr(case, x, None) for x in asked)


def _sequences(case: Case, inputs: Arrays) -> Iterator[OneSequence]:
    if isinstance(case, FlashCase):
        for b in range(case.batch):
            yield OneSequence((b,), (b,), (b,), b)
        return
    ends = [inputs[f"cu_seqlens_{x}"] for x in ("q", "kv")]
    for b in range(len(ends[0]) - 1):
        queries, keys = (slice(*x[b : b + 2]) for x in ends)
        yield OneSequence((queries,), (keys,), (slice(None), queries), b)


def _add_head(case: Any, inputs: Arrays, found: Arrays, one: OneSequence, head: int) -> None:
    kv_head = head // (inputs["q"].shape[-2] // inputs["k"].shape[-2])
    q, out = (x[one.queries][:, head] for x in (inputs["q"].astype(np.float64), found["out"]))
    k, v = (inputs[x][one.keys][:, kv_head].astype(np.float64) for x in "kv")
    lse = found["lse"][one.rows][head]
    scale = q.shape[-1] ** -0.5 if case.scale is None else case.scale
    distance = np.arange(len(k)) - (np.arange(len(q))[:, None] + len(k) - len(q))
    seen = visible(case, inputs, one, len(q), len(k), head)
    q, k, v = (np.where(np.isnan(x), 0.0, x) for x in (q, k, v))  # of padding, which nobody sees
    s = scale * q @ k.T
    if "bias" in inputs:
        bias = [
            n if size > 1 else 0
            for n, size in zip((one.batch, head), inputs["bias"].shape, strict=False)
        ]
        s = s + inputs["bias"][tuple(bias)]
    if "relative_bias" in inputs:
        radius = inputs["relative_bias"].shape[1] // 2
        place = distance.clip(-radius, radius) + radius
        s = s + inputs["relative_bias"][head][place]
    if "alibi_slopes" in inputs:
        slopes = inputs["alibi_slopes"]
        s = s - (slopes[one.batch] if slopes.ndim == 2 else slopes)[head] * np.abs(distance)
    slope = 1.0
    if case.softcap is not None:
        s = np.tanh(s / case.softcap)
        slope, s = 1 - s**2, case.softcap * s
    s = np.where(seen, s, -np.inf)
    sink = inputs["sinks"][head] if "sinks" in inputs else -np.inf
    largest = np.maximum(s.max(1, initial=-np.inf), sink)
    with np.errstate(invalid="ignore", divide="ignore"):
        shift = np.where(np.isfinite(largest), largest, 0.0)
        e, of_sink = np.exp(s - shift[:, None]), np.exp(sink - shift)
        total = e.sum(1) + of_sink
        lse[:] = np.log(total) + shift
        # Not exp(s - lse): lse may be so large that it does not hold log(total).
        p = np.where(total[:, None] > 0, e / total[:, None], 0.0)
        p_sink = np.where(total > 0, of_sink / total, 0.0)
    out[:] = p @ v
    if "dout" not in inputs:
        return
    is_seen = seen.any(1, keepdims=True)
    dout = np.where(is_seen, inputs["dout"][one.queries][:, head].astype(np.float64), 0.0)
    delta = (dout * out).sum(1)
    if "dlse" in inputs:
        dlse = inputs["dlse"][one.rows][head].astype(np.float64)
        delta = delta - np.where(np.isneginf(lse), 0.0, dlse)
    ds = p * (dout @ v.T - delta[:, None]) * slope
    ds = np.where(seen, ds, 0.0)
    found["dq"][one.queries][:, head] += scale * ds @ k
    found["dk"][one.keys][:, kv_head] += scale * ds.T @ q
    found["dv"][one.keys][:, kv_head] += p.T @ dout
    if "sinks" in inputs:
        found["dsinks"][head] -= (p_sink * delta).sum()
    if "bias" in inputs:
        shape = found["dbias"].shape[2:]
        axes = tuple(i for i in (0, 1) if shape[i] == 1)
        found["dbias"][tuple(bias)] += ds.sum(axes, keepdims=True)
    if "relative_bias" in inputs:
        np.add.at(found["drelative_bias"][head], place, ds)


def _unpaged(case: DecodeCase, inputs: Arrays) -> Arrays:
    lengths, size = inputs["seq_lens"].tolist(), case.page_size
    pages = [inputs["block_tables"][b, : -(-n // size)] for b, n in enumerate(lengths)]
    found = {x: inputs[x] for x in ("sinks", "q_ranges") if x in inputs}
    for x in ("k", "v"):
        pool = inputs[f"{x}_pages"]
        rows = [
            pool[p].reshape(-1, *pool.shape[2:])[:n] for p, n in zip(pages, lengths, strict=True)
        ]
        found[x] = np.concatenate(rows or [pool[:0, 0]])
    new = case.new_tokens if isinstance(case, PagedCase) else [case.tokens or 1] * len(lengths)
    found["q"] = inputs["q"].reshape(-1, *inputs["q"].shape[-2:])
    for x, counts in (("q", new), ("kv", lengths)):
        found[f"cu_seqlens_{x}"] = np.cumsum([0, *counts])
    return found

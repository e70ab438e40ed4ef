"""An implementation is timed on a case only where it is right there.

The oracle runs in float64 on the GPU, on all rows of a few heads: the first, the last and some
between, so that large cases stay cheap. Rows are taken in chunks, so that memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch

from bench.job import Check
from interop.parity.cases import DecodeCase, FlashCase
from twin_attention.contract.reference import attention_backward, attention_forward, paged_forward
from twin_attention.contract.spec import AttentionSpec, DecodeSpec, Window
from twin_attention.contract.tolerances import compare_to_reference

Tensors = Mapping[str, torch.Tensor]

_SAMPLES = 4  # heads or sequences
_SCORES = 1 << 25  # of a chunk: 256 MiB each time the oracle holds them in float64
_KINDS = {"out": "output", "dq": "gradient", "dk": "gradient", "dv": "gradient"}


def check_forward(case: FlashCase, tensors: Sequence[torch.Tensor]) -> Check:
    """What gives the worst error over its budget of (out,).

    Args:
        case: the problem.
        tensors: its q, k, v and dout, [B, S, H, D].
    """
    return _check_flash(case, tensors, ("out",))


def check_backward(case: FlashCase, tensors: Sequence[torch.Tensor]) -> Check:
    """The same of (dq, dk, dv)."""
    return _check_flash(case, tensors, ("dq", "dk", "dv"))


def check_both(case: FlashCase, tensors: Sequence[torch.Tensor]) -> Check:
    """The same of (out, dq, dk, dv)."""
    return _check_flash(case, tensors, ("out", "dq", "dk", "dv"))


def check_decode(case: DecodeCase, tensors: Any) -> Check:
    """The same of a decode's (out,), [B, T, Hq, D] or [B, Hq, D].

    Args:
        case: the problem.
        tensors: has q, k_pages, v_pages, block_tables and seq_lens, arguments of `paged_decode`;
            sinks, k_scale and v_scale where the case has them.
    """
    spec = case.spec
    names = ("k_pages", "v_pages", "sinks", "k_scale", "v_scale")
    shared = {name: getattr(tensors, name, None) for name in names}
    chosen = sample(range(spec.batch))
    expected = []
    for b in chosen:
        one = slice(b, b + 1)
        # A table may be much wider than its sequence needs.
        pages = max(1, -(-int(tensors.seq_lens[b]) // spec.cache.page_size))
        own_spec = replace(spec, batch=1, cache=replace(spec.cache, max_pages=pages))
        own = {
            "q": tensors.q[one].reshape(1, spec.tokens, spec.heads_q, spec.head_dim),
            "block_tables": tensors.block_tables[one, :pages],
            "seq_lens": tensors.seq_lens[one],
        }
        expected.append(
            [paged_forward(**own, **shared, spec=own_spec, dtype=d)[0][0] for d in _dtypes(spec)]
        )

    def check(arrays: Sequence[Any]) -> float:
        (out,) = map(_to_torch, arrays)
        out = out.reshape(spec.batch, spec.tokens, spec.heads_q, spec.head_dim_v)
        return max(
            compare_to_reference(out[b], ref, lp, spec.dtype, "output").ratio
            for b, (ref, lp) in zip(chosen, expected, strict=True)
        )

    return check


def sample(choices: Sequence[Any]) -> list[Any]:
    """The first, the last and two between, always the same; all where there are not more."""
    if len(choices) <= _SAMPLES:
        return list(choices)
    between = Random(0).sample(range(1, len(choices) - 1), _SAMPLES - 2)
    return [choices[i] for i in (0, *sorted(between), len(choices) - 1)]


def _check_flash(case: FlashCase, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> Check:
    spec = case.spec
    inputs: dict[str, Any] = dict(zip(("q", "k", "v", "dout"), tensors, strict=True))
    heads = sample([(b, h) for b in range(spec.batch) for h in range(spec.heads_kv)])
    expected = {}
    for b, h in heads:
        part = _crop(inputs, spec, b, h)
        expected[b, h] = [evaluate(part, spec, names, dtype) for dtype in _dtypes(spec)]

    def check(arrays: Sequence[Any]) -> float:
        results = dict(zip(names, map(_to_torch, arrays), strict=True))
        return max(
            compare_to_reference(got, ref[name], lp[name], spec.dtype, _KINDS[name]).ratio
            for (b, h), (ref, lp) in expected.items()
            for name, got in _crop(results, spec, b, h).items()
        )

    return check


def evaluate(
    part: Tensors, spec: AttentionSpec, names: Sequence[str], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The contract's formula in `dtype` for one kv head of one sequence, in chunks of rows.

    Args:
        part: q, k, v and dout of that head, as `_crop` gives them.
        spec: the whole problem.
        names: of the results: out, dq, dk, dv.
    """
    q, k, v, dout = (part[name] for name in ("q", "k", "v", "dout"))
    rows = {"out": [], "dq": []}
    # Sums over chunks; the chunks' own rounding is what a plain run in `dtype` has.
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    sums = {"dk": torch.zeros_like(k, dtype=exact), "dv": torch.zeros_like(v, dtype=exact)}
    for chunk, chunk_spec in chunks(spec):
        if "out" in names:
            rows["out"].append(attention_forward(q[:, chunk], k, v, chunk_spec, dtype)[0])
        if "dq" in names:
            dq, dk, dv = attention_backward(
                dout[:, chunk], None, q[:, chunk], k, v, chunk_spec, dtype
            )
            rows["dq"].append(dq)
            sums["dk"] += dk
            sums["dv"] += dv
    found = {name: torch.cat(parts, dim=1) for name, parts in rows.items() if parts}
    found |= {name: x.to(dtype) for name, x in sums.items()}
    return {name: found[name] for name in names}


def chunks(spec: AttentionSpec) -> Iterator[tuple[slice, AttentionSpec]]:
    """Stretches of the queries of one kv head, each with the problem that it is by itself.

    A problem's last query stands at its last key. The last of a stretch that ends `ahead` queries
    before it stands as many keys before, and so its window is moved.
    """
    size = max(1, _SCORES // max(1, spec.group_size * spec.seq_kv))
    one = replace(spec, batch=1, heads_q=spec.group_size, heads_kv=1)
    left, right = spec.window.left, spec.window.right
    for start in range(0, spec.seq_q, size):
        stop = min(start + size, spec.seq_q)
        ahead = spec.seq_q - stop
        window = Window(
            None if left is None else left + ahead, None if right is None else right - ahead
        )
        yield slice(start, stop), replace(one, seq_q=stop - start, window=window)


def _crop(tensors: Tensors, spec: AttentionSpec, batch: int, head: int) -> dict[str, torch.Tensor]:
    """Views of one kv head of one sequence, with the query heads that read it."""
    group = spec.group_size
    heads_q = slice(head * group, (head + 1) * group)
    heads_kv = slice(head, head + 1)
    return {
        name: x[batch : batch + 1, :, heads_kv if name in ("k", "v", "dk", "dv") else heads_q]
        for name, x in tensors.items()
    }


def _dtypes(spec: AttentionSpec | DecodeSpec) -> tuple[torch.dtype, torch.dtype]:
    return torch.float64, getattr(torch, spec.dtype)


def _to_torch(array: Any) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array.detach()
    from interop.exchange import to_torch

    return to_torch(array)

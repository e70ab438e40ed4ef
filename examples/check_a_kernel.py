"""An attention of your own, checked against float64, and three faults that the check finds.

python -m examples.check_a_kernel
"""

from __future__ import annotations

import sys
import time
from functools import partial

import torch

from twin_attention.testing import check_attention

CLAIMS = {"flash_attention", "float32", "bfloat16", "scale", "causal", "GQA", "gradients",
          "D not 64, 128 or 256", "D > 128"}  # fmt: skip
FAULTS = ("sums are not rescaled", "the last tile is dropped", "heads in turn")
TILE = 16


def attention(q, k, v, *, causal=False, scale=None, fault=""):
    """Attention [B, S, H, D] over one tile of keys after the other, with an online softmax."""
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5 if scale is None else scale
    repeat = {"repeats": group, "dim": 2}
    if fault == "heads in turn":
        k, v = (x.repeat(1, 1, group, 1) for x in (k, v))
    else:
        k, v = (x.repeat_interleave(**repeat) for x in (k, v))
    dtype = q.dtype
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    largest = q.new_full(q.shape[:3], -torch.inf)
    total, acc = torch.zeros_like(largest), q.new_zeros(*q.shape[:3], v.shape[-1])
    length = k.shape[2]
    end = length // TILE * TILE if fault == "the last tile is dropped" and length > TILE else length
    for start in range(0, end, TILE):
        keys = slice(start, start + TILE)
        s = scale * q @ k[:, :, keys].mT
        if causal:
            hidden = torch.arange(q.shape[2])[:, None] < torch.arange(length)[keys]
            s = s.masked_fill(hidden, -torch.inf)
        new = torch.maximum(largest, s.amax(-1))
        p = torch.exp(s - new[..., None])
        rescale = torch.exp(largest - new)
        if fault == "sums are not rescaled":
            rescale = torch.ones_like(rescale)
        total = total * rescale + p.sum(-1)
        acc = acc * rescale[..., None] + p @ v[:, :, keys]
        largest = new
    return (acc / total[..., None]).transpose(1, 2).to(dtype)


def main(seconds: float = 20.0) -> int:
    worst = check_attention(attention, CLAIMS, seconds=seconds, suite=None)
    print("right:", {feature: round(ratio, 2) for feature, ratio in worst.items()})
    missed = 0
    for fault in FAULTS:
        begin = time.monotonic()
        try:
            check_attention(partial(attention, fault=fault), CLAIMS, seconds=60, suite=None)
            missed += 1
        except AssertionError as found:
            print(f"\n{fault}: found after {time.monotonic() - begin:.0f} seconds\n    {found}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

from __future__ import annotations

import torch
from torch import Tensor


def draw_seed(q: Tensor, rate: float) -> Tensor | None:
    """Draw a seed of dropout from the generator of q's device; None for a rate of 0.

    It stays on the device. `torch.manual_seed` and checkpointing repeat it, and each replay of a
    CUDA graph draws another.
    """
    if rate == 0:
        return None
    return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=q.device)

import torch


def in_a_poisoned_box(x):
    """Return `x` inside a larger tensor of NaN; its first element is aligned to nothing."""
    poison = float("nan") if x.is_floating_point() else 1 << 30
    box = torch.full([n + 2 for n in x.shape], poison, dtype=x.dtype, device=x.device)
    inside = box[tuple(slice(1, n + 1) for n in x.shape)]
    inside[...] = x
    return inside


def far_apart(x, axis):
    """Return `x` with an axis' last index 2^31 elements away. Untouched memory takes none."""
    strides = list(x.transpose(0, axis).contiguous().transpose(0, axis).stride())
    strides[axis] = 2**31 // (x.shape[axis] - 1) + 8
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
    return x.new_empty(size).as_strided(x.shape, strides).copy_(x)


def heads_first(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)

"""Tensors across the frameworks: one memory, seen from PyTorch and from JAX."""

try:
    from twin_attention.interop.exchange.dlpack import to_jax, to_torch
except ModuleNotFoundError as error:
    if error.name not in ("jax", "torch"):
        raise
    message = f"{__name__} needs JAX and PyTorch: pip install 'twin-attention[{error.name}]'"
    raise ModuleNotFoundError(message, name=error.name) from None

__all__ = ["to_jax", "to_torch"]

"""Flash attention for PyTorch, in Triton. Importing it loads neither Triton nor JAX."""

from torch_attn.api import explain, flash_attention

__all__ = ["explain", "flash_attention"]

"""Building blocks of the kernels of every family: tiles, scores, softmax, sequences, masks, pages.

This package has no kernels. Every family imports it; it imports no family, and nothing from
`torch_attn.kernels.explicit`.
"""

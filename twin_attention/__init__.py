"""The common base of `torch_attn` and `pallas_attn`. It imports neither framework.

`twin_attention.contract` fixes what both sides mean, `twin_attention.targets` what a GPU runs.
"""

__version__ = "0.2.0"

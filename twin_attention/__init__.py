"""The common base of `torch_attn` and `pallas_attn`, without either framework.

`contract` fixes what both sides mean, `targets` what a GPU runs.
"""

__version__ = "0.3.0"

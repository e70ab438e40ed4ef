"""Both frameworks together: exchange of tensors, and the parity harness."""

from twin_attention import __version__ as __version__

"""Both frameworks together: exchange of tensors, and the parity harness."""

if __name__ == "interop":  # a module under two names would be two modules
    raise ImportError("expected import twin_attention.interop, got import interop")

from twin_attention import __version__ as __version__

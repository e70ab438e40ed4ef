"""Messages of errors about arguments, which read ``name: expected ..., got ...``.

`TypeError`: a wrong type or dtype. `ValueError`: shapes, devices, strides or values that are always
wrong. `NotImplementedError`: what is valid but not supported here.
"""

from __future__ import annotations

from typing import NoReturn


def fail(error: type[Exception], name: str, expected: str, got: object) -> NoReturn:
    raise error(f"{name}: expected {expected}, got {got}")


def not_a_tensor(name: str, expected: str, got: object) -> NoReturn:
    """Refuse an argument that is not `expected`, such as "a torch.Tensor"."""
    fail(TypeError, name, expected, type_name(got))


def type_name(x: object) -> str:
    """Return the name of an object's type, with its module: numpy.bool is not bool."""
    cls = type(x)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"


def not_differentiable(what: str, instead: str, function: str = "flash_attention") -> NoReturn:
    """Refuse a derivative that has no formula here, and name an alternative."""
    raise NotImplementedError(
        f"{function}: {what} is not supported; reverse mode, once, is. {instead}"
    )


def not_constant(name: str) -> NoReturn:
    """Refuse a derivative of an operand that has none."""
    expected = "constants (Tensor.detach, jax.lax.stop_gradient; relative_bias has a gradient)"
    fail(NotImplementedError, name, expected, "values that ask for a gradient")


def no_gradient(function: str) -> NoReturn:
    """Refuse any derivative of a function that is for inference only."""
    raise NotImplementedError(
        f"{function}: a gradient is not supported; give it operands that need none "
        "(torch.no_grad, jax.lax.stop_gradient), or use flash_attention"
    )


def one_pool() -> NoReturn:
    """Refuse a cache written in place whose keys and values share memory."""
    fail(ValueError, "v_pages", "memory of its own", "k_pages' memory")


def not_mapped(function: str) -> NoReturn:
    """Refuse `vmap` of a function of packed sequences."""
    raise NotImplementedError(
        f"{function}: vmap is not supported; pack the sequences of the whole batch"
    )


def not_mapped_with_sinks() -> NoReturn:
    """Refuse `vmap` over per-token integers: operands have no batch to join."""
    raise NotImplementedError(
        "flash_attention: vmap over segment ids, ends or depths with sinks, relative_bias or "
        "alibi_slopes of heads is not supported; call it for each, or share them"
    )


def not_mapped_with_sinks_and_mask() -> NoReturn:
    """Refuse `vmap` of a block-sparse attention with sinks, which have no batch to join."""
    raise NotImplementedError(
        "block_sparse_attention: vmap with sinks is not supported; call it for each"
    )

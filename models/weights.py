"""Copy parameters and gradients between the frameworks' models, through `interop/exchange`.

Modules have the same names on both sides, but the frameworks' layers do not:
`layers.0.mlp.up_proj.weight` [out, in] of torch is `layers.0.mlp.up_proj.kernel` [in, out] of Flax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx
from torch import Tensor

from models import jax_model, torch_model
from twin_attention.contract.validate.errors import fail
from twin_attention.interop.exchange import to_jax, to_torch


def copy_to_jax(source: torch_model.Transformer, target: jax_model.Transformer) -> None:
    """Copy the parameters of a PyTorch model into a Flax model.

    Raises:
        ValueError: configurations or dtypes that differ.
    """
    _check_alike(source, target)
    nnx.update(target, as_jax(dict(source.named_parameters())))


def copy_to_torch(source: jax_model.Transformer, target: torch_model.Transformer) -> None:
    """Copy the parameters of a Flax model into a PyTorch model; raise as `copy_to_jax`."""
    _check_alike(target, source)
    target.load_state_dict(as_torch(nnx.state(source, nnx.Param)))


def as_jax(tensors: Mapping[str, Tensor]) -> nnx.State:
    """Return copies of a PyTorch model's parameters or gradients, by Flax's names."""
    flat = {}
    for name, tensor in tensors.items():
        *path, layer, leaf = name.split(".")
        if leaf == "weight":
            leaf = _flax_name(layer)
        tensor = tensor.detach()
        path = [int(part) if part.isdigit() else part for part in path]  # layers are a list
        flat[(*path, layer, leaf)] = to_jax(tensor.T if leaf == "kernel" else tensor, copy=True)
    return nnx.from_flat_state(flat)


def as_torch(state: nnx.State) -> dict[str, Tensor]:
    """Return copies of a Flax model's parameters or gradients, by PyTorch's names."""
    tensors = {}
    for (*path, layer, leaf), variable in nnx.to_flat_state(state):
        array = variable[...]
        name = ".".join(map(str, [*path, layer, "weight" if leaf == _flax_name(layer) else leaf]))
        tensors[name] = to_torch(array.T if leaf == "kernel" else array, copy=True)
    return tensors


def _flax_name(layer: Any) -> str:
    if layer == "embed":
        return "embedding"
    return "scale" if layer.endswith("norm") else "kernel"


def _check_alike(of_torch: torch_model.Transformer, of_jax: jax_model.Transformer) -> None:
    if of_torch.config != of_jax.config:
        fail(ValueError, "config", f"the same in both models, {of_torch.config}", of_jax.config)
    dtype = str(of_torch.embed.weight.dtype).removeprefix("torch.")
    if dtype != of_jax.embed.embedding.dtype.name:
        expected = f"the same in both models, {dtype}"
        fail(ValueError, "dtype", expected, of_jax.embed.embedding.dtype.name)

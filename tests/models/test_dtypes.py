import pytest
import torch

pytest.importorskip("flax")

import jax
import jax.numpy as jnp
from flax import nnx

from models import jax_model, torch_model
from models.weights import copy_to_jax
from tests.models.pairs import TINY, batch_of, in_float64
from twin_attention.contract.tolerances import compare_to_reference
from twin_attention.interop.exchange import to_jax, to_torch

CONFIG = TINY["modern"]


def test_mixed_models_keep_float32_parameters_and_gradients_and_agree(torch_device):
    tokens = batch_of(torch_device)
    in_torch = torch_model.Transformer(
        CONFIG, "eager", device=torch_device, compute_dtype=torch.bfloat16
    )
    in_jax = jax_model.Transformer(CONFIG, "xla", compute_dtype=jnp.bfloat16)
    copy_to_jax(in_torch, in_jax)
    plain = torch_model.Transformer(CONFIG, "eager", device=torch_device, dtype=torch.bfloat16)
    plain.load_state_dict(in_torch.state_dict())
    inputs = tokens[:, :-1].contiguous()
    ref, lp = (model(inputs).detach() for model in (in_float64(in_torch), plain))
    of_jax = nnx.jit(lambda model, tokens: model(tokens))(in_jax, to_jax(inputs))
    for logits in (in_torch(inputs).detach(), to_torch(of_jax)):
        assert logits.dtype == torch.bfloat16
        assert compare_to_reference(logits, ref, lp, "bfloat16", "output").ok
    torch_model.next_token_loss(in_torch, tokens).backward()
    gradients = nnx.eval_shape(nnx.grad(jax_model.next_token_loss), in_jax, to_jax(tokens))
    assert {gradient.dtype for gradient in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    for parameter in in_torch.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("argument", ["dtype", "compute_dtype"])
def test_unknown_dtypes(argument):
    message = f"^{argument}: expected one of float16, bfloat16, float32, float64, got int8$"
    with pytest.raises(ValueError, match=message):
        torch_model.Transformer(CONFIG, **{"compute_dtype": torch.float32, argument: torch.int8})
    with pytest.raises(ValueError, match=message):
        jax_model.Transformer(CONFIG, **{"compute_dtype": jnp.float32, argument: jnp.int8})

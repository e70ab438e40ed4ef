import inspect
import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from models.weights import as_jax, as_torch
from pallas_attn import modules as jax_modules
from tests.test_docstrings import sections, without_framework
from torch_attn import BlockMask, block_sparse_attention, dilated_attention
from torch_attn import modules as torch_modules
from twin_attention.interop.exchange import to_jax, to_torch

NAMES = ["MultiHeadDilatedAttention", "MultiHeadBlockSparseAttention"]
MASK = np.array([[[1, 0], [1, 1]], [[1, 1], [0, 1]]] * 2, bool)  # of 4 heads
OF_ATTENTION = {
    "MultiHeadDilatedAttention": ((32, 64), (1, 2)), "MultiHeadBlockSparseAttention": (MASK,)
}  # fmt: skip
OPTIONS = {"num_heads_kv": 2, "causal": True}


def make_pair(name, **options):
    torch.manual_seed(0)
    given = OF_ATTENTION[name]
    of_torch, of_jax = (
        [convert(x) if isinstance(x, np.ndarray) else x for x in given]
        for convert in (torch.from_numpy, jnp.asarray)
    )
    a = getattr(torch_modules, name)(64, 4, *of_torch, **OPTIONS | options)
    b = getattr(jax_modules, name)(64, 4, *of_jax, **OPTIONS | options, rngs=nnx.Rngs(0))
    nnx.update(b, as_jax(dict(a.named_parameters())))
    return a, b


@pytest.mark.parametrize("options", [{}, {"bias": True, "implementation": "triton"}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_weights_give_the_same(name, options):
    of_torch, of_jax = make_pair(name, **options)
    x = torch.randn(1, 128 if "Block" in name else 64, 64)
    out = of_torch(x)
    out.square().sum().backward()

    def loss(module, x):
        out = module(x)
        return jnp.sum(out**2), out

    (_, got), gradients = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(of_jax, to_jax(x))
    torch.testing.assert_close(to_torch(got), out.detach(), rtol=1e-4, atol=1e-4)
    for parameter, gradient in as_torch(gradients).items():
        want = of_torch.get_parameter(parameter).grad
        torch.testing.assert_close(gradient, want, rtol=1e-3, atol=1e-3)
    state = as_torch(nnx.state(of_jax, nnx.Param))
    assert state.keys() == of_torch.state_dict().keys()
    of_torch.load_state_dict(state)
    assert torch.equal(of_torch(x), out)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_function_between_projections(name):
    module, _ = make_pair(name)
    x = torch.randn(2, 128, 64)
    q, k, v = (
        (x @ module.get_parameter(f"{p}_proj.weight").T).reshape(2, 128, -1, 16) for p in "qkv"
    )
    if "Block" in name:
        out = block_sparse_attention(q, k, v, BlockMask.of(torch.from_numpy(MASK)), causal=True)
    else:
        out = dilated_attention(q, k, v, (32, 64), (1, 2), causal=True)
    want = out.reshape(2, 128, 64) @ module.out_proj.weight.T
    torch.testing.assert_close(module(x), want)


@pytest.mark.parametrize("name", NAMES)
def test_a_module_made_on_meta_gets_all_that_no_checkpoint_has(name):
    module, _ = make_pair(name)
    given = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in OF_ATTENTION[name]]
    x = torch.randn(1, 128, 64)
    for device, default in (("meta", "cpu"), (None, "meta")):
        with torch.device(default):
            made = getattr(torch_modules, name)(64, 4, *given, **OPTIONS, device=device)
        made.to_empty(device="cpu")
        made.load_state_dict(module.state_dict(), strict=True)
        assert torch.equal(made(x), module(x))


def test_a_mask_without_values_is_refused():
    mask = torch.ones(2, 2, dtype=torch.bool, device="meta")
    with pytest.raises(ValueError, match="block_mask: expected tiles with values, got a mask on"):
        torch_modules.MultiHeadBlockSparseAttention(64, 4, mask)


def test_compile():
    module, _ = make_pair("MultiHeadBlockSparseAttention")
    x = torch.randn(2, 128, 64)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))


MISTAKES = {
    "no head": (ValueError, "num_heads: expected an integer from 1 to 2147483647, got 0", (64, 0)),
    "heads": (ValueError, "num_heads: expected a divisor of d_model 64, got 3", (64, 3)),
    "kv heads": (ValueError, "num_heads_kv: expected a divisor of num_heads 4, got 3", (64, 4, 3)),
    "fraction": (
        TypeError, "d_model: expected an integer from 1 to 2147483647, got 64.0", (64.0, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", NAMES)
def test_one_mistake_one_message(name, mistake):
    error, message, (d_model, num_heads, *num_heads_kv) = MISTAKES[mistake]
    for package, own in ((torch_modules, {}), (jax_modules, {"rngs": nnx.Rngs(0)})):
        arguments = *OF_ATTENTION[name], *num_heads_kv
        with pytest.raises(error) as raised:
            getattr(package, name)(d_model, num_heads, *arguments, **own)
        assert str(raised.value) == message


def test_pairs_and_masks_are_checked_at_once():
    for package, zeros, own in (
        (torch_modules, torch.zeros, {}),
        (jax_modules, jnp.zeros, {"rngs": nnx.Rngs(0)}),
    ):
        message = r"^num_heads: .*head dimension from 16 .*it 4$"
        with pytest.raises(NotImplementedError, match=message):
            package.MultiHeadDilatedAttention(64, 16, [4], [1], **own)
        with pytest.raises(ValueError, match="a multiple of its rate 3, got 64"):
            package.MultiHeadDilatedAttention(64, 4, [64], [3], **own)
        with pytest.raises(TypeError, match="block_mask: expected dtype bool, got float32"):
            package.MultiHeadBlockSparseAttention(64, 4, zeros((2, 2)), **own)
        with pytest.raises(ValueError, match="implementation: expected None or one of"):
            package.MultiHeadDilatedAttention(64, 4, [64], [2], implementation="cudnn", **own)


@pytest.mark.parametrize("shape", [(128, 64), (1, 2, 128, 64), (1, 128, 32)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_call_names_its_own_argument(name, shape):
    of_torch, of_jax = make_pair(name)
    for module, x in ((of_torch, torch.zeros(shape)), (of_jax, jnp.zeros(shape))):
        message = re.escape(f"x: expected shape [B, S, d_model 64], got {shape}")
        with pytest.raises(ValueError, match=f"^{message}$"):
            module(x)


@pytest.mark.parametrize("name", NAMES)
def test_both_sides_say_the_same(name):
    classes = [getattr(package, name) for package in (torch_modules, jax_modules)]
    args = [sections(cls)["Args"].split("implementation:")[0] for cls in classes]
    assert without_framework(args[0]) == without_framework(args[1])
    assert sections(classes[0])["Raises"] == sections(classes[1])["Raises"]
    own = {"device", "dtype", "rngs", "param_dtype"}
    a, b = (
        [p for p in inspect.signature(cls.__init__).parameters if p not in own] for cls in classes
    )
    assert a == b

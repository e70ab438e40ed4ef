import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from pallas_attn import append_kv
from pallas_attn.lowering import recording
from tests.oracle import assert_within_budget
from twin_attention.interop.parity.cases import AppendCase
from twin_attention.interop.parity.inputs import make_inputs

POOLS = ("k_pages", "v_pages")
CASE = AppendCase(
    "transformations", lengths=(7, 12), new_tokens=(3, 1), padding=1, heads_q=4, head_dim=16,
    dtype="float16", page_size=5, max_pages=3, rotary_dim=16, positions=16,
)  # fmt: skip


@pytest.fixture
def inputs():
    return make_inputs(CASE, "cpu")


@pytest.fixture
def operands(inputs):
    return as_arrays(inputs)


def as_arrays(tensors):
    return {name: jnp.asarray(x.numpy()) for name, x in tensors.items()}


def assert_right(got, inputs):
    tensors = (torch.from_numpy(np.array(x)) for x in got)
    assert_within_budget(dict(zip(("q", *POOLS), tensors, strict=True)), inputs, CASE.spec)


def test_lowered_for_cuda_it_is_one_kernel_that_shares_the_memory_of_donated_pools(operands):
    append = jax.jit(append_kv, donate_argnames=POOLS)
    with recording():
        lowered = append.trace(**operands).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("custom_call @triton_kernel_call_ffi") == 1
    for output, operand in ((0, 2), (1, 3)):
        shared = f"output_tuple_indices = [{output}], operand_index = {operand}"
        assert f"output_operand_alias<{shared}" in text
        assert f"tf.aliasing_output = {output + 1}" in text


def test_vmap(inputs, operands):
    """Each element gets pools of its own."""
    names = ("k_new", "q")
    others = [inputs, inputs | {name: inputs[name].flip(1) for name in names}]
    stacked = {name: jnp.stack([as_arrays(x)[name] for x in others]) for name in names}

    def append(new):
        return append_kv(**operands | new, implementation="triton")

    for own, got in zip(others, zip(*jax.jit(jax.vmap(append))(stacked), strict=True), strict=True):
        assert_right(got, own)

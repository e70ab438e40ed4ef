import gc
import math
import os
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twin_attention.interop.exchange import to_jax, to_torch
from twin_attention.interop.exchange.dlpack import ALIGNMENT, DTYPES

WIDE_DTYPES = {"int64", "uint64", "float64", "complex128"}
NARROW_DTYPES = sorted(DTYPES - WIDE_DTYPES)


def random_bits(shape, dtype, device="cpu"):
    """Include NaN payloads and negative zeros."""
    if dtype == "bool":
        return torch.randint(0, 2, shape, dtype=torch.uint8, device=device).view(torch.bool)
    torch_dtype = getattr(torch, dtype)
    raw = torch.randint(
        0, 256, (math.prod(shape) * torch_dtype.itemsize,), dtype=torch.uint8, device=device
    )
    return raw.view(torch_dtype).view(shape)


def torch_bits(tensor):
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def jax_bits(array):
    return np.asarray(array).tobytes()


@st.composite
def compact_tensors(draw):
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    return dtype, shape, draw(st.permutations(range(len(shape))))


class TestRoundTrip:
    @given(case=compact_tensors(), copy=st.sampled_from([None, False, True]))
    @settings(max_examples=150, deadline=None)
    def test_every_dtype_shape_and_layout(self, case, copy):
        dtype, shape, order = case
        tensor = random_bits(shape, dtype).permute(order)
        with jax.enable_x64(dtype in WIDE_DTYPES):
            array = to_jax(tensor, copy=copy)
            back = to_torch(array, copy=copy)
            assert array.shape == tuple(tensor.shape)
            assert array.dtype.name == dtype
            assert jax_bits(array) == torch_bits(tensor) == torch_bits(back)
            assert (back.shape, back.dtype) == (tensor.shape, tensor.dtype)
            if tensor.numel():
                shares = array.unsafe_buffer_pointer() == tensor.data_ptr()
                assert shares == (not copy)
                assert (back.data_ptr() == array.unsafe_buffer_pointer()) == (not copy)

    @pytest.mark.parametrize("dtype", NARROW_DTYPES)
    def test_on_the_device(self, dtype, torch_device):
        tensor = random_bits((3, 8), dtype, torch_device).t()
        array = to_jax(tensor)
        back = to_torch(array)
        assert tensor.data_ptr() == array.unsafe_buffer_pointer() == back.data_ptr()
        assert jax_bits(array) == torch_bits(tensor) == torch_bits(back)
        assert back.device == tensor.device

    def test_jax_computes_on_a_permuted_layout(self, torch_device):
        tensor = torch.arange(24.0, device=torch_device).reshape(2, 3, 4).permute(2, 0, 1)
        got = jax.jit(lambda x: 2 * x + 1)(to_jax(tensor))
        assert torch.equal(to_torch(got), 2 * tensor + 1)

    def test_sizes_of_one_may_have_any_stride(self, torch_device):
        tensor = torch.arange(4.0, device=torch_device).as_strided((1, 4), (100, 1))
        assert to_jax(tensor).unsafe_buffer_pointer() == tensor.data_ptr()

    def test_parameter_without_grad(self):
        parameter = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        assert to_jax(parameter).unsafe_buffer_pointer() == parameter.data_ptr()

    def test_array_that_is_still_being_computed(self, torch_device):
        x = to_jax(torch.full((512, 512), 1 / 512, device=torch_device))
        pending = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x, jnp.ones_like(x)))
        assert bool((to_torch(pending(x)) == 1).all())


class TestAliasing:
    @pytest.mark.parametrize("of_jax", [False, True])
    def test_torch_writes_show_in_jax(self, of_jax, torch_device):
        tensor = torch.zeros(4, device=torch_device)
        array = to_jax(tensor, copy=of_jax)
        tensor = to_torch(array) if of_jax else tensor
        tensor.fill_(7)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        assert (array + 1).tolist() == [8.0] * 4

    def test_copies_are_independent(self, torch_device):
        tensor = torch.zeros(4, device=torch_device)
        array = to_jax(tensor, copy=True)
        copied = to_torch(array, copy=True)
        tensor.fill_(7)
        copied.fill_(8)
        assert array.tolist() == [0.0] * 4

    def test_donation_leaves_torch_memory_on_a_cpu_alone(self):
        tensor = torch.ones(64)
        jax.jit(lambda x: x + 1, donate_argnums=0)(to_jax(tensor)).block_until_ready()
        assert tensor.tolist() == [1.0] * 64


def strided(device):
    return torch.zeros(4, 64, device=device)[:, ::2]


def expanded(device):
    return torch.zeros(1, 64, device=device).expand(4, 64)


def row_of_matrix(device):
    return torch.zeros(4, 64, device=device)[:, :32]


def unaligned(device):
    return torch.zeros(65, device=device)[1:]


def conjugate(device):
    return torch.complex(torch.ones(8), torch.ones(8)).to(device).conj()


def negative(device):
    return torch._neg_view(torch.ones(16, device=device))


class TestOnlyACopy:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (strided, r"fill one block of memory \(copy=True.* strides \(64, 2\)"),
            (expanded, r"fill one block of memory \(copy=True.* strides \(0, 1\)"),
            (row_of_matrix, r"fill one block of memory \(copy=True.* strides \(64, 1\)"),
            (unaligned, r"aligned to (64|16) bytes \(copy=True.* got an address 4 bytes past"),
            (conjugate, r"holds its values \(copy=True.* got one with the conjugate bit set"),
            (negative, r"holds its values \(copy=True.* got one with the negative bit set"),
        ],
    )
    @pytest.mark.parametrize("copy", [None, False])
    def test_refused_then_copied(self, make, message, copy, torch_device):
        tensor = make(torch_device)
        with pytest.raises(ValueError, match=r"^tensor: expected .*" + message):
            to_jax(tensor, copy=copy)
        copied = to_jax(tensor, copy=True)
        assert torch.equal(to_torch(copied), tensor)
        assert copied.unsafe_buffer_pointer() != tensor.data_ptr()

    @pytest.mark.parametrize("steps", [1, 2])
    def test_the_stated_alignment_is_enough(self, steps, torch_device):
        # One of two neighbouring steps is aligned to exactly the stated number of bytes.
        tensor = torch.arange(100.0, device=torch_device)[steps * ALIGNMENT[torch_device] // 4 :]
        assert torch.equal(to_torch(jax.jit(lambda x: x * 2)(to_jax(tensor))), tensor * 2)


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize("copy", [None, False, True])
class TestRefusedEvenAsACopy:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: np.zeros(3), "a plain torch.Tensor, got ndarray"),
            (lambda: [1.0], "a plain torch.Tensor, got list"),
            (lambda: nested(torch.jagged), "a plain torch.Tensor, got NestedTensor"),
            (lambda: nested(torch.strided), "a dense tensor, got a nested tensor"),
            (lambda: torch.eye(3).to_sparse(), "a dense tensor, got layout torch.sparse_coo"),
            (
                lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
                "a dense tensor, got quantized torch.qint8",
            ),
            (
                lambda: torch.ones(3, device="meta"),
                "a tensor in CPU or CUDA memory, got device meta",
            ),
            (
                lambda: torch._to_functional_tensor(torch.ones(3)),
                "a tensor with memory of its own .*outside torch.func.* got a wrapper",
            ),
        ],
    )
    def test_not_a_plain_dense_tensor(self, make, message, copy):
        with pytest.raises(TypeError, match=r"^tensor: expected " + message):
            to_jax(make(), copy=copy)

    def test_fake_tensor(self, copy):
        with (
            torch._subclasses.FakeTensorMode(),
            pytest.raises(TypeError, match=r"a plain torch\.Tensor, got FakeTensor"),
        ):
            to_jax(torch.ones(3), copy=copy)

    @pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
    def test_inside_a_torch_transformation(self, transform, copy):
        with pytest.raises(TypeError, match=r"outside torch\.func"):
            transform(lambda x: to_jax(x, copy=copy))(torch.ones(3))

    def test_requires_grad(self, copy):
        with pytest.raises(
            ValueError, match=r"^tensor: .*use \.detach\(\).* got requires_grad=True"
        ):
            to_jax(torch.ones(3, requires_grad=True), copy=copy)

    @pytest.mark.parametrize("dtype", sorted(WIDE_DTYPES))
    def test_narrowing(self, dtype, copy):
        tensor = torch.ones(8, dtype=getattr(torch, dtype))
        with (
            jax.enable_x64(False),
            pytest.raises(TypeError, match=rf"^tensor: .*set jax_enable_x64.* got {dtype}$"),
        ):
            to_jax(tensor, copy=copy)

    def test_dtype_that_jax_lacks(self, copy):
        with pytest.raises(NotImplementedError, match=r"^tensor: .* share, got complex32$"):
            to_jax(torch.empty(3, dtype=torch.complex32), copy=copy)

    @pytest.mark.parametrize("dtype", ["int4", "float8_e3m4", "float4_e2m1fn"])
    def test_dtype_that_torch_lacks(self, dtype, copy):
        with pytest.raises(NotImplementedError, match=rf"^array: .* share, got {dtype}$"):
            to_torch(jnp.ones(4, dtype), copy=copy)

    def test_random_key(self, copy):
        with pytest.raises(NotImplementedError, match=r"^array: .* got key<"):
            to_torch(jax.random.key(0), copy=copy)

    @pytest.mark.parametrize("value", [np.zeros(3), torch.zeros(3), 1.0])
    def test_not_an_array(self, value, copy):
        with pytest.raises(TypeError, match=rf"^array: .* got {type(value).__name__}$"):
            to_torch(value, copy=copy)

    @pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
    def test_tracer(self, transform, copy):
        x = jnp.ones(3) if transform is jax.vmap else 1.0
        with pytest.raises(
            TypeError, match=r"^array: .*outside jit, grad and vmap.* got \w*Tracer"
        ):
            transform(lambda x: to_torch(x, copy=copy))(x)

    def test_deleted(self, copy):
        array = jnp.ones(3)
        array.delete()
        with pytest.raises(ValueError, match=r"^array: .* got a deleted or donated array"):
            to_torch(array, copy=copy)


def test_several_devices():
    """In a process of its own: JAX makes its CPU devices when it starts."""
    script = """
import jax, jax.numpy as jnp, numpy as np
from twin_attention.interop.exchange import to_torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(jax.devices()), "x")
for spec in (PartitionSpec("x"), PartitionSpec()):
    array = jax.device_put(jnp.arange(4), NamedSharding(mesh, spec))
    for copy in (None, True):
        try:
            to_torch(array, copy=copy)
        except ValueError as error:
            print(error)
print(to_torch(array.addressable_shards[1].data).tolist())
"""
    flags = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2",
    }
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | flags,
        capture_output=True,
        text=True,
        check=True,
    )
    refusal = (
        "array: expected an array on one device (take one with .addressable_shards[i].data), "
        "got a sharding over 2 devices"
    )
    assert run.stdout.splitlines() == [refusal] * 4 + ["[0, 1, 2, 3]"]


@pytest.mark.parametrize("copy", [0, 1, "always"])
def test_copy_must_be_a_bool(copy):
    with pytest.raises(TypeError, match=r"^copy: expected None or a bool, got (int|str)$"):
        to_jax(torch.ones(3), copy=copy)
    with pytest.raises(TypeError, match=r"^copy: expected None or a bool, got (int|str)$"):
        to_torch(jnp.ones(3), copy=copy)


class TestLifetime:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
    def test_shared_memory_cannot_be_resized_on_a_cpu(self, dtype):
        """Torch would free it, and JAX read what is put there next."""
        tensor = random_bits((2, 32), dtype).T
        bits = torch_bits(tensor)
        array = to_jax(tensor)
        for resize in (lambda: tensor.untyped_storage().resize_(0), lambda: tensor.resize_(4096)):
            with pytest.raises(RuntimeError, match="not resizable"):
                resize()
        assert jax_bits(array) == bits
        copied = torch.zeros(64)
        to_jax(copied, copy=True)
        copied.untyped_storage().resize_(0)

    """A weak reference to a torch storage dies when the memory does, not the Python object."""

    @staticmethod
    def collect(*arrays):
        for array in arrays:
            array.block_until_ready()
        gc.collect()

    def test_jax_keeps_torch_memory_alive_and_lets_go(self, torch_device):
        tensor = torch.arange(1000.0, device=torch_device)
        storage = weakref.ref(tensor.untyped_storage())
        array = to_jax(tensor)
        del tensor
        gc.collect()
        torch.full((1000,), math.nan, device=torch_device)
        assert storage() is not None
        assert jax_bits(array) == np.arange(1000, dtype=np.float32).tobytes()
        del array
        self.collect()
        assert storage() is None

    @pytest.mark.parametrize("keep", ["itself", "a view", "a detached view"])
    def test_torch_keeps_jax_memory_alive_and_lets_go(self, keep, torch_device):
        origin = torch.arange(1000.0, device=torch_device)
        storage = weakref.ref(origin.untyped_storage())
        array = to_jax(origin)
        tensor = to_torch(array)
        views = {"itself": tensor, "a view": tensor[1:], "a detached view": tensor.detach()[1:]}
        kept = views.pop(keep)
        del origin, array, tensor, views
        gc.collect()
        assert storage() is not None
        assert kept[-1] == 999
        del kept
        self.collect()
        assert storage() is None

    def test_torch_outlives_a_deleted_array(self):
        array = jnp.arange(1000)
        tensor = to_torch(array)
        array.delete()
        jnp.full(1000, -1).block_until_ready()
        assert tensor.tolist() == list(range(1000))

    def test_copies_hold_nothing(self, torch_device):
        tensor = torch.ones(1000, device=torch_device)
        storage = weakref.ref(tensor.untyped_storage())
        array = to_jax(tensor, copy=True)
        del tensor
        self.collect(array)
        assert storage() is None

    def test_dropped_while_jax_still_reads(self):
        tensor = torch.full((512, 512), 1 / 512)
        step = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: y @ x, jnp.ones_like(x)))
        result = step(to_jax(tensor))
        del tensor
        poison = [torch.full((512, 512), math.nan) for _ in range(4)]
        assert bool((result == 1).all())
        del poison

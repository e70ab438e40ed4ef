"""Kernels of `torch_attn` lowered for CUDA in programs of JAX, where jaxlib has its CUDA plugin.

They guard jaxlib's ``triton_kernel_call_ffi`` as far as is possible without a GPU. When one fails
after an update of JAX, compare how ``jaxlib/gpu/triton_kernels.cc`` gives parameters to a kernel:
`interop/kernels/triton_call.py` arranges the buffers for it.
"""

import os
import re
import subprocess
import sys
from functools import partial
from hashlib import sha256
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_attn import flash_attention, private
from torch_attn.kernels.sm90 import flash_bwd
from twin_attention.contract.spec import AttentionSpec
from twin_attention.interop.kernels import cubin, triton_call
from twin_attention.targets.family import FOREIGN
from twin_attention.targets.target import use_target

GLUON, GLUON_SM90, TORCH_TRITON = FOREIGN["pallas_attn"]
SPEC = AttentionSpec(1, 300, 300, 4, 2, 128, 128, "bfloat16", 0.1)
if (reason := GLUON.supports("flash_fwd", SPEC, "sm80")) is not None:
    pytest.skip(reason, allow_module_level=True)
if not hasattr(private.gpu_triton, "TritonKernel"):
    pytest.skip("jaxlib's CUDA plugin is not installed", allow_module_level=True)


@pytest.fixture(autouse=True)
def fresh_caches():
    jax.clear_caches()
    yield
    jax.clear_caches()


def arrays(head_dim, seq=300, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct((1, seq, heads, head_dim), dtype) for heads in (4, 2, 2)]


def gradients(implementation, **options):
    attention = partial(flash_attention, implementation=implementation, **options)

    def function(*qkv):
        out, pullback = jax.vjp(attention, *qkv)
        return pullback(out)

    return function


def lower(target, function, *operands):
    with use_target(target):
        traced = jax.jit(function).trace(*operands)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
    return re.findall(r"custom_call @(\w+)", text)


KERNEL = "triton_kernel_call_ffi"


@pytest.mark.parametrize(
    ("target", "implementation", "head_dim", "expected"),
    [("sm80", "gluon", 96, 4), ("sm90", "torch_triton", 64, 4), ("sm90", "gluon", 96, 3)],
)
def test_forward_and_backward_are_lowered(target, implementation, head_dim, expected):
    text = lower(target, gradients(implementation, causal=True), *arrays(head_dim))
    assert calls(text).count(KERNEL) == expected
    assert {*calls(text)} == {KERNEL, "AllocateBuffer"}


def fields(message):

    def varint():
        value, shift = 0, 0
        while True:
            byte = next(left)
            value, shift = value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    left = iter(message)
    while (key := next(left, None)) is not None:
        number, kind = key >> 3, key & 7
        if kind == 2:
            yield number, bytes(next(left) for _ in range(varint()))
        else:
            yield number, varint()


def test_jaxlib_gets_the_machine_code_that_torch_launches(monkeypatch):
    """In fields of ``jaxlib/gpu/triton.proto``, and a short name in place of PTX."""
    messages = []
    monkeypatch.setattr(
        triton_call, "zlib", SimpleNamespace(compress=lambda x: messages.append(x) or b"")
    )
    lower("sm90", partial(flash_attention, implementation="torch_triton"), *arrays(64))
    ((_, call), (_, name), (number, code)) = fields(messages[0])
    assert (name, number) == (b"flash_fwd", 1)
    kernel = dict(fields(dict(fields(call))[1]))
    image = dict(fields(dict(fields(dict(fields(code))[1]))[11]))
    assert image[1].startswith(b"\x7fELF")
    assert kernel[4] == sha256(image[1]).hexdigest().encode()
    assert (image[2], image[3]) == (kernel[1], kernel[3])
    assert kernel[6] == 90


def test_kernels_are_compiled_from_the_moment_on_that_they_are_traced(monkeypatch):
    begun = []
    monkeypatch.setattr(triton_call, "begin", lambda code, *_: begun.append(code.name))
    function = gradients("gluon", deterministic=True)

    def trace():
        jax.clear_caches()
        with use_target("sm90"):
            jax.jit(function).trace(*arrays(64))

    monkeypatch.setattr(triton_call, "cuda_devices", tuple)
    trace()
    assert not begun  # nor is it lowered, perhaps, where there is no GPU
    monkeypatch.setattr(triton_call, "cuda_devices", lambda: ("a GPU",))
    trace()
    assert {*begun} == {"flash_fwd", "flash_bwd_dq", "flash_bwd_dkdv"}


def test_sums_of_a_descriptor_are_zeroed_in_the_call(monkeypatch):
    """Where the kernel does not clear them itself."""
    monkeypatch.setattr(flash_bwd, "SECTION_BYTES", 0)
    text = lower("sm90", gradients("gluon", deterministic=False), *arrays(64, seq=2112))
    # dk and dv, which the kernel gets but does not write, have one each.
    assert calls(text).count(KERNEL) == 6
    assert "dense<0" not in text


def test_rows_and_sums_that_the_kernel_makes_its_passes_over():
    text = lower("sm90", gradients("gluon", deterministic=False), *arrays(64, seq=2048))
    assert calls(text).count(KERNEL) == 4
    assert "dense<0>" in text  # the counts
    assert "dense<0.0" not in text


@pytest.mark.parametrize(
    ("name", "shape", "deterministic", "kernels"),
    [
        ("bias", (1, 4, 2048, 2048), False, 5),  # stored by TMA from the kernel that adds dq
        ("bias", (1, 1, 1, 2048), False, 6),
        ("relative_bias", (4, 33), False, 5),  # added in that kernel
        ("relative_bias", (4, 33), True, 4),
        ("relative_bias", (4, 1), True, 4),
    ],
)
def test_gradients_of_terms_are_lowered(name, shape, deterministic, kernels):
    def function(q, k, v, term):
        attention = partial(flash_attention, implementation="gluon", deterministic=deterministic)
        with_term = lambda q, k, v, term: attention(q, k, v, **{name: term})  # noqa: E731
        out, pullback = jax.vjp(with_term, q, k, v, term)
        return pullback(out)

    operands = (*arrays(64, seq=2048), jax.ShapeDtypeStruct(shape, "bfloat16"))
    with use_target("sm90"):
        gradients = jax.jit(function).trace(*operands)
        assert [x.shape for x in gradients.out_info] == [x.shape for x in operands]
        text = gradients.lower(lowering_platforms=("cuda",)).as_text()
    assert calls(text).count(KERNEL) == kernels


def test_shards_are_lowered():
    devices = jax.sharding.Mesh(jax.devices()[:1], "x")
    heads = jax.P(None, None, "x")
    function = jax.shard_map(gradients("gluon"), mesh=devices, in_specs=heads, out_specs=heads)
    assert calls(lower("sm80", function, *arrays(64))).count(KERNEL) == 4


def test_ptxas_takes_reordered_parameters(monkeypatch, tmp_path):
    pytest.importorskip("triton.backends.nvidia.compiler")
    from triton.backends.nvidia.compiler import get_ptxas

    found = []
    reorder = cubin.reorder_parameters

    def both(ptx, name, order):
        found.append((ptx, reorder(ptx, name, order)))
        return found[-1][1]

    monkeypatch.setattr(cubin, "reorder_parameters", both)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    lower("sm90", partial(flash_attention, implementation="gluon"), *arrays(96))
    assert len(found) == 1  # out has two descriptors
    for texts in found:
        used = []
        for i, text in enumerate(texts):
            (file := tmp_path / f"{i}.ptx").write_text(text)
            command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file, "-o", tmp_path / "out"]
            log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            used.append(re.findall(r"Used \d+ registers|\d+ bytes spill", log))
        assert texts[0] != texts[1]
        assert used[0] == used[1]


def test_another_platform_is_refused():
    with pytest.raises(NotImplementedError, match="cpu"):
        jax.jit(gradients("gluon")).trace(*arrays(64)).lower(lowering_platforms=("cpu",))


def test_they_need_no_triton_lowering_of_pallas():
    """JAX has announced its end."""
    program = """
import sys
for name in ("jax._src.pallas.triton", "jax._src.pallas.triton.lowering"):
    sys.modules[name] = None
import functools, jax, jax.numpy as jnp, pallas_attn
from twin_attention.targets.target import use_target
q = jax.ShapeDtypeStruct((1, 100, 2, 32), "float32")
def text(implementation):
    attention = lambda q: pallas_attn.flash_attention(q, q, q, implementation=implementation).sum()
    with use_target("sm80"):
        return jax.jit(jax.grad(attention)).trace(q).lower(lowering_platforms=("cuda",)).as_text()
for implementation in ("torch_triton", None):
    assert text(implementation).count("@triton_kernel_call_ffi") == 4
offsets = jax.ShapeDtypeStruct((3,), "int32")
for attention, *others in (
    (lambda q, x: pallas_attn.flash_attention_varlen(q[0], q[0], q[0], x, x), offsets),
    (lambda q: pallas_attn.flash_attention(q, q, q, softcap=5.0, window_size=(7, 0)),),
):
    with use_target("sm90"):
        traced = jax.jit(attention).trace(q, *others)
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@triton_kernel") == 1

def kernels(target, function, *types, **options):
    function = functools.partial(function, **options)
    operands = [jax.ShapeDtypeStruct(*x) for x in types]
    with use_target(target):
        traced = jax.jit(function).trace(*operands)
        return traced.lower(lowering_platforms=("cuda",)).as_text().count("@triton_kernel")

pool, fp8 = ((64, 16, 2, 64), "float16"), ((64, 16, 2, 64), "float8_e4m3fn")
tables = ((3, 16), "int32"), ((3,), "int32")
few, new, dense = ((3, 4, 64), "float16"), ((3, 2, 64), "float16"), ((1, 128, 4, 32), "float32")
states, mask = (((2, 3, 4, 64), "float16"), ((2, 3, 4), "float32")), jnp.ones((1, 1, 1), bool)
dilated = lambda q: pallas_attn.dilated_attention(q, q, q, (64, 128), (1, 2))
sparse = lambda q: pallas_attn.block_sparse_attention(q, q, q, mask)
one = jnp.float32(1)
for x, options in (pool, {}), (fp8, {"k_scale": one, "v_scale": one}):
    assert kernels("sm90", pallas_attn.append_kv, new, new, x, x, *tables, **options) == 1
    options |= {"implementation": None if x is pool else "torch_triton", "num_splits": 3}
    assert kernels("sm90", pallas_attn.paged_decode, few, x, x, *tables, **options) == 2
assert kernels("sm80", pallas_attn.paged_attention, few, pool, pool, *tables, ((4,), "int32"),
               num_splits=1) == 1
assert kernels("sm80", pallas_attn.merge_states, *states) == 1
assert kernels("sm80", dilated, dense) == 2  # one length, and the merge
assert kernels("sm80", sparse, dense) == 1
try:
    text("triton")
except NotImplementedError as error:
    assert "jax._src.pallas.triton" in str(error), error
else:
    raise AssertionError("the lowering is there")
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200, env=environment)


def test_nothing_of_torch_is_imported_unless_a_name_asks_for_it():
    program = (
        "import sys, jax.numpy as jnp, pallas_attn\n"
        "q = jnp.zeros((1, 16, 2, 64), 'bfloat16')\n"
        "pallas_attn.flash_attention(q, q, q)\n"
        "print(pallas_attn.explain(pallas_attn.flash_attention, q, q, q))\n"
        "assert 'torch' not in sys.modules and 'torch_attn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_a_package_that_is_not_installed_is_a_reason(package, monkeypatch):
    monkeypatch.setattr(
        "twin_attention.interop.kernels.in_jax.find_spec",
        lambda name: None if name == package else name,
    )
    with (
        use_target("sm80"),
        pytest.raises(NotImplementedError, match=f"{package} is not installed"),
    ):
        jax.jit(gradients("gluon")).trace(*arrays(64))


def test_other_functions_are_refused():
    spec = AttentionSpec(1, 300, 300, 4, 2, 128, 128, "bfloat16", 0.1)
    assert TORCH_TRITON.supports("paged_decode", spec, "sm90") is None
    assert jnp.dtype(spec.dtype) == jnp.bfloat16

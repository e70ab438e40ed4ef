"""A kernel that takes TMA descriptors is launched as by Triton, with fewer encodings."""

from contextvars import ContextVar
from types import SimpleNamespace

import pytest
import torch
from triton.backends.nvidia import driver as nvidia
from triton.runtime import _allocation
from triton.runtime import driver as runtime

from torch_attn import driver, private
from torch_attn.layouts import Layout, bind
from torch_attn.tensor_maps import TensorMap

X, Y, Z = (SimpleNamespace(data_ptr=lambda i=i: 1024 * i) for i in (1, 2, 3))
METADATA = {
    "swizzle": 3, "elem_size": 2, "elem_type": 1, "block_size": [1, 1, 64, 16], "fp4_padded": False,
}  # fmt: skip
MAP = "tensordesc<bf16[1, 1, 64, 16]>"
SIGNATURE = {
    "x": MAP, "y": "*fp32", "z": (MAP, MAP, "constexpr"), "n": "i32", "option": "constexpr",
}  # fmt: skip
FLAT = {"x": MAP, "y": "*fp32", "z": MAP, "more": MAP, "n": "i32"}


class Utilities:
    def __init__(self):
        self.encoded = []

    def encode(self, address, *fields):
        self.encoded.append(address)
        return address, str(fields)

    fill_tma_descriptor = fill_tma_descriptor_tiled = encode


@pytest.fixture
def utilities(monkeypatch):
    found = Utilities()
    monkeypatch.setattr(runtime, "_active", SimpleNamespace(utils=found))
    return found


def _flat(x):
    """Triton 3.9 makes a list of what is a tuple for other kernels."""
    return tuple(x) if isinstance(x, list) else x


@pytest.fixture
def compiled(monkeypatch):
    """A compiled kernel whose launcher keeps what reaches the C function."""
    kernel = SimpleNamespace(launched=[], function=7, packed_metadata=(4, 1, 0))
    launcher = object.__new__(nvidia.CudaLauncher)
    maps = [METADATA] * 3
    launcher.__dict__.update(
        launch=nvidia.wrap_handle_tensordesc(
            lambda *arguments: kernel.launched.append([*map(_flat, arguments)]), FLAT, maps
        ),
        global_scratch_size=0, profile_scratch_size=0, global_scratch_align=1,
        profile_scratch_align=1, num_ctas=1, launch_cooperative_grid=False, launch_pdl=False,
        gsan_enabled=False, arg_annotations=None, kernel_signature=None,
    )  # fmt: skip
    kernel.run, kernel.metadata = launcher, SimpleNamespace(tensordesc_meta=maps)
    kernel.src = SimpleNamespace(signature=dict(SIGNATURE))

    class Compiled:
        run, function, packed_metadata = kernel.run, kernel.function, kernel.packed_metadata
        metadata, src, launched = kernel.metadata, kernel.src, kernel.launched

        def __getitem__(self, grid):
            return lambda *arguments, stream=5: self.run(
                *grid, stream, self.function, self.packed_metadata, None, None, None, *arguments
            )

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
    return Compiled()


def tensor_map(operand):
    return TensorMap.of(operand, (2, 128, 3, 16), (6144, 48, 16, 1), (64, 16), None)


def layout(operand):
    return Layout(operand, torch.float32, (3,), (1,), True)


def arguments():
    return [tensor_map(0), layout(1), (tensor_map(2), tensor_map(2), None), 9, True]


def test_a_launch_reaches_the_driver_as_tritons_own(utilities, compiled):
    for _ in range(2):  # the second finds the signature as the first has left it
        driver.launcher_of(compiled, (1, 2, 3), arguments())(5, (1024, 2048, 3072))
    assert list(compiled.src.signature.values()) == list(FLAT.values())
    x, _, (z, more, _), *_ = bind(tuple(arguments()), (X, Y, Z))
    compiled[(1, 2, 3)](x, 2048, z, more, 9)
    ours, again, tritons = compiled.launched
    assert ours == again == tritons


def test_a_kernel_with_scratch_memory_is_launched_by_tritons_launcher(
    utilities, compiled, monkeypatch
):
    """Triton asks for the memory at each launch."""
    monkeypatch.setattr(_allocation, "_allocator", ContextVar("", default=lambda *size: size))
    compiled.run.global_scratch_size = 64
    driver.launcher_of(compiled, (1, 2, 3), arguments())(5, (1024, 2048, 3072))
    assert compiled.launched[0].count((6 * 64, 1, 5)) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda self, x, y, z, *rest: self.launch(z, y, x, *rest),
        lambda self, x, y, z, *rest: self.launch(x, y, z, (rest, "as one")),
        lambda self, *rest: self.launch(*rest[:-1], {"arguments": rest[-1]}),
        lambda self, *rest: self.launch_kernel(*rest),
    ],
)
def test_a_launcher_of_another_layout_is_left_to_triton(compiled, call, monkeypatch):
    compiled.src.signature = {"y": "*fp32", "n": "i32"}
    compiled.run.launch = compiled.run.launch_kernel = lambda *x: compiled.launched.append(x)
    monkeypatch.setattr(nvidia.CudaLauncher, "__call__", call)
    monkeypatch.setattr(private, "_missing", {})
    driver.launcher_of(compiled, (1, 2, 3), [layout(0), 9])(5, (2048,))
    compiled.run(1, 2, 3, 5, 7, (4, 1, 0), None, None, None, 2048, 9)
    launched = [x for x in compiled.launched if x[2] != 0]  # at most, no program was launched
    assert launched == launched[:1] * 2
    assert "what launches a kernel in Triton" in (private.missing() or "")


def test_a_launcher_without_an_attribute_is_left_to_triton(utilities, compiled, monkeypatch):
    monkeypatch.setattr(private, "_missing", {})
    compiled.src.signature, launched = {"y": "*fp32", "n": "i32"}, []
    monkeypatch.setattr(
        type(compiled), "__getitem__", lambda self, grid: lambda *x, stream: launched.append(x)
    )
    for owner, name in (
        (compiled.run, "launch"), (compiled.run, "global_scratch_size"),
        (compiled.metadata, "tensordesc_meta"), (compiled.src, "signature"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.delattr(owner, name)
            driver.launcher_of(compiled, (1, 2, 3), [layout(0), 9])(5, (2048,))
        assert name in (private.missing() or "")
    assert launched == [(2048, 9)] * 4


def test_a_descriptor_is_encoded_once_for_an_address(utilities, compiled):
    launch = driver.launcher_of(compiled, (1, 1, 1), arguments())
    for x in (1024, 3072, 1024, 3072):
        launch(5, (x, 2048, x))
    assert utilities.encoded == [1024] * 3 + [3072] * 3
    assert compiled.launched[0] == compiled.launched[2] != compiled.launched[1]


def test_all_launches_together_keep_few_descriptors(monkeypatch):
    monkeypatch.setattr(driver, "_encode", lambda tensor_map, metadata, address: address)
    monkeypatch.setattr(driver, "_DESCRIPTORS_MAX", 10)
    monkeypatch.setattr(driver._Descriptors, "_made", 10)
    kept = [driver._Descriptors(TensorMap(0, {}), METADATA) for _ in range(8)]
    for address in range(25):
        for descriptors in kept:
            assert descriptors[address] == address
            assert sum(map(len, kept)) <= 10

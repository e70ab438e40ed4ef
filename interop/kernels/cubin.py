"""Compile a launch of `torch_attn` for a card that torch need not have; describe its parameters.

Triton's own compilation asks its driver for the current device. This uses only private parts that
need no device. Checked with Triton 3.6 and 3.9; ``tests/kernels/test_cubin.py`` guards it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction, create_function_from_signature

from torch_attn.driver import pairs
from torch_attn.launch import Launch
from torch_attn.layouts import Layout, placeholders_of
from torch_attn.overlap import in_turn
from torch_attn.targets import described
from torch_attn.tensor_maps import TensorMap
from twin_attention.interop.kernels.machine import (
    Buffers,
    Compiled,
    Descriptor,
    Number,
    Parameter,
    Pointer,
)
from twin_attention.targets.target import Card

# Without one of these, or a name above, this import fails.
_pack_args = JITFunction._pack_args
_make_cubin: Any = CUDABackend.make_cubin
_ELEMENTS = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # of CUtensorMapDataType


@lru_cache(maxsize=1024)
def compile_launch(launch: Launch, card: Card) -> Compiled:
    """Return a launch's kernel for a card.

    Raise `NotImplementedError` if no configuration fits the card's shared memory.
    """
    compile = partial(_compile, card.capability)
    with described(card):
        config, compiled = launch.compile(compile, card.shared_memory)
        grid, arguments = launch.prepared(config)
    metadata = compiled.metadata
    assert metadata.global_scratch_size == metadata.profile_scratch_size == 0
    x, y, z = (*grid, 1, 1)[:3]
    return Compiled(
        metadata.name, without_ptx(compiled.asm["cubin"]), metadata.num_warps, metadata.shared,
        (x, y, z), tuple(_parameters(compiled, arguments, launch)), compiled.asm["ptx"], metadata,
    )  # fmt: skip


def without_ptx(cubin: bytes) -> bytes:
    """Return machine code with zeros for its copy of the PTX, most of the file.

    jaxlib hashes and copies the compressed file each time that a program runs.
    """
    elf = bytearray(cubin)
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<3H", elf, 0x3A)
    # Of each section: its name's place, type, flags, address, its place, and its size.
    sections = [struct.unpack_from("<2I4Q", elf, table + i * size) for i in range(count)]
    for name, _, _, _, start, length in sections:
        if elf.startswith(b".nv_debug_ptx_txt\0", sections[names][4] + name):
            elf[start : start + length] = bytes(length)
    return bytes(elf)


def order_parameters(compiled: Compiled, buffers: Buffers) -> Compiled:
    """Return a kernel that takes its parameters in the order of the buffers."""
    parameters = compiled.parameters
    last = [x.parameter for x in buffers.results if x.parameter is not None]
    before = [x.parameter for x in buffers.operands if x.parameter is not None]
    if not last or last[0] > max(before):
        return compiled
    order = [*(i for i in range(len(parameters)) if i not in last), *last]
    moved = tuple(parameters[i] for i in order)
    return compiled._replace(cubin=assemble(compiled, order), parameters=moved)


def assemble(compiled: Compiled, order: Sequence[int]) -> bytes:
    """Return machine code with a kernel's parameters in another order, kept in Triton's cache."""
    metadata, name = compiled.metadata, "reordered.cubin"
    kept = get_cache_manager(sha256(f"{metadata.hash} {order}".encode()).hexdigest())
    if (found := kept.get_file(name)) is not None:
        return Path(found).read_bytes()
    ptx = reorder_parameters(compiled.ptx, compiled.name, order)
    target = metadata.target
    code = without_ptx(_make_cubin(make_backend(target), ptx, {}, metadata, target.arch))
    kept.put(code, name)
    return code


def reorder_parameters(ptx: str, name: str, order: Sequence[int]) -> str:
    """Return PTX with the function's first parameters in another order, given by old numbers."""
    found = re.search(rf"\.entry {re.escape(name)}\(([^)]*)\)", ptx)
    assert found is not None, "a kernel without its function"
    declared = [x.strip() for x in found[1].split(",")]
    others = [i for i in range(len(declared)) if i not in order]
    text = ",\n\t".join(declared[i] for i in (*order, *others))
    return f"{ptx[: found.start(1)]}\n\t{text}\n{ptx[found.end(1) :]}"


def _compile(
    capability: int,
    kernel: Any,
    grid: tuple[int, ...],
    arguments: list[Any],
    options: dict[str, Any],
) -> Any:
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    options = options | {
        "debug": kernel.debug or knobs.runtime.debug,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }
    if hasattr(knobs.compilation, "fpsan_homomorphic_casts"):  # since Triton 3.9
        options["fpsan_homomorphic_casts"] = knobs.compilation.fpsan_homomorphic_casts
    specialize = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = specialize(*arguments, **options)
    checked, signature, constants, attributes = _pack_args(
        kernel, backend, options, bound, specialization, None
    )
    source = _source_class(kernel)(kernel, signature, constants, attributes)
    source.make_ir = in_turn(source.make_ir)
    return triton.compile(source, target=target, options=checked.__dict__)


def _source_class(kernel: Any) -> Any:
    if not kernel.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _parameters(compiled: Any, arguments: list[Any], launch: Launch) -> Iterator[Parameter]:
    operands = placeholders_of(launch.layouts)
    maps = iter(compiled.metadata.tensordesc_meta or ())
    for x, kind in pairs(arguments, tuple(compiled.src.signature.values())):
        if kind == "constexpr":
            continue
        if isinstance(x, TensorMap):
            shape, strides = (tuple(x.fields[name]) for name in ("shape", "strides"))
            found = next(maps)
            element = _ELEMENTS[operands[x.operand].dtype]
            yield Descriptor(
                x.operand, element, found["swizzle"], shape, strides, tuple(found["block_size"])
            )
            yield from (Number(size, "i32") for size in shape)
            yield from (Number(stride, "i64") for stride in strides)
        elif isinstance(x, Layout):
            yield Pointer(x.operand)
        else:
            yield Number(x, kind)

"""The private names of JAX and Triton that this side uses: without one, another family runs.

The table lists them by the group that needs them: "triton" compiles the portable kernels, "mosaic"
the Mosaic GPU kernels, and "foreign" launches `torch_attn`'s. A family whose group lacks a name
is refused before tracing, and `explain` names what is missing.

Files import the modules from here, by alias. A module is looked up on first use, so importing
`pallas_attn` imports no compiler. A missing module is None.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from threading import Thread
from typing import Any

from twin_attention.targets.versions import newer_versions

# The newest checked versions.
TESTED = {"jax": (0, 11), "triton": (3, 9)}

# Each group's modules by alias, with import path and the names used.
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "triton": {
        "mlir": ("jax._src.interpreters.mlir", "sanitize_name"),
        "pallas_core": ("jax._src.pallas.core", "register_lowering_rule"),
        "triton_lowering": ("jax._src.pallas.triton.lowering", "lower_jaxpr_to_triton_module"),
        "gpu_triton": ("jaxlib.gpu_triton", "TritonKernel TritonKernelCall create_array_parameter"),
        "stablehlo": ("jaxlib.mlir.dialects.stablehlo", "OptimizationBarrierOp"),
        "libtriton": ("triton._C.libtriton", "ir.parse_mlir_module"),
        "triton_backend": ("triton.backends.compiler", "GPUTarget Language.TRITON"),
        "triton_compiler": ("triton.compiler", "ASTSource"),
    },
    "foreign": {
        "gpu_triton": (
            "jaxlib.gpu_triton",
            "TritonKernel TritonKernelCall create_array_parameter create_scalar_parameter "
            "create_tma_descriptor_parameter",
        ),
        "stablehlo": ("jaxlib.mlir.dialects.stablehlo", "OptimizationBarrierOp"),
    },
    "mosaic": {
        "mlir": ("jax._src.interpreters.mlir", "register_lowering"),
        "mpmd": (
            "jax._src.pallas.mpmd",
            "_mpmd_map_fallback_lowering _mpmd_map_mgpu_lowering mpmd_map_p",
        ),
        "mgpu": (
            "jax.experimental.mosaic.gpu",
            "FragmentedArray FragmentedArray.foreach FragmentedArray.splat "
            "FragmentedArray.transfer_tiled bitwidth c when",
        ),
        "mgpu_utils": (
            "jax.experimental.mosaic.gpu.utils",
            "_infer_arch bitcast getelementptr memref_ptr shfl_bfly thread_idx warp_barrier",
        ),
        "fragmented_array": (
            "jax.experimental.mosaic.gpu.fragmented_array",
            "TiledLayout.base_tile_shape TiledLayout.lane_indices TiledLayout.registers_shape "
            "TiledLayout.vector_length TiledLayout.warp_indices Tiling.tile_strides "
            "tiled_copy_smem_gmem_layout",
        ),
        "ir": (
            "jaxlib.mlir.ir",
            "F16Type.get F32Type.get InsertionPoint IntegerType.get_signless MemRefType "
            "MemRefType.element_type MemRefType.get_strides_and_offset MemRefType.shape "
            "Type.parse VectorType VectorType.get",
        ),
        "arith": (
            "jaxlib.mlir.dialects.arith",
            "CmpFPredicate.UNE CmpIPredicate.eq CmpIPredicate.ne CmpIPredicate.sge "
            "CmpIPredicate.sle CmpIPredicate.slt addf addi andi cmpf cmpi divui extf extsi extui "
            "index_cast maximumf maxsi minsi mulf muli ori remui select shli shrui subi truncf "
            "xori",
        ),
        "llvm": (
            "jaxlib.mlir.dialects.llvm",
            "PointerType.get StructType.get_literal addrspacecast extractelement extractvalue "
            "inline_asm insertelement load mlir_undef ptrtoint store",
        ),
        "nvvm": (
            "jaxlib.mlir.dialects.nvvm",
            "LoadCacheModifierKind.CA LoadCacheModifierKind.CG ProxyKind.async_shared "
            "SharedSpace.shared_cta ShflKind.idx cp_async_commit_group cp_async_shared_global "
            "cp_async_wait_group fence_proxy shfl_sync",
        ),
        "stablehlo": ("jaxlib.mlir.dialects.stablehlo", "OptimizationBarrierOp"),
        "scf": ("jaxlib.mlir.dialects.scf", "IfOp yield_"),
        "vector": ("jaxlib.mlir.dialects.vector", "broadcast"),
    },
}


def __getattr__(alias: str) -> Any:
    """Return a module by its alias; None if it is not there."""
    for modules in GROUPS.values():
        if alias in modules:
            return _module(modules[alias][0])
    raise AttributeError(f"module {__name__!r} has no attribute {alias!r}")


@cache
def missing(group: str) -> str | None:
    """Say which private names of a group are missing; None for none.

    Triton, and jaxlib's plugin that launches what Triton compiles, may not be installed. The error
    comes when a kernel is lowered for a GPU.
    """
    absent = []
    for path, names in GROUPS[group].values():
        if find_spec(path.partition(".")[0]) is None:
            continue
        module = _module(path)
        lacks = [name for name in names.split() if not _has(module, name)]
        if path == "jaxlib.gpu_triton" and module is not None and lacks == names.split():
            continue  # without its plugin jaxlib has none of them
        absent += [f"{path}.{name}" for name in lacks]
    return f"private names that it needs are missing: {', '.join(absent)}" if absent else None


def ask_ptxas_once() -> None:
    """Let Mosaic GPU ask ptxas for its version only once.

    It starts a process to ask at each cast from or to 8 bits or fewer, and so at each integer
    division.
    """
    extension: Any = getattr(_module("jax._src.lib.mosaic_gpu"), "_mosaic_gpu_ext", None)
    ask = getattr(extension, "_get_ptxas_isa_version", None)
    if ask is not None:
        extension._get_ptxas_isa_version = cache(ask)


@cache
def hash_triton() -> None:
    """Hash Triton's own files in a thread, for the keys of its cache: an import of PyTorch hides
    the time.
    """
    cache: Any = _module("triton.runtime.cache")
    if (hashing := getattr(cache, "triton_key", None)) is not None:
        Thread(target=hashing).start()


def untested() -> str | None:
    """Say which versions are newer than the tested ones; None for none."""
    return newer_versions(TESTED)


def without_triton() -> str | None:
    """Say that the compiler of this side's Triton kernels is not installed; None if it is."""
    if find_spec("triton") is not None:
        return None
    return "Triton, which compiles it, is not installed: pip install 'twin-attention[triton]'"


def _module(path: str) -> Any:
    try:
        return import_module(path)
    except (ImportError, AttributeError):
        return None


def _has(module: Any, name: str) -> bool:
    try:
        attrgetter(name)(module)
    except AttributeError:
        return False
    return True

"""Lower a kernel in Mosaic GPU for another framework to launch.

JAX's CUDA plugin compiles what is returned here, and `torch_attn.mosaic_call` asks it to. Checked
with JAX 0.11.2; ``tests/pallas_attn_lowering/test_mosaic_in_torch.py`` guards it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from pallas_attn.private import ir
from twin_attention.contract.validate import fail

_TARGET = "mosaic_gpu_v2"
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def lower_ahead(call: Any) -> bytes:
    """Return the module that a kernel is compiled from.

    Args:
        call: the operation of a trace that calls it.

    Raises:
        NotImplementedError: JAX passes the kernel other buffers than its operands and results.
    """
    operands = [x.aval for x in call.invars]
    results = [x.aval for x in call.outvars]

    def function(*arrays: jax.Array) -> Any:
        return call.primitive.bind(*arrays, **call.params)

    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    lowered = jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",))
    found: list[Any] = []

    def visit(operation: Any) -> Any:
        name = operation.attributes["call_target_name"] if _is_call(operation) else None
        if name is not None and ir.StringAttr(name).value == _TARGET:
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.walk(visit)
    buffers = [(len(x.operands), len(x.results)) for x in found]
    if buffers != [(len(operands), len(results))]:
        expected = f"one kernel with {len(operands)} operands and {len(results)} results"
        fail(NotImplementedError, "implementation", expected, buffers)
    return found[0].attributes["mhlo.backend_config"]["module"].value_bytes


def _is_call(operation: Any) -> bool:
    return operation.name == "stablehlo.custom_call"


def plugin() -> str | None:
    """Return the path of JAX's CUDA plugin, None if it is not installed."""
    for name in _PLUGINS:
        found = find_spec(name) if find_spec(name.partition(".")[0]) else None
        if found is not None and found.origin is not None:
            library = Path(found.origin).with_name("xla_cuda_plugin.so")
            if library.exists():
                return str(library)
    return None

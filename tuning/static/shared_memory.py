"""Compile kernels only until their shared memory is known, which is several times faster.

Uses Triton's hook on a compiler's stages and private passes, which
``tests/tuning/test_sweep.py`` guards.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton import knobs
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.nvidia.compiler import get_ptx_version_from_options


@contextmanager
def only_shared_memory() -> Iterator[None]:
    """Let kernels compiled in the block have ``metadata.shared`` and no code."""
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.runtime.scope():
        knobs.cache.dir = folder
        hook: Any = _stop_at_shared_memory  # Triton's type for it has too few arguments
        knobs.runtime.add_stages_inspection_hook = hook
        yield


def _stop_at_shared_memory(*arguments: Any) -> tuple[str, str] | None:
    if not arguments:  # newer versions ask for a part of the cache's key
        return "shared memory", "shared memory"
    backend, stages, options, _, capability = arguments

    def allocate(module: Any, metadata: dict[str, Any]) -> str:
        manager = ir.pass_manager(module.context)
        passes.ttgpuir.add_combine_tensor_select_and_if(manager)
        passes.convert.add_scf_to_cf(manager)
        version = get_ptx_version_from_options(options, backend.target.arch)
        nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, version)
        manager.run(module, "allocate shared memory")
        metadata["shared"] = module.get_int_attr("ttg.shared")
        metadata["name"] = ""
        return ""

    stages["llir"] = allocate
    stages["ptx"] = stages["cubin"] = lambda source, metadata: b""
    return None

"""Compile a Triton module, given as text, with the Python `triton` package.

It is imported only when a kernel is compiled. Of Triton's private API it uses
``triton._C.libtriton.ir``, to parse the text, and `ASTSource`'s methods. Checked with Triton 3.6
and 3.9; ``tests/pallas_attn_lowering/test_lowering.py`` guards it.
"""

from __future__ import annotations

import hashlib
import tempfile
from typing import Any

import triton

from pallas_attn.private import libtriton, triton_backend, triton_compiler
from twin_attention.targets.kernels import KernelConfig


class _TextSource(triton_compiler.ASTSource):
    """A module in Triton's language as text.

    ``triton.compile("file.ttir")`` skips passes that fold ``acc + dot(a, b)``.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.ext = "ttir"
        self.language = triton_backend.Language.TRITON
        self.signature: dict[str, str] = {}

    def hash(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def make_ir(self, target: Any, options: Any, codegen_fns: Any, module_map: Any, context: Any):
        with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
            file.write(self.text)
            file.flush()
            module = libtriton.ir.parse_mlir_module(file.name, context)
        module.context = context
        return module


def compile_text(name: str, text: str, config: KernelConfig, target: str, capability: int) -> Any:
    """Compile the module `text`, whose function is `name`; assemble it for `capability`."""
    return triton.compile(
        _TextSource(name, text),
        target=triton_backend.GPUTarget("cuda", capability, 32),
        options={
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": True,
            "arch": target,
        },
    )

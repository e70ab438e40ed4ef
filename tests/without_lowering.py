"""Run the suite's GPU path as on a JAX without the Triton lowering of Pallas.

JAX has announced that lowering's end. ``PALLAS_TRITON=hidden make test`` on a GPU hides its
modules, and asks for "torch_triton" where a test of `pallas_attn` asks for "triton".
"""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest import mock

HIDDEN = os.environ.get("PALLAS_TRITON") == "hidden"
_MODULES = ("jax._src.pallas.triton", "jax._src.pallas.triton.lowering")
_FOLDERS = ("tests/semantics/", "tests/pallas_attn/", "tests/kernels/", "tests/models/")
_OF_CHOICES = ("/test_dispatch.py", "/test_private.py", "/test_explain.py", "::test_explain")


def hide() -> None:
    """Hide the lowering's modules; call it before anything imports JAX."""
    sys.modules.update(dict.fromkeys(_MODULES))  # type: ignore[arg-type]


def ask_for_others() -> None:
    from pallas_attn import dispatch

    choose = dispatch.family.choose

    def choose_another(package: str, implementation: str | None, *problem: Any) -> Any:
        return choose(package, name_of(package, implementation), *problem)

    mock.patch.object(
        dispatch, "family", mock.Mock(wraps=dispatch.family, choose=choose_another)
    ).start()


def name_of(package: str, implementation: Any) -> Any:
    renamed = HIDDEN and (package, implementation) == ("pallas_attn", "triton")
    return "torch_triton" if renamed else implementation


def leaves_out(error: NotImplementedError) -> bool:
    """Return True for a refusal of kernels that need the lowering.

    Paged caches in Mosaic GPU are among them: portable kernels prepare and combine their splits.
    """
    text = str(error)
    reasons = "JAX launches no kernel", f"cannot be imported: No module named '{_MODULES[0]}"
    return HIDDEN and text.startswith("implementation: ") and any(x in text for x in reasons)


def keeps(nodeid: str) -> bool:
    asks_for_own = any(x in nodeid for x in _OF_CHOICES)
    return not HIDDEN or (nodeid.startswith(_FOLDERS) and not asks_for_own)

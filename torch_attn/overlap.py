"""Do at once what a kernel's first launch waits for.

Triton does it one after the other: it hashes its own files, which every key of its cache begins
with; a C compiler builds what talks to the driver; the kernel is compiled; and the C compiler
builds the function that launches kernels of this signature. Here the first two go side by side, and
the last two. All names are private to Triton. Without one it does the same later, and nothing is
missing: Triton 3.9 has one function that launches all kernels, built once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from threading import Thread
from typing import Any

import triton
from triton.runtime import cache as triton_cache

from torch_attn.layouts import leaves


def flat_signature(kinds: Any) -> dict[int, str]:
    """Return the kinds of a kernel's arguments without tuples and constants, by position.

    It is the signature that the function is made for which launches the kernel.
    """
    return dict(enumerate(kind for kind in leaves(kinds) if kind != "constexpr"))


@contextmanager
def launcher_beside(kernel: Any, device: int) -> Iterator[None]:
    """Build the function that launches a kernel while the kernel is compiled in the block.

    Args:
        kernel: a `triton.jit` function.
        device: number of the current CUDA device.
    """
    _start_driver()
    kernel.device_caches[device]  # the first look sets what compiles
    compile = getattr(kernel, "compile", None)
    if compile is None or not hasattr(_driver(), "make_launcher"):
        yield
        return

    def compile_beside(source: Any, **options: Any) -> Any:
        builder = Thread(target=_build_launcher, args=(tuple(source.signature.values()),))
        builder.start()
        try:
            return compile(source, **options)
        finally:
            builder.join()

    kernel.compile = compile_beside
    try:
        yield
    finally:
        kernel.compile = compile


@cache
def _start_driver() -> None:
    hashing = Thread(target=getattr(triton_cache, "triton_key", lambda: None))
    hashing.start()
    triton.runtime.driver.active  # noqa: B018: the first look builds it
    hashing.join()


def _build_launcher(kinds: tuple[Any, ...]) -> None:
    """Build the function that launches kernels of a signature, which Triton then finds on disk."""
    driver = _driver()
    signature = flat_signature(kinds)
    descriptors = [{} for kind in signature.values() if kind.startswith("tensordesc")]
    with suppress(Exception):  # Triton builds it as well, and says what is wrong
        driver.compile_module_from_src(
            src=driver.make_launcher({}, signature, descriptors),
            name="__triton_launcher",
            library_dirs=driver.library_dirs(),
            include_dirs=driver.include_dirs,
            libraries=driver.libraries,
        )


def _driver() -> Any:
    return import_module("triton.backends.nvidia.driver")

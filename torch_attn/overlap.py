"""Do in parallel what first calls wait for.

While the kernels are imported, Triton hashes its own files, for its cache's keys, and a C compiler
builds what talks to the driver. While a kernel is compiled, the C compiler builds the function that
launches it. Threads compile a backward's kernels as soon as its forward's is traced.

All names are private to Triton 3.6. If one is missing, as in Triton 3.9, which has one function to
launch all kernels, Triton does the same work later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import cache
from importlib import import_module
from threading import Lock, Thread
from typing import Any

import torch
import triton
from triton.runtime import cache as triton_cache

from torch_attn.layouts import leaves
from torch_attn.targets import card_of, described

_changing = Lock()  # what compiles a kernel
_tracing = Lock()  # one kernel is traced at a time
_compiling: dict[Any, list[Future[None]]] = {}  # for each kernel, what threads compile
_behind: ContextVar[Callable[[], None] | None] = ContextVar("behind", default=None)


def flat_signature(kinds: Any) -> dict[int, str]:
    """Return the kinds of a kernel's arguments: its launch function's signature."""
    return dict(enumerate(kind for kind in leaves(kinds) if kind != "constexpr"))


@cache
def start_driver() -> tuple[Future[Any], ...]:
    """Hash Triton's files and build what talks to the driver, in threads; return futures."""
    pool = ThreadPoolExecutor()
    hashing = pool.submit(getattr(triton_cache, "triton_key", lambda: None))
    building = pool.submit(lambda: triton.runtime.driver.active)  # the first look builds it
    pool.shutdown(wait=False)
    return hashing, building


def build_launcher_beside(kernel: Any) -> None:
    if not (hasattr(kernel, "device_caches") and hasattr(_driver(), "make_launcher")):
        return
    wait(start_driver())
    with _changing:
        kernel.device_caches[torch.cuda.current_device()]  # the first look sets what compiles
        if not isinstance(kernel.compile, _CompilesBeside):
            kernel.compile = _CompilesBeside(kernel.compile)


class _CompilesBeside:
    """Triton's compile function, which also builds the kernel's launch function in a thread."""

    def __init__(self, compile: Callable[..., Any]) -> None:
        self._compile = compile

    def __call__(self, source: Any, **options: Any) -> Any:
        source.make_ir = in_turn(source.make_ir)
        builder = Thread(target=_build_launcher, args=(tuple(source.signature.values()),))
        builder.start()
        try:
            return self._compile(source, **options)
        finally:
            builder.join()


@contextmanager
def compiled_behind(launches: Callable[[], Sequence[Any]], device: torch.device) -> Iterator[None]:
    """Let threads compile kernels as soon as a kernel of the block has been traced.

    `launches` returns what to compile: each `torch_attn.launch.Launch` of "meta" tensors.
    """

    def start() -> None:
        _behind.set(None)
        # Errors show at the launch.
        with suppress(Exception), described(card_of(device)):
            found = launches()
            pool = ThreadPoolExecutor(len(found))
            for launch in found:
                future = pool.submit(copy_context().run, launch.compile_on, device)
                _compiling.setdefault(launch.kernel, []).append(future)
            pool.shutdown(wait=False)

    token = _behind.set(start)
    try:
        yield
    finally:
        _behind.reset(token)


def wait_for(kernel: Any) -> None:
    wait(_compiling.pop(kernel, ()))


def in_turn(make_ir: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that traces one kernel at a time, and then starts `compiled_behind`."""

    def traced(*args: Any, **options: Any) -> Any:
        with _tracing:
            module = make_ir(*args, **options)
        if (start := _behind.get()) is not None:
            start()
        return module

    return traced


def _build_launcher(kinds: tuple[Any, ...]) -> None:
    """Build a signature's launch function, which Triton then finds on disk."""
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

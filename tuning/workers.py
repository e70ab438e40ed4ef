from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context


@contextmanager
def workers() -> Iterator[Executor]:
    """Start processes that use no GPU, one per core."""
    context = get_context("spawn")  # JAX runs threads, which a fork does not survive
    with ProcessPoolExecutor(None, context, initializer=_start_worker) as pool:
        try:
            yield pool
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _start_worker() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # JAX's CUDA plugin, see `mosaic_aot`
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business

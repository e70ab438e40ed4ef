import os

# Set before any test imports a framework, which reads it when it starts: the two share a card's
# memory, and cuBLAS is deterministic only with a workspace of fixed size.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Nobody reads where an operation of a lowered program was written.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# pytest-xdist starts a worker for each core, so more threads only get in their way.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from tests import without_lowering

if without_lowering.HIDDEN:
    without_lowering.hide()

import gc
from collections.abc import Generator

import pytest
import torch
from hypothesis import settings

from tests.sides import EXPLICIT, IMPLEMENTATIONS, SIDES, Side
from tests.skipped import pytest_sessionfinish, pytest_terminal_summary
from twin_attention.interop.parity.environment import choose_device, compile_quickly
from twin_attention.targets.family import FAMILIES

__all__ = ["pytest_sessionfinish", "pytest_terminal_summary"]

ON_GPU = torch.cuda.is_available()
# Tests of up to a minute: at the end the other workers would wait for them.
LONG = (
    "tests/kernels/", "tests/tuning/", "tests/parity/", "tests/test_site", "tests/test_types",
    "tests/test_wheel", "tests/pallas_attn/test_context", "tests/pallas_attn/test_private",
    "tests/pallas_attn/test_sharded",
)  # fmt: skip
compile_quickly()
if without_lowering.HIDDEN:
    without_lowering.ask_for_others()

settings.register_profile("cpu", deadline=None, derandomize=True, max_examples=10)
settings.register_profile("gpu", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("gpu" if ON_GPU else "cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--suite",
        choices=("small", "full"),
        default="full" if ON_GPU else "small",
        help="cases that kernels run in tests/semantics (default: full on a GPU, else small)",
    )


@pytest.fixture(scope="session")
def torch_device() -> str:
    if not ON_GPU:
        return "cpu"
    choose_device()
    return "cuda"


@pytest.fixture(scope="session", params=SIDES)
def side(request: pytest.FixtureRequest, torch_device: str) -> Side:
    return SIDES[request.param](torch_device)


@pytest.fixture
def one_thread() -> Generator[None]:
    """Keep torch from splitting tiny operations, which takes longer than they do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", params=SIDES)
def bitwise_side(request: pytest.FixtureRequest, torch_device: str) -> Side:
    """Each side, compiled so that a kernel gives the same bits in every program."""
    return SIDES[request.param](torch_device, bitwise=True)


@pytest.fixture(scope="session", params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    """Each implementation that this machine runs; on a CPU "triton" is interpreted."""
    return request.param


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """Skip a test whose kernels need Pallas's Triton lowering, if that is hidden."""
    try:
        return (yield)
    except NotImplementedError as error:
        if without_lowering.leaves_out(error):
            pytest.skip(str(error))
        raise


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking through the frameworks and traces again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of implementations that a side lacks; start with the long ones."""
    kept, left_out = [], []
    for item in items:
        arguments = item.callspec.params if hasattr(item, "callspec") else {}
        asked = arguments.get("implementation", arguments.get("by"))
        own = "pallas_attn" if "/pallas_attn/" in item.nodeid else "torch_attn"
        package = arguments.get("side", arguments.get("bitwise_side", own))
        has_it = asked not in IMPLEMENTATIONS or asked in (x.name for x in FAMILIES[package])
        if asked in EXPLICIT:
            decodes = "paged" in (x.folder for x in FAMILIES[package] if x.name == asked)
            has_it = has_it and (decodes or "/test_decode" not in item.nodeid)
        if asked == "reference" and "/semantics/" in item.nodeid:
            # Both sides' is the same code, and named cases run both.
            has_it = package == "torch_attn" or "/test_named_cases" in item.nodeid
        has_it = has_it and without_lowering.keeps(item.nodeid)
        (kept if has_it else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(kept, key=lambda item: not item.nodeid.startswith(LONG))

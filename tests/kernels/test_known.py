import subprocess
import sys
import threading

import pytest

from tests.kernels.known_problem import FORWARD, answers
from twin_attention.interop.kernels import cubin, kept, known
from twin_attention.interop.kernels.machine import Compiled, Pointer


@pytest.fixture(autouse=True)
def _keeps(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(known, "cuda_devices", lambda: ("a GPU",))
    known._kernel_of.cache_clear()
    yield
    known._kernel_of.cache_clear()
    kept._state.cache_clear()


def kernel():
    (step,) = known.plan_of(FORWARD).steps
    return known.kernel_of(step.code, step.written, step.zeroed)


def test_a_later_process_imports_neither_torch_nor_triton():
    found = answers()
    command = [sys.executable, "-m", "tests.kernels.known_problem"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == found, done.stderr


def test_what_is_gone_or_cut_off_is_made_again(tmp_path):
    found = kernel()
    files = [*tmp_path.joinpath("twin-attention").iterdir()]
    assert len(files) == 3  # the plan, the kernel and its machine code
    for file in files:
        known._kernel_of.cache_clear()
        file.write_bytes(file.read_bytes()[:9])
        assert kernel() == found
        file.unlink()
        known._kernel_of.cache_clear()
        assert kernel() == found


def test_other_problems_and_other_variables_ask_anew(monkeypatch):
    kept.save(FORWARD, 1)
    assert kept.load(FORWARD) == 1
    assert kept.load(FORWARD._replace(target="sm90")) is None
    kept._state.cache_clear()
    assert kept.load(FORWARD) == 1
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/elsewhere")
    kept._state.cache_clear()
    assert kept.load(FORWARD) is None


def test_a_thread_compiles_what_is_asked_for_later(monkeypatch):
    ran = []
    made = Compiled("f", b"code", 4, 0, (1, 1, 1), (Pointer(0),))

    def compile_launch(launch, card):
        ran.append(threading.current_thread())
        return made if len(ran) > 1 else 1 / 0

    monkeypatch.setattr(cubin, "compile_launch", compile_launch)
    (step,) = known.plan_of(FORWARD).steps
    for _ in range(2):  # what failed is compiled again
        before = {*threading.enumerate()}
        known.begin(step.code, (0,), ())
        for thread in {*threading.enumerate()} - before:
            thread.join()
    assert known.kernel_of(step.code, (0,), ())[0] == made
    assert len(ran) == 2
    assert threading.current_thread() not in ran

from types import SimpleNamespace

import pytest

from tuning.__main__ import main
from tuning.static import command, fuzz, triton_aot
from twin_attention.interop.parity.cases import BlockSparseCase
from twin_attention.interop.parity.fuzz.problems import Problem


@pytest.fixture
def found(monkeypatch):

    def run(result):
        def compile_kernels(spec, target, sinks, family):
            print("all of the PTX")
            if isinstance(result, Exception):
                raise result
            return [("flash_fwd", None, result)]

        monkeypatch.setattr(fuzz, "compiler", lambda *_: compile_kernels)
        monkeypatch.setattr(fuzz, "measure", lambda binary, target: binary)
        (first, *_) = fuzz.compilations("torch", "sm90", 1, 0)
        return fuzz.find_mistakes(first)

    return run


def binary(unwritten=0, overwritten=0, serialized=False):
    return SimpleNamespace(unwritten=unwritten, overwritten=overwritten, serialized=serialized)


def test_problems_are_random_and_again_the_same():
    first, again = (fuzz.compilations("torch", "sm90", 6, 3) for _ in range(2))
    assert first == again != fuzz.compilations("torch", "sm90", 6, 4)
    assert {x.family for x in first} == {"gluon"}
    assert len({x.problem.name for x in first}) == 6
    assert {x.spec.dtype_bits for x in first} == {16}
    assert {x.family for x in fuzz.compilations("jax", "sm80", 1, 0)} == {"mosaic"}


def test_fit_code_has_no_mistake(found):
    assert found(binary()) == (1, [])


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (binary(unwritten=2), "flash_fwd reads registers that nothing wrote"),
        (binary(overwritten=1), "flash_fwd overwrites barriers' numbers"),
        (binary(serialized=True), "flash_fwd waits for each wgmma"),
        (RuntimeError("`ptxas` failed with error code -11\nRepro"), "failed with error code -11"),
    ],
)
def test_a_mistake_names_the_problem(found, result, reason, capsys):
    _, (mistake,) = found(result)
    assert reason in mistake.reason
    heading, run = str(mistake).split("\n")
    assert heading.startswith(mistake.compilation.problem.name)
    line = run.strip().removeprefix("python -m twin_attention.interop.parity --problem ").strip("'")
    assert Problem.of_line(line) == mistake.compilation.problem
    assert "PTX" not in capsys.readouterr().out


def test_problems_that_explicit_kernels_leave_are_not_compiled():
    spec = BlockSparseCase("", tile_q=64, tile_kv=128).spec
    with pytest.raises(NotImplementedError, match="tiles of 128 queries by 128 keys"):
        triton_aot.compile_kernels(spec, "sm90", family="gluon")


def test_what_kernels_refuse_is_no_mistake(found):
    assert found(NotImplementedError("its kernels take no bias")) == (0, [])


@pytest.mark.parametrize("mistakes", [0, 1])
def test_the_command_says_what_failed(mistakes, monkeypatch, capsys):
    def in_processes(function, selected, *_):
        return [(5, [fuzz.Mistake(selected[0], "crashed")][:mistakes])]

    monkeypatch.setattr(command, "_in_processes", in_processes)
    arguments = ["static", "--target", "sm90", "--framework", "torch", "--random", "2"]
    assert main(arguments) == mistakes
    out = capsys.readouterr().out
    assert f"5 kernels of 2 random problems compiled in 0 s, {mistakes} failed" in out
    assert ("torch gluon on sm90: crashed" in out) == bool(mistakes)

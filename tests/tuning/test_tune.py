"""`python -m tuning search`, with a stub in place of compilers, GPU and timer."""

from dataclasses import replace
from itertools import cycle
from math import inf
from types import SimpleNamespace

import pytest
from rich.console import Console

from bench.records import Times
from tests.tuning.conftest import FIT
from tuning import __main__ as main
from tuning import workers
from tuning.search import command, survey
from tuning.search import search as rows
from tuning.search.search import search
from tuning.search.space import TUNED, candidates, may_fit
from tuning.search.survey import Plan, Survey, compile_one
from tuning.search.table import ConfigTable
from tuning.search.trial import Refused, Trials
from tuning.static import gate
from twin_attention.interop.parity import environment
from twin_attention.interop.parity.cases import BlockSparseCase, DecodeCase, FlashCase, PagedCase
from twin_attention.targets.config import PACKAGES, current_configs, parse_table, table_path
from twin_attention.targets.kernels import KERNELS, CombineConfig, DecodeConfig, FlashConfig
from twin_attention.targets.target import TARGETS

TEXT = """\
# At the top, by hand.

[flash_fwd]
columns = ["dtype_bits", "head_dim", "when", "block_q", "block_kv", "num_warps", "num_stages"]
rows = [
  [16,  64, "",        64, 64, 4, 3],
  # Above the second row.
  [16, 128, "softcap", 96, 64, 8, 3],  # Tuned 2026-01-01 on Old GPU: 2.0000 ms, before 3.0000 ms
  [16, 128, "",        64, 64, 8, 3],  # by hand
]

[combine]
columns = ["block_states", "num_warps", "num_stages"]
rows = [
  [16, 4, 1],
]
"""
PRESENT = FlashConfig(block_q=64, block_kv=64, num_warps=4, num_stages=3)
BETTER = replace(PRESENT, block_q=128)
WRONG = replace(PRESENT, block_kv=32)
NOISY = replace(PRESENT, num_stages=2)
BROKEN = replace(PRESENT, num_stages=4)
UNFIT = replace(PRESENT, num_warps=8)
MILLISECONDS = {PRESENT: 1.0, BETTER: 0.7, NOISY: 0.85, UNFIT: 0.1, WRONG: 0.1}


def timer(calls):
    assert all(run() == config for config, run in calls.items())
    return {
        config: SimpleNamespace(busy=Times(ms, ms - 0.05, ms + 0.05))
        for config, ms in ((config, MILLISECONDS.get(config, 2.0)) for config in calls)
    }


def call(config):
    if config == WRONG:
        raise Refused("error is 3 times its budget")
    if config == BROKEN:
        raise RuntimeError("no launch")
    return lambda: config


def surveys(row, case, configs):
    return [
        Survey(config, FIT, "causal: spills" if config == UNFIT else None, code=str(config))
        for config in configs
    ]


@pytest.fixture
def table():
    return ConfigTable(TEXT)


@pytest.fixture
def tune(table, tmp_path):

    def run(**tools):
        defaults = {
            "survey": surveys,
            "calls": lambda row, case: call,
            "timer": timer,
            "note": lambda found: f"today: {found}",
        }
        output = tmp_path / "sm80.toml"
        chosen = [next(table.rows("flash_fwd"))]
        console = Console(width=120)
        with console.capture() as capture:
            rows.tune(table, "sm80", chosen, rows.Tools(**defaults | tools), output, inf, console)
        return output, capture.get()

    return run


def only(*configs):
    return lambda row, case, _: [Survey(config, FIT, code=str(config)) for config in configs]


def test_a_faster_configuration_is_written(tune):
    output, printed = tune()
    lines = TEXT.splitlines()
    lines[5:9] = [
        '  [16,  64, "",        128, 64, 4, 3],  # Tuned today: 0.7000 ms, before 1.0000 ms',
        lines[6],
        lines[7].replace(" 96,", "  96,"),
        lines[8].replace(" 64, 64", "  64, 64"),
    ]
    assert output.read_text().splitlines() == lines
    for line in ("Refused: error is 3 times its budget", "RuntimeError: no launch"):
        assert line in printed


@pytest.mark.parametrize("config", [WRONG, NOISY, BROKEN, UNFIT])
def test_another_one_is_not(tune, config):
    def survey_one(row, case, configs):
        return surveys(row, case, [PRESENT, config])

    output, printed = tune(survey=survey_one)
    assert not output.exists()
    assert "stays: nothing is faster by more than the noise" in printed


def test_a_gain_that_does_not_repeat_is_not_written(tune):
    """The winner is timed once more, and then is as fast as the present row."""
    asked = []

    def lucky(calls):
        asked.append(set(calls))
        timings = timer(calls)
        return timings if len(asked) == 1 else dict.fromkeys(calls, timings[PRESENT])

    output, _ = tune(survey=only(PRESENT, BETTER), timer=lucky)
    assert asked == [{PRESENT, BETTER}] * 2
    assert not output.exists()


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("target", TARGETS)
def test_writing_what_a_shipped_row_has_changes_its_comment_alone(package, target):
    text = table_path(package, target).read_text()
    table = ConfigTable(text)
    for kernel in KERNELS:
        for row in table.rows(kernel):
            table.write(row, row.config, "now")
            lines = zip(table.text.splitlines(), text.splitlines(), strict=True)
            ((new, old),) = [(new, old) for new, old in lines if new != old]
            assert new == old.partition("#")[0].rstrip() + "  # Tuned now"
            table = ConfigTable(text)


def test_rows_that_were_finished_stay_when_interrupted(table, tmp_path):
    first, second, _ = table.rows("flash_fwd")

    def interrupt(row, case):
        if row == second:
            raise KeyboardInterrupt
        return call

    tools = rows.Tools(surveys, interrupt, timer, lambda found: "today")
    output = tmp_path / "sm80.toml"
    with pytest.raises(KeyboardInterrupt):
        rows.tune(table, "sm80", [first, second], tools, output, inf, Console(quiet=True))
    found = parse_table(output.read_text())["flash_fwd"]
    assert [row.config.block_q for row in found] == [128, 96, 64]


def test_no_candidate_is_begun_when_the_time_is_over(table, tmp_path):
    tools = rows.Tools(surveys, lambda row, case: call, timer, lambda found: "today")
    console = Console(quiet=True)
    for seconds, written in ((0.0, False), (3600.0, True)):
        output = tmp_path / str(seconds)
        rows.tune(table, "sm80", list(table.rows("flash_fwd"))[:1], tools, output, seconds, console)
        assert output.exists() == written


def test_each_candidate_is_timed_against_the_best_so_far():
    asked = []

    def log(calls):
        asked.append(list(calls))
        return timer(calls)

    found = search(PRESENT, [NOISY, BETTER, BROKEN, UNFIT], call, log, inf, lambda line: None)
    assert asked == [[PRESENT, NOISY], [PRESENT, BETTER], [BETTER, UNFIT], [PRESENT, UNFIT]]
    assert (found.config, found.times.median, found.before.median) == (UNFIT, 0.1, 1.0)


def test_a_wrong_present_configuration_is_an_error():
    with pytest.raises(Refused):
        search(WRONG, [BETTER], call, timer, inf, lambda line: None)


SPEC = FlashCase("", seq_q=1024, seq_kv=1024, head_dim=128).spec


@pytest.mark.parametrize(
    ("kernel", "config", "target", "fits"),
    [
        # 128×128 accumulators and 128×128 scores: 256 registers a thread of 4 warps, 128 of 8
        ("flash_fwd", FlashConfig(128, 128, 4, 2), "sm80", False),
        ("flash_fwd", FlashConfig(128, 128, 8, 2), "sm80", True),
        # 3 tiles of 128 keys and values ahead: 192 KiB
        ("flash_fwd", FlashConfig(128, 128, 8, 4), "sm80", False),
        ("flash_fwd", FlashConfig(128, 128, 8, 4), "sm90", True),
        # of q and dout a backward loads block_q rows
        ("flash_bwd_dkdv", FlashConfig(128, 32, 8, 4), "sm80", False),
        ("flash_bwd_dkdv", FlashConfig(32, 64, 8, 4), "sm80", True),
        # two accumulators
        ("flash_bwd_dkdv", FlashConfig(16, 128, 4, 1), "sm80", False),
        ("flash_bwd_dq", FlashConfig(128, 16, 4, 1), "sm80", True),
        # 16×16 scores are two instructions'
        ("flash_bwd_dq", FlashConfig(16, 16, 4, 1), "sm80", False),
        ("flash_bwd_dq", FlashConfig(16, 32, 4, 1), "sm80", True),
    ],
)
def test_what_may_fit(kernel, config, target, fits):
    assert may_fit(kernel, SPEC, config, target) == fits


def test_the_space_is_pruned_and_the_nearest_come_first():
    found = candidates("flash_fwd", SPEC, FlashConfig(128, 64, 8, 3), "sm80")
    assert 0 < len(found) < 4 * 4 * 2 * 4
    assert FlashConfig(128, 64, 8, 3) not in found
    assert {vars(config)["num_warps"] for config in found} == {4, 8}
    assert found[0] in (FlashConfig(128, 64, 8, 2), FlashConfig(128, 64, 8, 4),
                        FlashConfig(64, 64, 8, 3), FlashConfig(128, 32, 8, 3))  # fmt: skip
    assert found.index(FlashConfig(128, 32, 8, 3)) < found.index(FlashConfig(32, 16, 4, 1))


def test_one_of_the_configurations_that_make_the_same_code_is_run():
    entries = [
        Survey(PRESENT, FIT, code="a"),
        Survey(BETTER, FIT, code="b"),
        Survey(NOISY, FIT, code="b"),
        Survey(BROKEN, FIT, code="a"),
        Survey(UNFIT, FIT, "spills", code="c"),
        Survey(WRONG, FIT, code="d"),
    ]
    assert list(rows.distinct(entries, PRESENT)) == [BETTER, WRONG]


@pytest.fixture
def compiled(monkeypatch):
    """Kernels whose resources a test sets by configuration; return those, and what was asked."""
    found, asked = {}, []

    def compile_kernels(spec, target, device=None):
        asked.append((spec, target) if device is None else (spec, target, device))
        # As the packages do: the configuration is that of the block.
        config = current_configs("torch_attn", target, spec)["flash_fwd"]
        if isinstance(found.get(config), Exception):
            raise found[config]
        binary = SimpleNamespace(asm={"cubin": repr(config).encode()}, config=config)
        return [("flash_fwd", config, binary), ("flash_bwd_dq", config, None)]

    monkeypatch.setattr(survey, "compiler", lambda framework: compile_kernels)
    monkeypatch.setattr(survey, "measure", lambda binary, target: found.get(binary.config, FIT))
    return found, asked


def plan(target="sm80", device=None):
    problems = tuple(
        gate.Problem("torch", target, "bfloat16", 64, feature)
        for feature in ("causal", "all-options")
    )
    return Plan("torch_attn", target, "flash_fwd", problems, SPEC, device)


@pytest.mark.parametrize(
    ("target", "resources", "reason"),
    [
        ("sm80", {}, None),
        ("sm80", {"spill_stores": 128}, "causal: spills 128 B of stores"),
        ("sm90", {"spill_stores": 4, "wgmma": 8}, None),
        ("sm90", {"spill_stores": 4000, "spill_loads": 100, "wgmma": 8}, "causal: spills 4100 B"),
        ("sm80", {"occupancy": 0}, "causal: no block fits"),
    ],
)
def test_what_is_not_fit_is_dropped(compiled, target, resources, reason):
    found, _ = compiled
    found[BETTER] = replace(FIT, **resources)
    entry = compile_one(plan(target), BETTER)
    assert (entry.config, entry.resources) == (BETTER, found[BETTER])
    assert entry.reason is reason if reason is None else entry.reason.startswith(reason)


def test_what_does_not_compile_is_dropped(compiled):
    found, _ = compiled
    found[BETTER] = RuntimeError("out of\nresources")
    assert compile_one(plan(), BETTER) == Survey(BETTER, None, "RuntimeError: out of")


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("target", TARGETS)
def test_every_shipped_row_has_a_case_and_a_problem_of_the_gate(package, target):
    """If this fails for a new key, add cases to tuning/search/cases.py that reach its rows."""
    table = ConfigTable(table_path(package, target).read_text())
    found = [row for kernel in TUNED for row in table.rows(kernel)]
    assert found
    for row in found:
        case = rows.case_of(table, row)
        assert may_fit(row.kernel, case.spec, row.config, target)
        assert case.spec.dtype_bits == dict(row.key).get("dtype_bits", case.spec.dtype_bits)
        assert case.spec.head_dim == dict(row.key).get("head_dim", case.spec.head_dim)
        assert next(survey.gate_problems(table, package, target, row), None) is not None


TRIALS = {
    "flash_fwd": FlashCase("trial", 1, 64, 64, 1, 1, 16, causal=True, gradients=False),
    "flash_bwd_dq": FlashCase("trial", 1, 64, 64, 1, 1, 16, causal=True),
    "flash_bwd_dkdv": FlashCase("trial", 1, 64, 64, 1, 1, 16, causal=True),
    "flash_bwd_dkdv of a block mask": BlockSparseCase("trial", 1, 128, 128, 1, 1, 16),
    "paged_decode": DecodeCase("trial", (40,), tokens=1, heads_q=2, heads_kv=1, head_dim=16),
    "paged_attention": PagedCase(
        "trial", (40,), new_tokens=(9,), heads_q=2, heads_kv=1, head_dim=16
    ),
    "combine": DecodeCase(
        "trial", (40,), tokens=1, heads_q=2, heads_kv=1, head_dim=16, num_splits=2
    ),
}


@pytest.mark.parametrize(
    ("package", "kernel"), zip(cycle(command.VERSIONS), TRIALS, strict=False), ids=str
)
def test_a_trial_runs_the_configuration_and_checks_it(package, kernel, torch_device):
    case = TRIALS[kernel]
    kernel = kernel.removesuffix(" of a block mask")
    trials = Trials(package, "sm80", kernel, case, torch_device)
    block_q = 64 if isinstance(case, BlockSparseCase) else 32
    small = dict.fromkeys(("paged_decode", "paged_attention"), DecodeConfig(32, 16, 4, 1))
    small["combine"] = CombineConfig(16, 4, 1)
    results = trials.call(small.get(kernel, FlashConfig(block_q, block_q // 2, 4, 1)))()
    assert trials.error(results) <= 1
    assert trials.error([results[0] * 1.1, *results[1:]]) > 1


def test_a_dry_run_prints_the_space_and_writes_nothing(monkeypatch, tmp_path, capsys):
    shipped = tmp_path / "sm80.toml"
    shipped.write_text(TEXT)
    output = tmp_path / "output.toml"
    monkeypatch.setattr(command, "table_path", lambda side, target: shipped)
    monkeypatch.setattr(
        survey, "survey", lambda pool, table, side, target, device, *rest: surveys(*rest)
    )
    monkeypatch.setattr(workers, "ProcessPoolExecutor", StubPool)
    arguments = ["--side", "torch_attn", "--target", "sm80", "--kernel", "flash_fwd",
                 "--head-dim", "64", "--output", str(output)]  # fmt: skip
    assert main.main(["search", *arguments, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "causal: spills" in printed
    assert "fit, present" in printed
    assert "flash_fwd dtype_bits=16 head_dim=64: 110 of 111 are fit to run" in printed
    assert shipped.read_text() == TEXT
    assert not output.exists()


class StubPool:
    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def shutdown(self, **_):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head-dim", "48"], "expected options that leave a row of the table, got none"),
        ([], "expected a CUDA GPU that torch and JAX both see, or --dry-run"),
    ],
)
def test_what_it_cannot_do_it_refuses(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(environment, "choose_device", lambda: "cpu")
    with pytest.raises(SystemExit) as exit:
        main.main(["search", "--side", "torch_attn", "--target", "sm80", *arguments])
    assert exit.value.code == 2
    assert capsys.readouterr().err.endswith(f"python -m tuning search: error: {message}\n")

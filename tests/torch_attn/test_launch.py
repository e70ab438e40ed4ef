"""A launch keeps what it prepared: when the next one may use it, and that it does the same."""

import inspect
import sys
from types import FunctionType, SimpleNamespace

import pytest
import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from interop.parity.cases import FlashCase
from torch_attn import append_kv, flash_attention, launch, paged_decode, targets
from torch_attn.dispatch import choose
from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.reference import attention_forward
from twin_attention.targets.config import use_configs
from twin_attention.targets.family import portable_backend
from twin_attention.targets.target import use_target

SPEC = FlashCase("", 1, 128, 128, 2, 2, 64, dtype="float16").spec
SM90 = portable_backend("torch_attn", "sm90")


class Kernel:
    """A `triton.jit` function that keeps a record of what is asked of it."""

    arg_names = ("x_ptr", "SCALE", "ROWS", "BLOCK_KV")

    def __init__(self):
        self.fn, self.compiled, self.launched = object(), [], []
        self.shared_of_a_stage = 0

    def warmup(self, *operands, grid, **arguments):
        self.compiled.append((grid, operands, arguments))
        return self.Compiled(self, arguments["num_stages"])

    class Compiled:
        def __init__(self, kernel, stages):
            self.kernel, self.stages = kernel, stages
            self.metadata = SimpleNamespace(shared=stages * kernel.shared_of_a_stage)

        def __getitem__(self, grid):
            return lambda *arguments: self.kernel.launched.append((grid, arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.delenv("TWIN_ATTENTION_TARGET", raising=False)
    monkeypatch.setattr(launch, "_launchers", {})
    monkeypatch.setattr(targets, "_properties", lambda device: ((9, 0), 132, 227 * 1024))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


def operand(**changes):
    """What a launch looks at of a tensor on a GPU."""
    defaults = {"dtype": torch.float16, "rows": 3, "strides": (64, 1), "pointer": 256, "device": 0}
    layout = defaults | changes
    return SimpleNamespace(
        device=torch.device("cuda", layout["device"]),
        dtype=layout["dtype"],
        shape=(layout["rows"], 64),
        stride=lambda: layout["strides"],
        data_ptr=lambda: layout["pointer"],
    )


def prepare(call):
    return (3,), {"ROWS": call.layouts[0].shape[0], "SCALE": call.spec.scale}


def run(kernel, x, *constants, spec=SPEC, prepare=prepare, **options):
    backend, _ = choose(None, x.device, spec)
    launch.launch("flash_fwd", kernel, prepare, (x,), spec, backend, *constants, **options)


def test_the_same_problem_is_prepared_once(kernel):
    x, y = operand(), operand(pointer=512)
    run(kernel, x)
    run(kernel, y)
    config = SM90.configs(SPEC)["flash_fwd"]
    ((grid, operands, arguments),) = kernel.compiled
    assert (grid, operands) == ((3,), (x,))
    assert arguments["BLOCK_KV"] == config.block_kv
    # In the order of the kernel's parameters, without Triton's own options.
    assert kernel.launched == [((3, 1, 1), (of, SPEC.scale, 3, config.block_kv)) for of in (x, y)]


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.bfloat16},
        {"rows": 4},
        {"strides": (128, 1)},
        {"pointer": 258},
        {"device": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_layout_goes_through_triton(kernel, monkeypatch, changes):
    run(kernel, operand())
    monkeypatch.setattr(launch, "_current", lambda device: launch.nullcontext())
    run(kernel, operand(**changes))
    assert len(kernel.compiled) == 2


def test_another_problem_target_or_configuration_goes_through_triton(kernel):
    x = operand()
    run(kernel, x)
    run(kernel, x, "constant")
    run(kernel, x, launch_pdl=True)
    run(kernel, x, spec=FlashCase("", 1, 64, 128, 2, 2, 64, dtype="float16").spec)
    with use_configs({"flash_fwd": {"block_kv": 16}}):
        run(kernel, x)
    with use_target("sm80"), launch.recording():
        run(kernel, x)  # which compiles only
    other = Kernel()
    run(other, x)
    assert (len(kernel.compiled), len(other.compiled)) == (6, 1)
    assert (len(kernel.launched), len(other.launched)) == (5, 1)


def test_a_kernel_that_does_not_fit_gets_fewer_stages(kernel):
    kernel.shared_of_a_stage = 227 * 1024 // 2
    run(kernel, operand())
    assert SM90.configs(SPEC)["flash_fwd"].num_stages == 3
    assert [arguments["num_stages"] for *_, arguments in kernel.compiled] == [3, 2]
    assert len(kernel.launched) == 1


@pytest.mark.parametrize(
    ("capability", "of_the_card", "limit"),
    [((9, 0), 227, 163), ((8, 0), 163, 163), ((8, 6), 99, 99)],
)
def test_the_limit_is_the_targets_or_a_smaller_cards(
    kernel, monkeypatch, capability, of_the_card, limit
):
    properties = capability, 132, of_the_card * 1024
    monkeypatch.setattr(targets, "_properties", lambda device: properties)
    kernel.shared_of_a_stage = 228 * 1024
    message = f"flash_fwd: expected at most {limit * 1024} bytes of shared memory on sm80"
    with use_target("sm80"), pytest.raises(NotImplementedError, match=message):
        run(kernel, operand())
    assert not kernel.launched


def test_a_value_from_outside_the_key_is_never_frozen(kernel):
    """A function made around it is another key each time, however alike the launches are."""
    x = operand()
    for rows in (7, 8):
        run(kernel, x, prepare=lambda call, rows=rows: ((3,), {"ROWS": rows, "SCALE": 0.5}))
    assert [arguments["ROWS"] for _, _, arguments in kernel.compiled] == [7, 8]


def test_every_kernel_is_prepared_from_its_call_alone(monkeypatch):
    """By a plain function of a module: nothing of the launch reaches it but the `KernelCall`."""
    calls = []
    prepared = launch.KernelCall._replace
    monkeypatch.setattr(
        launch.KernelCall, "_replace", lambda call, **x: calls.append(call) or prepared(call, **x)
    )
    q, k, v = (torch.zeros(1, 16, 2, 16, requires_grad=True) for _ in range(3))
    flash_attention(q, k, v, implementation="triton").sum().backward()
    pages = torch.zeros(2, 16, 2, 16, dtype=torch.float16)
    tables, lengths = torch.tensor([[0, 1]]).int(), torch.tensor([20]).int()
    new = torch.zeros(1, 1, 2, 16, dtype=torch.float16)
    append_kv(new, new, pages, pages.clone(), tables, lengths, implementation="triton")
    paged_decode(new, pages, pages, tables, lengths, num_splits=2, implementation="triton")
    assert {call.function.__name__ for call in calls} == {
        "flash_fwd_kernel",
        "flash_bwd_preprocess_kernel",
        "flash_bwd_dq_kernel",
        "flash_bwd_dkdv_kernel",
        "append_kv_kernel",
        "paged_decode_kernel",
        "combine_kernel",
    }
    for call in calls:
        function = call.prepare
        assert isinstance(function, FunctionType)
        assert function is getattr(sys.modules[function.__module__], function.__name__)
        hidden = function.__closure__, function.__defaults__, function.__kwdefaults__
        assert hidden == (None, None, None)
        hash(call)


def test_what_is_kept_has_a_limit(kernel, monkeypatch):
    monkeypatch.setattr(launch, "_LAUNCHERS_MAX", 2)
    for constant in range(5):
        run(kernel, operand(), constant)
        assert len(launch._launchers) <= 2


def test_triton_launches_compiled_kernels_as_expected():
    """`launch._Launcher` gives all arguments by position, and lets Triton choose the stream.

    If this fails, see how `JITFunction.run` ends in the new version and do the same there.
    """
    assert list(inspect.signature(CompiledKernel.__getitem__).parameters) == ["self", "grid"]
    source = inspect.getsource(CompiledKernel.__getitem__)
    assert "def runner(*args, stream=None)" in source
    assert "knobs.runtime.launch_exit_hook, *args)" in source
    last = "knobs.runtime.launch_exit_hook, *bound_args.values())"
    assert last in inspect.getsource(JITFunction.run)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled kernels need a GPU")
def test_launches_after_the_first_are_right(monkeypatch):
    """With other values, another alignment and other strides, in any order."""
    monkeypatch.setattr(launch, "_launchers", {})
    torch.manual_seed(0)
    memory = torch.randn(4, 3 * 128 * 2 * 64 + 8, device="cuda", dtype=torch.float16)
    for row, offset in ((0, 0), (1, 0), (2, 1), (3, 0), (0, 1), (1, 8)):
        flat = memory[row, offset : offset + 3 * 128 * 2 * 64]
        for qkv in (flat.view(3, 1, 128, 2, 64), flat.view(3, 1, 2, 128, 64).transpose(2, 3)):
            q, k, v = qkv
            expected, _ = attention_forward(FlashOperands(q, k, v), SPEC, torch.float32)
            out = flash_attention(q, k, v)
            torch.testing.assert_close(out.float(), expected.float(), rtol=2e-3, atol=2e-3)
    assert len(launch._launchers) == 4

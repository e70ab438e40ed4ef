import inspect
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import FunctionType, SimpleNamespace

import pytest
import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.errors import PTXASError
from triton.runtime.jit import JITFunction

from tests.kernels.test_cubin import DENSE as SPEC_OF_PLANS
from tests.kernels.test_cubin import kernels_of, planned
from torch_attn import append_kv, flash_attention, launch, paged_attention, paged_decode, targets
from torch_attn.calls import CALLS
from torch_attn.dispatch import choose
from torch_attn.flash_ops import DENSE
from torch_attn.launch import tensors_of
from torch_attn.replay import Capture
from tuning.static.operands import decode_operands, flash_operands
from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.paged_spec import DecodeSpec, PagedCache
from twin_attention.contract.reference.attention import attention_forward
from twin_attention.interop.kernels.torch_host import operand_of, plan_of
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.targets.family import FAMILIES, Backend, portable_backend
from twin_attention.targets.target import SHARED_MEMORY_LIMIT, Card, use_target

SPEC = FlashCase("", 1, 128, 128, 2, 2, 64, dtype="float16").spec
SM90 = portable_backend("torch_attn", "sm90")


class Kernel:
    arg_names = ("x_ptr", "SCALE", "ROWS", "BLOCK_KV")

    def __init__(self):
        self.compiled, self.launched = [], []
        self.shared_of_a_stage = 0

    def warmup(self, *values, grid, **options):
        arguments = dict(zip(self.arg_names, values, strict=True)) | options
        self.compiled.append((grid, values[:1], arguments))
        shared = options["num_stages"] * self.shared_of_a_stage
        return SimpleNamespace(kernel=self, metadata=SimpleNamespace(shared=shared))


def fake_launcher(compiled, grid, arguments):
    _x, *rest = arguments
    return lambda stream, operands: compiled.kernel.launched.append((grid, (*operands, *rest)))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr("twin_attention.targets.target._environment", None)
    monkeypatch.setattr(launch, "launcher_of", fake_launcher)
    monkeypatch.setattr(targets, "_properties", lambda device: ((9, 0), 132, 227 * 1024))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=5))
    return Kernel()


def operand(**changes):
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


def run(kernel, x, backend=SM90, spec=SPEC, **options):
    launch.launch("flash_fwd", kernel, prepare, (x,), spec, backend, **options)


def test_a_launch_can_be_repeated(kernel):
    x, y = operand(), operand(pointer=512)
    with Capture() as capture:
        run(kernel, x)
    ((launcher, operands),) = capture.steps
    assert operands == (x,)
    launcher(5, (y.data_ptr(),))
    config = SM90.configs(SPEC)["flash_fwd"]
    ((grid, (compiled_for,), arguments),) = kernel.compiled
    assert (grid, compiled_for.dtype, compiled_for.data_ptr() % 16) == ((3,), torch.float16, 0)
    assert arguments["BLOCK_KV"] == config.block_kv
    constants = SPEC.scale, 3, config.block_kv
    assert kernel.launched == [((3, 1, 1), (pointer, *constants)) for pointer in (256, 512)]


def test_what_prepares_a_launch_is_not_captured(kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(torch.empty(1)))
    with Capture() as capture:
        run(kernel, operand())
        assert len(capture.steps) == 1
        torch.empty(1)
    assert len(capture.steps) > 1


def test_recording_compiles_only(kernel):
    with launch.recording() as compiled:
        run(kernel, operand(), portable_backend("torch_attn", "sm80"))
    assert [name for name, *_ in compiled] == ["flash_fwd"]
    assert not kernel.launched


@pytest.mark.parametrize(
    ("target", "changes", "arch"),
    [
        ("sm90", {}, None),
        ("sm90", {"rows_aligned": False}, "sm80"),
        ("sm90", {"dtype": "float32"}, None),
        ("sm90", {"dtype": "float32", "precision": "tf32"}, "sm80"),
        ("sm80", {}, "sm80"),
    ],
)
def test_tiles_that_go_through_registers_are_not_multiplied_by_wgmma(kernel, target, changes, arch):
    spec = replace(SPEC, **changes)
    run(kernel, operand(), portable_backend("torch_attn", target), spec)
    ((_, _, arguments),) = kernel.compiled
    assert arguments.get("arch") == arch


def test_a_kernel_is_compiled_for_an_address_that_is_not_aligned(kernel):
    run(kernel, operand(pointer=264))
    ((_, (compiled_for,), _),) = kernel.compiled
    assert compiled_for.data_ptr() % 16 != 0


def test_a_crash_of_ptxas_says_what_to_do(kernel, monkeypatch):
    def warmup(*values, **options):
        raise PTXASError("`ptxas` failed with error code -11\nRepro command: ptxas a.ptx")

    monkeypatch.setattr(kernel, "warmup", warmup, raising=False)
    with pytest.raises(RuntimeError, match="flash_fwd: ptxas does not compile") as raised:
        run(kernel, operand())
    assert "(PTXAS error: `ptxas` failed with error code -11)" in str(raised.value)
    assert "TRITON_PTXAS_PATH" in str(raised.value)


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
    x = operand()
    with use_target("sm80"), pytest.raises(NotImplementedError, match=message):
        run(kernel, x, choose(None, "flash_fwd", x.device, SPEC)[0])
    assert not kernel.launched


def test_every_kernel_is_prepared_from_its_call_alone(monkeypatch):
    """By a plain function of a module: nothing of the launch reaches it but the `KernelCall`."""
    prepared = {}

    def spy(name, kernel, prepare, *rest, **options):
        prepared[name] = prepare
        return original(name, kernel, prepare, *rest, **options)

    original = launch.launch
    portable = "flash_fwd", "paged_decode", "paged_attention", "append_kv"
    for name in ("gradients", "preprocess", "merge", *(f"portable.{name}" for name in portable)):
        monkeypatch.setattr(import_module(f"torch_attn.kernels.{name}"), "launch", spy)
    q, k, v = (torch.zeros(1, 16, 2, 16, requires_grad=True) for _ in range(3))
    flash_attention(q, k, v, implementation="triton").sum().backward()
    pages = torch.zeros(2, 16, 2, 16, dtype=torch.float16)
    tables, lengths = torch.tensor([[0, 1]]).int(), torch.tensor([20]).int()
    new = torch.zeros(1, 1, 2, 16, dtype=torch.float16)
    append_kv(new, new, pages, pages.clone(), tables, lengths, implementation="triton")
    paged_decode(new, pages, pages, tables, lengths, num_splits=2, implementation="triton")
    queries, offsets = new[0].repeat(2, 1, 1), torch.tensor([0, 2]).int()
    paged_attention(queries, pages, pages, tables, lengths, offsets, implementation="triton")
    assert set(prepared) == {
        "flash_fwd", "flash_bwd_preprocess", "flash_bwd_dq", "flash_bwd_dkdv", "append_kv",
        "paged_decode", "paged_attention", "combine",
    }  # fmt: skip
    for function in prepared.values():
        assert isinstance(function, FunctionType)
        assert function is getattr(sys.modules[function.__module__], function.__name__)
        hidden = function.__closure__, function.__defaults__, function.__kwdefaults__
        assert hidden == (None, None, None)


@pytest.mark.parametrize(("seq_kv", "deterministic"), [(2048, False), (2047, False), (2048, True)])
@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_a_backward_launches_the_kernels_that_have_configurations(
    target, seq_kv, deterministic, monkeypatch
):
    launched = {}
    for name in ("gradients", "preprocess"):
        module = import_module(f"torch_attn.kernels.{name}")
        monkeypatch.setattr(
            module, "launch", lambda *args, **_: launched.update({args[0]: args[3]})
        )
    (family,) = (x for x in FAMILIES["torch_attn"] if x.folder == target)
    spec = replace(SPEC, seq_q=200, seq_kv=seq_kv, deterministic=deterministic)
    operands = flash_operands(spec, lambda dtype, *shape: torch.empty(shape), sinks=False)
    out, lse = torch.empty_like(operands.q), torch.empty(1, 2, 200)
    backend = Backend(family, target)
    family.function("flash_bwd")(out, None, operands, out, lse, None, spec, backend)
    others = {"flash_fwd", "flash_jvp"}
    if target == "sm90":  # where the kernel of dk and dv prepares rows and makes dq itself
        others |= {"flash_bwd_preprocess", "flash_bwd_postprocess"}
    assert [*launched] == [name for name in backend.configs(spec) if name not in others]
    if (target, "flash_bwd_dq" in launched) == ("sm90", True):
        # It reads what a preprocess would, and writes the rows that the kernel of dk and dv reads.
        *_, read, (given, dlse, lse2, delta, *_rest), _dq, _counter, _terms, _mask = launched[
            "flash_bwd_dq"
        ]
        assert (read is out, given is lse, dlse) == (True, True, None)
        assert lse2.shape == delta.shape == (1, 2, 256)
        rows = launched["flash_bwd_dkdv"][4:6]
        assert all(x is y for x, y in zip(rows, (lse2, delta), strict=True))


def test_triton_launches_compiled_kernels_as_expected():
    """`torch_attn.driver` calls a kernel's launcher as Triton does, with addresses for tensors.

    If this fails, see how `JITFunction.run` ends in the new version and do the same there.
    """
    assert list(inspect.signature(CompiledKernel.__getitem__).parameters) == ["self", "grid"]
    source = inspect.getsource(CompiledKernel.__getitem__)
    assert "def runner(*args, stream=None)" in source
    words = " ".join(source.split())
    order = "stream, self.function, self.packed_metadata, launch_metadata, knobs.runtime."
    assert f"self.run(grid[0], grid[1], grid[2], {order}" in words
    assert "knobs.runtime.launch_exit_hook, *args)" in source
    last = "knobs.runtime.launch_exit_hook, *bound_args.values())"
    assert last in inspect.getsource(JITFunction.run)
    assert knobs.runtime.launch_enter_hook.calls == knobs.runtime.launch_exit_hook.calls == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled kernels need a GPU")
def test_launches_after_the_first_are_right():
    """With other values, another alignment and other strides."""
    CALLS.clear()
    torch.manual_seed(0)
    memory = torch.randn(4, 3 * 128 * 2 * 64 + 8, device="cuda", dtype=torch.float16)
    for row, offset in ((0, 0), (1, 0), (2, 1), (3, 0), (0, 1), (1, 8)):
        flat = memory[row, offset : offset + 3 * 128 * 2 * 64]
        for qkv in (flat.view(3, 1, 128, 2, 64), flat.view(3, 1, 2, 128, 64).transpose(2, 3)):
            expected, _ = attention_forward(FlashOperands(*qkv), SPEC, torch.float32)
            out = flash_attention(*qkv)
            torch.testing.assert_close(out.float(), expected.float(), rtol=2e-3, atol=2e-3)
    assert len([function for (function, *_), *_ in CALLS.by_key if function is DENSE]) == 4


@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_a_kernel_with_other_tiles_than_its_lists_is_refused(target):
    """`compile_to_fit` may take another row of a table than the lists were made for."""
    spec, checked = replace(SPEC_OF_PLANS, segmented=True, deterministic=True), 0
    for operation in ("flash_fwd", "flash_bwd"):
        _, found = planned(("gluon", target), target, spec, operation)
        for step in kernels_of(found):
            if step.code.name not in ("flash_fwd", "flash_bwd_dq", "flash_bwd_dkdv"):
                continue
            config = step.code.config
            step.code.prepared(config)
            for field in ("block_q", "block_kv"):
                other = replace(config, **{field: 2 * getattr(config, field)})
                with pytest.raises(AssertionError):
                    step.code.prepared(other)
                checked += 1
    assert checked == 6


@pytest.mark.parametrize("cascade", [False, True])
def test_a_decode_with_other_tiles_than_its_merge_is_refused(cascade):
    cache = PagedCache(
        dtype="bfloat16",
        num_pages=64,
        page_size=16,
        max_pages=64,
        heads=2,
        head_dim=64,
        head_dim_v=64,
    )
    spec = DecodeSpec(8, 1, 8, cache, "bfloat16", 0.1, num_splits=4, cascade=cascade)
    operands = decode_operands(spec, lambda dtype, *shape: operand_of(shape, dtype))
    backend, tensors = portable_backend("torch_attn", "sm90"), tuple(tensors_of((operands,)))
    function = partial(backend.family.function("paged_decode"), operands, spec, backend)
    steps = kernels_of(plan_of(function, tensors, Card(90, 132, SHARED_MEMORY_LIMIT["sm90"])))
    decodes = [x.code for x in steps if x.code.name == "paged_decode"]
    assert len(decodes) == 1 + cascade
    for x in decodes:
        x.prepared(x.config)
        with pytest.raises(AssertionError, match="counts other tiles"):
            x.prepared(replace(x.config, block_kv=2 * x.config.block_kv))

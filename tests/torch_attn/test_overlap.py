"""First calls do at once what they wait for, and survive what goes wrong meanwhile."""

from concurrent.futures import wait
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from threading import Event, get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import fresh
from torch_attn import calls, flash_ops, overlap
from torch_attn.flash_ops import DENSE
from torch_attn.targets import described, shared_memory
from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import FAMILIES, Backend
from twin_attention.targets.target import Card

CARD = Card(90, 132, 232448)
SECONDS = 20  # until a test gives up


class Kernel:
    def __init__(self, kinds=("*fp16", ("constexpr", "i32"), "tensordesc<fp16[64]>")):
        self.device_caches, self.kinds, self.threads = {0: None}, kinds, []
        self.compile = self.compiled = lambda source, **options: source.make_ir("ir")

    def warmup(self, *arguments, grid, **options):
        self.threads.append(get_ident())
        source = SimpleNamespace(
            signature=dict(enumerate(self.kinds)), make_ir=lambda text: (text, arguments)
        )
        return self.compile(source, options=options)


@pytest.fixture
def built(monkeypatch):
    """Return what the C compiler is asked to build, as by Triton 3.6."""
    asked = []
    driver = SimpleNamespace(
        make_launcher=lambda constants, signature, descriptors: (signature, descriptors),
        compile_module_from_src=lambda src, **options: asked.append(src),
        library_dirs=list, include_dirs=[], libraries=[],
    )  # fmt: skip
    monkeypatch.setattr(overlap, "_driver", lambda: driver)
    monkeypatch.setattr(overlap, "start_driver", tuple)
    monkeypatch.setattr(overlap, "card_of", lambda device: CARD)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    asked.append(driver)
    return asked


def test_a_launcher_is_built_while_its_kernel_is_compiled(built):
    driver, kernel, ready = built.pop(), Kernel(), Event()
    driver.compile_module_from_src = lambda src, **options: built.append(src) or ready.set()
    kernel.compile = lambda source, **options: ready.wait(SECONDS)
    for _ in range(2):
        overlap.build_launcher_beside(kernel)
    assert kernel.warmup(grid=(1,))
    assert built == [({0: "*fp16", 1: "i32", 2: "tensordesc<fp16[64]>"}, [{}])]


def test_what_fails_beside_a_kernel_is_left_to_triton(built):
    kernel = Kernel()
    built.pop().make_launcher = None
    overlap.build_launcher_beside(kernel)
    with overlap.compiled_behind(lambda: [1 / 0], torch.device("meta")):
        assert kernel.warmup(8, grid=(1,)) == ("ir", (8,))


def test_without_the_names_triton_goes_its_own_way(built):
    kernel = Kernel()
    overlap.build_launcher_beside(SimpleNamespace())
    del built.pop().make_launcher
    overlap.build_launcher_beside(kernel)
    assert kernel.compile is kernel.compiled


def test_a_call_starts_triton_before_its_kernels_are_imported(monkeypatch):
    begun: list[str] = []

    class Driver:
        @property
        def active(self):
            begun.append("built")
            return 1 / 0  # left to Triton

    def choose(*arguments):
        begun.append("chosen")
        raise NotImplementedError

    monkeypatch.setattr(overlap, "start_driver", cache(overlap.start_driver.__wrapped__))
    monkeypatch.setattr(overlap.triton_cache, "triton_key", lambda: begun.append("hashed"))
    monkeypatch.setattr(overlap.triton.runtime, "driver", Driver())
    monkeypatch.setattr(calls, "choose", choose)
    spec: Any = SimpleNamespace(is_empty=False)
    for device, implementation in (("cpu", None), ("cuda", "reference"), *[("cuda", None)] * 2):
        with pytest.raises(NotImplementedError):
            calls.Call("flash_fwd", print, spec, torch.device(device), (implementation,))
    assert overlap.start_driver.cache_info().misses == 1
    wait(overlap.start_driver())
    assert begun[:2] == ["chosen"] * 2
    assert sorted(begun[2:]) == ["built", "chosen", "chosen", "hashed"]


def launch_of(kernel, compiled):

    def compile_on(device):
        overlap.build_launcher_beside(kernel)
        limit = shared_memory("sm90", torch.device("meta"))  # of the described card
        compiled.append((device, limit, kernel.warmup(3, grid=(1,))))

    return SimpleNamespace(kernel=kernel, compile_on=compile_on)


def test_kernels_are_compiled_behind_another_once_that_is_traced(built):
    built.pop()
    first, others, compiled = Kernel(), [Kernel()] * 2, []
    asked = []

    def launches():
        asked.append(True)
        return [launch_of(kernel, compiled) for kernel in others]

    with overlap.compiled_behind(launches, torch.device("meta")):
        assert not asked
        for _ in range(2):
            overlap.build_launcher_beside(first)
            first.warmup(grid=(1,))
    for kernel in others:
        overlap.wait_for(kernel)
        assert get_ident() not in kernel.threads
    assert asked == [True]
    assert compiled == [(torch.device("meta"), CARD.shared_memory, ("ir", (3,)))] * 2


def test_nothing_is_compiled_behind_what_needs_no_tracing(built):
    with overlap.compiled_behind(lambda: pytest.fail("nothing was traced"), torch.device("meta")):
        overlap.wait_for(Kernel())
    overlap.build_launcher_beside(kernel := Kernel())
    kernel.warmup(grid=(1,))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_launches_of_a_backward_are_those_that_it_makes(monkeypatch, deterministic):
    spec = AttentionSpec(
        1, 2048, 2048, 2, 2, 64, 64, "bfloat16", 0.1, deterministic=deterministic, row_max=True
    )
    (family,) = (x for x in FAMILIES["torch_attn"] if (x.name, x.folder) == ("gluon", "sm90"))
    backend = Backend(family, "sm90")
    monkeypatch.setattr(flash_ops, "choose", lambda *arguments: (backend, ()))
    q, k, v = torch.empty(3, 1, 2048, 2, 64, dtype=torch.bfloat16)
    operands = FlashOperands(q, k, v, *[None] * (len(FlashOperands._fields) - 3))
    call: Any = SimpleNamespace(spec=spec, others=(None,))
    with described(CARD):
        found = DENSE._launches_of_backward(call, operands)
    names = ["flash_bwd_dq", "flash_bwd_dkdv"] if deterministic else ["flash_bwd_fused"]
    assert [x.name for x in found] == names
    assert {x.spec for x in found} == {replace(spec, row_max=False)}
    assert {x.device.type for x in found} == {"meta"}


def test_a_first_call_does_not_import_dynamo():
    program = (
        "import sys, torch, torch_attn\n"
        "from torch_attn.replay import Capture\n"
        "with Capture() as found:\n"
        "    torch.empty(2).new_empty(3)\n"
        "assert found.steps\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    fresh.run(exec, program, {})

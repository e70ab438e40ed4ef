"""A missing private name of JAX or Triton costs speed, not the import, and is named."""

import ast
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import jax
import pytest

import pallas_attn
from pallas_attn import dispatch, explain, flash_attention, private
from pallas_attn.dispatch import Backends, choose_backends
from twin_attention.contract.paged_spec import DecodeSpec, PagedCache
from twin_attention.contract.spec import AttentionSpec
from twin_attention.interop import kernels
from twin_attention.targets import versions
from twin_attention.targets.family import FAMILIES, FOREIGN, Backend

NAMES = [
    (group, place, name)
    for group, modules in private.GROUPS.items()
    for place, names in modules.values()
    for name in names.split()
]
SPEC = AttentionSpec(1, 64, 64, 2, 2, 64, 64, "bfloat16", 0.125)
DECODE = DecodeSpec(1, 1, 2, PagedCache(3, 16, 4, 2, 64, 64, "bfloat16"), "bfloat16", 0.125)
MOSAIC, MOSAIC_SM90, PAGED, TRITON, REFERENCE = FAMILIES["pallas_attn"]
GLUON, GLUON_SM90, TORCH_TRITON = FOREIGN["pallas_attn"]
PROBLEMS = {
    "triton": [(TRITON, "flash_fwd", SPEC, "sm80"), (TRITON, "paged_decode", DECODE, "sm90")],
    "foreign": [
        (GLUON, "flash_fwd", SPEC, "sm80"),
        (GLUON_SM90, "flash_bwd", SPEC, "sm90"),
        (TORCH_TRITON, "flash_fwd", SPEC, "sm90"),
    ],
    "mosaic": [
        (MOSAIC, "flash_fwd", SPEC, "sm80"),
        (MOSAIC_SM90, "flash_bwd", SPEC, "sm90"),
        (PAGED, "paged_decode", DECODE, "sm80"),
    ],
}


@pytest.fixture
def without(monkeypatch):
    """Take a name from this project only: JAX itself needs it."""

    def take_away(place, name=None):
        def found(asked):
            if asked != place:
                return import_module(asked)
            if name is None:
                raise ModuleNotFoundError(asked)
            others = {x.partition(".")[0] for _, at, x in NAMES if at == place}
            others -= {name.partition(".")[0]}
            return SimpleNamespace(**{x: getattr(import_module(asked), x, None) for x in others})

        monkeypatch.setattr(private, "import_module", found)
        private.missing.cache_clear()

    yield take_away
    monkeypatch.undo()
    private.missing.cache_clear()


@pytest.mark.parametrize(("group", "place", "name"), NAMES, ids=lambda x: x)
def test_a_family_that_lacks_a_name_says_so(group, place, name, without, monkeypatch):
    monkeypatch.setattr(versions, "older_jax", lambda *_: None)
    for gone in (name, None):
        without(place, gone)
        for found, *problem in PROBLEMS[group]:
            reason = found.supports(*problem) or ""
            assert reason.startswith("private names that it needs are missing: ")
            assert f"{place}.{name}" in reason


def test_without_the_compiler_the_reference_or_the_interpreter_runs(without, monkeypatch):
    # Nor PyTorch, whose kernels would run.
    monkeypatch.setattr("twin_attention.interop.kernels.in_jax.find_spec", lambda name: None)
    spec = replace(SPEC, dtype="float32")
    reference, interpreted = Backend(REFERENCE), Backend(TRITON, interpreted=True)
    for name in ("triton._C.libtriton", "jax._src.pallas.triton.lowering"):
        without(name)
        assert choose_backends(None, "flash_fwd", None, spec) == Backends(reference, reference)
        _, passed_over = dispatch.choose(None, "flash_fwd", "sm90", spec)  # as `explain` shows it
        reason = f"triton: private names that it needs are missing: {name}."
        assert any(line.startswith(reason) for line in passed_over)
        if jax.default_backend() == "cpu":
            found = choose_backends("triton", "flash_fwd", None, spec)
            assert found == Backends(interpreted, interpreted)
    gpu = object()
    monkeypatch.setattr(dispatch, "cuda_devices", lambda: (gpu,))
    monkeypatch.setattr(dispatch, "target_of", lambda device: "sm80")
    found = choose_backends("triton", "flash_fwd", jax.devices("cpu")[0], spec)
    assert found == Backends(interpreted, interpreted)
    for device in (gpu, None):
        assert choose_backends(None, "flash_fwd", device, spec).cuda == reference
        with pytest.raises(NotImplementedError, match=r"are missing: jax\._src\.pallas\.triton"):
            choose_backends("triton", "flash_fwd", device, spec)


def test_a_triton_that_is_not_installed_is_no_missing_name(monkeypatch):
    """`explain` and the lowering of a kernel say how to install it."""
    monkeypatch.setitem(sys.modules, "triton", None)
    private.missing.cache_clear()
    assert private.missing("triton") is None
    private.missing.cache_clear()
    on = jax.devices("cpu")[0]
    module = sys.modules["pallas_attn.dispatch"]
    monkeypatch.setattr(module, "cuda_devices", lambda: (on,))
    monkeypatch.setattr(module, "target_of", lambda device: "sm80")
    q = jax.device_put(jax.numpy.zeros((1, 64, 1, 16)), on)
    said = explain(flash_attention, q, q, q, implementation="triton")
    assert said.reason.endswith("is not installed: pip install 'twin-attention[triton]'")


# Names are imported and traced one by one; what XLA compiles is the same each time.
PROGRAM = """
import importlib, json, sys
import jax, numpy as np
jax.config.update("jax_compilation_cache_dir", sys.argv[2])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
real = importlib.import_module
q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 16))
scores = np.einsum("bqhd,bkhd->bhqk", q, k) / 4
p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
want = np.einsum("bhqk,bkhd->bqhd", p, v)
for group, place, name in json.loads(sys.argv[1]):
    class Without:
        def __getattr__(self, asked):
            if asked == name.partition(".")[0]:
                raise AttributeError(asked)
            return getattr(real(place), asked)
    for module in [x for x in sys.modules if x.startswith(("pallas_attn", "twin_attention"))]:
        del sys.modules[module]
    importlib.import_module = lambda x, *a: Without() if x == place else real(x, *a)
    import pallas_attn
    from pallas_attn import private
    for implementation in (None, "triton"):
        out = pallas_attn.flash_attention(q, k, v, implementation=implementation)
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    assert place == "jaxlib.gpu_triton" or f"{place}.{name}" in private.missing(group)
    importlib.import_module = real
"""


def test_without_a_private_name_calls_on_a_cpu_are_right(tmp_path):
    """Each name of those to compile with, but for its time only one of Mosaic GPU's modules."""
    names = {x[1:]: x for x in NAMES if x[0] != "mosaic"}
    places = {place for place, _ in names}
    names |= {x[1]: x for x in NAMES if x[0] == "mosaic" and x[1] not in places}
    command = [sys.executable, "-c", PROGRAM, json.dumps([*names.values()]), str(tmp_path)]
    subprocess.run(command, check=True, timeout=600, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def test_nothing_is_missing_in_tested_versions():
    assert private.missing("triton") is None
    if versions.older_jax() is None:
        assert private.missing("mosaic") is None


def test_newer_versions_are_named(monkeypatch):
    q = jax.random.normal(jax.random.key(0), (1, 8, 2, 16))
    assert "newest that was tested" not in explain(flash_attention, q, q, q).reason
    monkeypatch.setattr(private, "TESTED", {"jax": (0, 1)})
    note = "is newer than 0.1, the newest that was tested"
    assert explain(flash_attention, q, q, q).reason.endswith(note)


# ---- The table has what the files use. ----


def test_every_attribute_that_the_files_use_is_in_the_table():
    used, attributes = defaultdict(set), set()
    others = {
        "triton_call.py": ["foreign"], "own_memory.py": ["triton", "foreign", "mosaic"],
    }  # fmt: skip
    own, crossing = (Path(x.__file__).parent.rglob("*.py") for x in (pallas_attn, kernels))
    for file in (*own, *crossing):
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        modules = {
            alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module == private.__name__
            for alias in node.names
        }
        groups = (
            ["mosaic"]
            if {"pallas_attn", "kernels"} <= {*file.parts}
            else others.get(file.name, ["triton"])
        )
        inner = {x.value for x in nodes if isinstance(x, ast.Attribute)}
        attributes |= {x.attr for x in nodes if isinstance(x, ast.Attribute)}
        renamed = {x.value for x in nodes if isinstance(x, ast.Assign)}
        for node in nodes if modules else ():
            if isinstance(node, ast.Attribute | ast.Name) and node not in inner:
                name, _, attribute = ast.unparse(node).partition(".")
                if name in modules and re.fullmatch(r"[\w.]+", attribute):
                    for group in groups:
                        used[group, name].add(attribute)
                assert attribute or name not in modules or node not in renamed
    for group, modules in private.GROUPS.items():
        for module, (_, names) in modules.items():
            listed, of_module = {*names.split()}, used.pop((group, module))
            assert of_module <= listed
            # The others are of values, such as a class's methods.
            assert {x.rpartition(".")[2] for x in listed - of_module} <= attributes
    assert not used


def test_no_other_file_imports_a_private_module():
    for file in Path(pallas_attn.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                private_places = ("jax._", "jaxlib", "jax.experimental.mosaic", "triton.")
                assert not name.startswith(private_places), f"{file}: {name}"


def test_triton_hashes_its_files_in_a_thread(monkeypatch):
    found: Any = SimpleNamespace()
    monkeypatch.setattr(private, "_module", lambda path: found)
    private.hash_triton.__wrapped__()  # a Triton without that name
    started, hashing = Event(), Event()
    found.triton_key = lambda: hashing.wait(20) and started.set()
    private.hash_triton.__wrapped__()
    assert not started.is_set()
    hashing.set()
    assert started.wait(20)

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"twin_attention", "torch_attn", "pallas_attn"}

# The other framework cannot be imported, and the user has a folder called interop.
PRELUDE = """
import sys
from importlib.abc import MetaPathFinder

class NotInstalled(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {blocked!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NotInstalled())
import interop
assert interop.MINE
from twin_attention.interop import kernels
"""
TORCH = """
import torch
import torch_attn as attn

q, k, v = (torch.randn(1, 20, 2, 16, requires_grad=True) for _ in "qkv")
attn.flash_attention(q, k, v, causal=True, implementation="triton").sum().backward()
assert q.grad.isfinite().all()
pages, new = torch.zeros(2, 4, 8, 2, 16, dtype=torch.float16), torch.randn(1, 2, 16).half()
tables, lens = torch.tensor([[2, 1]], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
attn.append_kv(new, new, *pages, tables, lens)
out = attn.paged_decode(new, *pages, tables, lens, implementation="triton")
assert out.isfinite().all() and out.any()
from twin_attention.testing import check_attention
assert check_attention(attn.flash_attention, ["flash_attention", "float32"], suite=None, seconds=1)
print(attn.__version__, attn.__file__)
"""
JAX = """
import jax
import jax.numpy as jnp
import pallas_attn as attn

q = k = v = jax.random.normal(jax.random.key(0), (1, 20, 2, 16))
loss = lambda q: attn.flash_attention(q, k, v, causal=True, implementation="triton").sum()
assert jnp.isfinite(jax.grad(loss)(q)).all()
pages, new = jnp.zeros((4, 8, 2, 16), jnp.float16), jnp.ones((1, 2, 16), jnp.float16)
tables, lens = jnp.array([[2, 1]], jnp.int32), jnp.array([9], jnp.int32)
k_pages, v_pages = attn.append_kv(new, new, pages, pages, tables, lens)
out = attn.paged_decode(new, k_pages, v_pages, tables, lens, implementation="triton")
assert jnp.isfinite(out).all() and out.any()
print(attn.__version__, attn.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_it_holds_the_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    tables = {str(path.relative_to(ROOT)) for path in ROOT.glob("*_attn/configs/*/*.toml")}
    assert tables <= set(names)
    assert "torch_attn/configs/sm80/sm80.toml" in tables
    kinds = {Path(name).suffix for name in names if ".dist-info/" not in name}
    assert kinds == {".py", ".toml", ".typed", ".css", ".js"}  # no records, no plots


def test_citation_and_changelog_have_the_version(wheel):
    version = wheel.name.split("-")[1]
    heading = rf"^## \[{re.escape(version)}\] - (\S+)$"
    (released,) = re.findall(heading, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {version}\n" in citation
    dates = re.findall(r"^date-released: (\S+)$", citation, re.MULTILINE)
    assert dates == [released] * (released != "unreleased")


def test_the_metadata_is_for_users(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (x for x in archive.namelist() if x.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
        plugins = archive.read(name.replace("METADATA", "entry_points.txt"))
    assert plugins.split() == b"[pytest11] twin_attention = twin_attention.pytest_plugin".split()
    extras = {"cuda12", "cuda13", "jax", "parity", "torch", "triton"}
    assert set(metadata.get_all("Provides-Extra")) == extras
    links = re.findall(r'\]\(([^)]*)|(?:src|srcset)="([^"]*)', metadata.get_payload())
    assert len(links) > 10
    assert not [x for x in links if not "".join(x).startswith(("https://", "#"))]


def test_the_source_distribution_makes_the_same_wheel(wheel, tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path / "dist")]
    subprocess.run([*build, "-t", "sdist"], cwd=ROOT, check=True, capture_output=True)
    (path,) = (tmp_path / "dist").glob("*.tar.gz")
    shutil.unpack_archive(path, tmp_path, filter="data")
    source = tmp_path / path.name.removesuffix(".tar.gz")
    subprocess.run([*build, "-t", "wheel"], cwd=source, check=True, capture_output=True)
    (again,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(again) as theirs:
        assert sorted(ours.namelist()) == sorted(theirs.namelist())


@pytest.mark.parametrize(
    ("script", "blocked"), [(TORCH, "jax"), (JAX, "torch")], ids=["torch", "jax"]
)
def test_one_side_works_beside_a_folder_named_interop(wheel, tmp_path, script, blocked):
    site, project = tmp_path / "site", tmp_path / "project"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (project / "interop").mkdir(parents=True)
    (project / "interop" / "__init__.py").write_text("MINE = True\n")
    program = project / "program.py"
    program.write_text(PRELUDE.format(blocked=blocked) + script)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "program.py"]
    run = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    version, file = run.stdout.split()
    assert wheel.name.split("-")[1] == version
    assert Path(file).is_relative_to(site)

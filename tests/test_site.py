import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import ask, serving

ROOT = Path(__file__).parents[1]
PAGES = ("docs/index.html", "docs/guide/serve.html", "docs/semantics.html", "docs/benchmarks.html",
         "docs/api/torch_attn.html", "docs/api/generated/torch_attn.flash_attention.html",
         "bench/results/h200-flash.html")  # fmt: skip
# Records are many and alike, and take half of the time: one page of them is built.
UNREAD = "bench/results/h1*,bench/results/h200-[!f]*,bench/results/h200-f[!l]*"
# Besides the public names of the packages.
ALSO = ("torch_attn.modules.MultiHeadDilatedAttention", "torch_attn.flops",
        "torch_attn.adapters.flash_attn.flash_attn_func",
        "torch_attn.adapters.transformers.register",
        "pallas_attn.adapters.jax_nn.dot_product_attention",
        "twin_attention.contract.explain.Explanation")  # fmt: skip
LOOK = """(page, root, window) => [root.scrollWidth, Number(
  window.getComputedStyle(page.body).backgroundColor.match(/\\d+/g)[0])]"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="the documentation's tools are not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    command += [f"-Dexclude_patterns=.*,docs/history/**,docs/style/**,{UNREAD}"]
    command += ["-Dsuppress_warnings=myst.xref_missing"]  # tests/test_docs.py follows links
    done = subprocess.run(
        [*command, "-b", "html", "-c", "docs", ".", str(folder)],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("package", ["torch_attn", "pallas_attn"])
def test_the_api_has_every_public_name(site: Path, package: str):
    source = (ROOT / package / "__init__.py").read_text()
    names = re.findall(r'^    "(\w+)",$', source, re.MULTILINE)
    text = (site / f"docs/api/{package}.html").read_text()
    assert len(names) > 10
    missing = [name for name in names if f'<span class="pre">{name}</span>' not in text]
    missing += [name for name in ALSO if not (site / f"docs/api/generated/{name}.html").exists()]
    assert not missing
    page = (site / f"docs/api/generated/{package}.flash_attention.html").read_text()
    assert page.count('class="sig-name descname"') == 1  # no overloads


def test_every_page_for_users_is_in_the_site(site: Path):
    pages = [ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")]
    pages = [x for x in pages if x.parent.name != "history"]  # for maintainers
    missing = [x for x in pages if not (site / x.relative_to(ROOT).with_suffix(".html")).exists()]
    assert not missing
    assert not (site / "docs/history").exists()


def test_pages_have_what_only_a_site_shows(site: Path):
    """Tabs of both frameworks, pictures that HTML names, and a way from a wrong page."""
    assert (site / "docs/guide/pack.html").read_text().count("sd-tab-label") == 2
    assert (site / "docs/images/speed-dark.svg").exists()
    assert "docs/index.html" in (site / "index.html").read_text()
    assert "https://" in (site / "404.html").read_text()


def test_the_search_finds_a_function(site: Path):
    assert "paged_decode" in (site / "searchindex.js").read_text()


@pytest.fixture(scope="module")
def address(site: Path):
    with serving(site) as found:
        yield found


@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desktop"])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_no_wider_than_the_screen(site: Path, address: str, page: str, width: int):
    shown, _ = ask(site, address, page, LOOK, width, dark=False)
    assert shown <= width


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_follows_the_colour_scheme(site: Path, address: str, dark: bool):
    _, red = ask(site, address, "docs/index.html", LOOK, 1280, dark)
    assert (red < 128) == dark

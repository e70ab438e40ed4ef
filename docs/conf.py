"""The documentation site: the repository's own pages, with an API made from the docstrings.

``make docs`` runs Sphinx with the repository's root as the source folder, so that every page and
every relative link is the one that a reader of the repository has. `prepare` adds to them what only
a site shows; `docs/index.md` has its chapters.
"""

from __future__ import annotations

import gc
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
gc.disable()  # it would walk through the nodes of all pages again and again

from twin_attention import __version__ as release  # noqa: E402

URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]

project = "twin-attention"
copyright = "the twin-attention authors"
extensions = [
    "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon",
    "sphinx.ext.viewcode", "sphinx_copybutton", "sphinx_design",
]  # fmt: skip
root_doc = "docs/index"
include_patterns = [
    "CHANGELOG.md", "CONTRIBUTING.md", "docs/**", "examples/README.md", "bench/results/*.md",
]  # fmt: skip
exclude_patterns = [".*", "docs/history/**", "docs/style/**"]  # the second is for maintainers
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

html_theme = "furo"
html_title = f"twin-attention {release}"
html_baseurl = URLS["Documentation"]
html_favicon = "images/favicon.svg"
html_copy_source = False
html_theme_options = {"source_repository": URLS["Source"], "source_branch": "main"}
html_static_path = ["style"]
templates_path = [str(ROOT / "docs" / "style")]
html_css_files = ["site.css"]
pygments_dark_style = "github-dark"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_use_ivar = True
default_role = "literal"

# An example in PyTorch, and behind it the same in JAX.
_CODE = r"```python\nimport {}\n.*?^```\n"
_PAIR = re.compile(rf"^({_CODE.format('torch')})\n({_CODE.format('jax')})", re.M | re.S)
_TABS = """:::::{tab-set}
:sync-group: framework

::::{tab-item} PyTorch
:sync: torch

\\1
::::
::::{tab-item} JAX
:sync: jax

\\2
::::
:::::
"""


def prepare(app: Any, name: str, source: list[str]) -> None:
    """Add what the repository's readers do not need: tabs, and the list of results."""
    source[0] = _PAIR.sub(_TABS, source[0])
    if name == "bench/results/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n[!R]*\n```\n"


def add_files(app: Any, error: Exception | None) -> None:
    """Add the pictures that pages show by HTML, a first page, and one for wrong addresses."""
    if error is None and app.builder.name == "html":
        folder = Path(app.outdir)
        shutil.copytree(ROOT / "docs" / "images", folder / "docs" / "images", dirs_exist_ok=True)
        home = '<meta http-equiv="refresh" content="0; url=docs/index.html">'
        (folder / "index.html").write_text(f"<!doctype html><title>{project}</title>{home}\n")
        link = f'<a href="{html_baseurl}">the documentation of {project}</a>'
        missing = f"<p>There is no such page. Begin with {link}."
        (folder / "404.html").write_text(f"<!doctype html><title>Not found</title>{missing}\n")


def skip(app: Any, what: str, name: str, member: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out fields of named tuples, which the class describes."""
    return True if str(member.__doc__).startswith("Alias for field") else None


def setup(app: Any) -> None:
    shutil.rmtree(ROOT / "docs/api/generated", ignore_errors=True)  # pages of names that are gone
    # Show a function's own signature, not its overloads.
    ModuleAnalyzer.overloads = property(lambda self: {}, lambda self, found: None)  # type: ignore
    app.connect("source-read", prepare)
    app.connect("autodoc-skip-member", skip)
    app.connect("build-finished", add_files)

"""The documentation site: the repository's own pages, with an API made from the docstrings.

``make docs`` runs Sphinx with the repository's root as the source folder, so that every page and
every relative link is the one that a reader of the repository has.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from twin_attention import __version__ as release  # noqa: E402

project = "twin-attention"
copyright = "the twin-attention authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "README"
include_patterns = [
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**", "bench/results/*.md",
]  # fmt: skip
exclude_patterns = ["docs/history/**"]  # for maintainers, in the repository
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

html_theme = "furo"
html_title = f"twin-attention {release}"
html_copy_source = False
html_theme_options = {"footer_icons": []}

myst_heading_anchors = 4
autodoc_typehints = "none"  # the docstrings describe shapes and dtypes
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_use_ivar = True
default_role = "literal"

# Chapters of the site, in order: pages of the repository.
CHAPTERS = {
    "Guide": (
        "docs/guide/train", "docs/guide/pack", "docs/guide/tree", "docs/guide/serve",
        "docs/exchange", "docs/context-parallel", "docs/patterns", "docs/coming-from",
        "docs/hugging-face", "docs/models",
    ),
    "Reference": (
        "docs/semantics", "docs/api/torch_attn", "docs/api/pallas_attn", "docs/api/exchange",
        "docs/numerics", "docs/targets", "docs/non-goals", "docs/glossary",
    ),
    "Speed": ("docs/benchmarks", "docs/performance", "bench/results/README"),
    "Inside": ("docs/architecture", "docs/reading-the-twins"),
    "Project": ("CONTRIBUTING", "CHANGELOG"),
}  # fmt: skip
# Pages that a chapter's page lists.
BELOW = {"bench/results/README": "/bench/results/[!R]*"}


def add_navigation(app: Any, name: str, source: list[str]) -> None:
    """Add the lists of pages that the repository's readers do not need."""
    if name == root_doc:
        for title, pages in CHAPTERS.items():
            source[0] += _toctree(f":caption: {title}", *pages)
    elif name in BELOW:
        source[0] += _toctree(":glob:", BELOW[name])


def _toctree(*lines: str) -> str:
    first, *pages = lines
    return "\n".join(("\n\n```{toctree}", ":hidden:", first, "", *pages, "```\n"))


def add_index(app: Any, error: Exception | None) -> None:
    """Let the site begin with the README."""
    if error is None and app.builder.name == "html":
        shutil.copy(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Any) -> None:
    app.connect("source-read", add_navigation)
    app.connect("build-finished", add_index)

"""The Python examples of the documentation run, in the order in which a page shows them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {
    page.relative_to(ROOT).as_posix(): page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
}
# Blocks of ">>>" are sessions: a doctest of the page's own runs them.
EXAMPLE = re.compile(r"^```python\n(?!>>> )(.*?)^```$", re.DOTALL | re.MULTILINE)


def examples(page: Path) -> list[str]:
    """Each Python block of a page, moved down so that an error shows the page's line number."""
    text = page.read_text()
    return [
        "\n" * text.count("\n", 0, block.start(1)) + block[1] for block in EXAMPLE.finditer(text)
    ]


WITH_EXAMPLES = [name for name, page in PAGES.items() if examples(page)]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name: str):
    if name == "docs/coming-from.md":
        pytest.importorskip("transformers")
    if name in ("docs/models.md", "docs/patterns.md"):
        pytest.importorskip("flax")
    names: dict[str, object] = {}
    for example in examples(PAGES[name]):
        exec(compile(example, PAGES[name], "exec"), names)


@pytest.mark.parametrize("number", range(len(examples(ROOT / "README.md"))))
def test_an_example_of_the_readme_runs_alone(number: int):
    exec(compile(examples(ROOT / "README.md")[number], "README.md", "exec"), {})


def test_the_main_pages_have_examples():
    assert {"README.md", "docs/semantics.md", "docs/numerics.md"} <= set(WITH_EXAMPLES)


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files(name: str):
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", PAGES[name].read_text())
    missing = [link for link in links if not (PAGES[name].parent / link).exists()]
    assert not missing


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_headings(name: str):
    page = PAGES[name]
    links = re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text())
    pages = [(page.parent / link if link else page, anchor) for link, anchor in links]
    assert not [x for x in pages if x[0].suffix == ".md" and x[1] not in anchors(x[0])]

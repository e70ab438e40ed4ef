import inspect
import re
from pathlib import Path

import pytest

import pallas_attn
import torch_attn

ROOT = Path(__file__).parents[1]
PAGES = {
    page.relative_to(ROOT).as_posix(): page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
}
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def examples(page: Path) -> list[str]:
    """Return Python blocks, moved down so that an error shows the page's line number."""
    text = page.read_text()
    return [
        "\n" * text.count("\n", 0, block.start(1)) + block[1] for block in EXAMPLE.finditer(text)
    ]


EXAMPLES = {
    f"{name}-{number}": (name, example)
    for name, page in PAGES.items()
    for number, example in enumerate(examples(page))
}


@pytest.mark.parametrize("key", EXAMPLES)
def test_an_example_runs_alone(key: str):
    name, example = EXAMPLES[key]
    for library in ("transformers", "flax", "equinox"):
        if library in example:
            pytest.importorskip(library)
    exec(compile(example, PAGES[name], "exec"), {})


def test_the_main_pages_have_examples():
    with_examples = {name for name, _ in EXAMPLES.values()}
    assert {"README.md", "docs/semantics.md", "docs/numerics.md"} <= with_examples


@pytest.mark.parametrize("side", [torch_attn, pallas_attn])
def test_the_contract_has_the_signature(side):
    (written,) = re.findall(
        r"^`flash_attention(\(.*?\))`", PAGES["docs/semantics.md"].read_text(), re.M | re.S
    )
    signature = inspect.signature(side.flash_attention)
    parameters = [x.replace(annotation=x.empty) for x in signature.parameters.values()]
    plain = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    assert " ".join(written.split()).replace('"', "'") == plain


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files(name: str):
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", PAGES[name].read_text())
    missing = [link for link in links if not (PAGES[name].parent / link).exists()]
    assert not missing


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_headings(name: str):
    page = PAGES[name]
    links = re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text())
    pages = [(page.parent / link if link else page, anchor) for link, anchor in links]
    assert not [x for x in pages if x[0].suffix == ".md" and x[1] not in anchors(x[0])]

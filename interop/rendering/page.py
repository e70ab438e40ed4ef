"""Write a report as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files


def page(title: str, badges: Iterable[tuple[str, str]], body: Iterable[str]) -> str:
    """Return the page; a badge is a class of page.css and its text."""
    folder = files("twin_attention.interop.rendering")
    style, script = (folder.joinpath(f"page.{end}").read_text("utf-8") for end in ("css", "js"))
    marks = " ".join(f'<span class="badge {look}">{escape(text)}</span>' for look, text in badges)
    return "\n".join([
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>",
        f"<h1>{escape(title)} {marks}</h1>",
        *body,
        f"<script>\n{script}</script>\n</body>\n</html>\n",
    ])  # fmt: skip


def facts(named: Mapping[str, str]) -> str:
    terms = [f"<dt>{escape(name)}<dd>{escape(text)}" for name, text in named.items()]
    return "\n".join(["<dl>", *terms, "</dl>"])

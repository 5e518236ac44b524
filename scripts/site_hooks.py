"""Hooks of the site's build: what is right in the repository, and would not be on a page of its own.

``mkdocs.yml`` names this file. Links out of ``docs/`` become paths of the repository, as no address is published; the
page of Python names gets each module's docstrings, and less weight in searches.
"""

from __future__ import annotations

import re
from typing import Any

_OUT_OF_DOCS = re.compile(r"\[([^\]]+)\]\((?:\.\./([^)#]+)|(first_run\.ipynb))(?:#[^)]*)?\)")
_MODULE = re.compile(r"^## `([\w.]+)`\n", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return a page's Markdown as the site shows it."""
    markdown = _OUT_OF_DOCS.sub(lambda found: f"{found[1]} (`{found[2] or f'docs/{found[3]}'}`)", markdown)
    if page.file.src_uri != "python_api.md":
        return markdown
    page.meta["search"] = {"boost": 0.5}  # it has nearly every word, and would come before pages that answer
    head, *sections = _MODULE.split(markdown)
    named = zip(sections[::2], sections[1::2], strict=True)
    return head + "".join(f"## `{name}`\n{table}{_docstrings(name)}\n" for name, table in named)


def _docstrings(module: str) -> str:
    """Return the directive for a module's docstrings; the package itself only repeats names of the others."""
    return f"\n::: {module}\n" if "." in module else ""

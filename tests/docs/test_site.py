"""Pages lead somewhere: links and anchors are there, keys and commands exist, users' questions find their page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import site_hooks
from doc_numbers import pages

from lowmem_ft.cli import commands as cli_commands
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.reading.keys import recipe_keys

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in pages()}
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
NO_KEYS = {
    "plan.json",
    "data.json",
    "training.learning_rat",
    "model.is_loaded_in_4bit",
    "model.embed_tokens",
    "optimizer.kernel",
}
"""Words that look like keys: files, a mistake that a page shows, attributes and modules."""


def anchors_of(text):
    headings = re.findall(r"^#{1,6} (.+)$", FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in plain}


def links_of(text):
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", FENCE.sub("", text)))


@pytest.mark.parametrize("name", PAGES)
def test_links_and_anchors_are_there(name):
    missing = []
    for link in links_of(PAGES[name]):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        is_there = target.exists()
        if is_there and anchor:
            is_there = anchor in anchors_of(target.read_text(encoding="utf-8"))
        missing += [] if is_there else [link]
    assert missing == []


def test_every_page_is_in_the_sites_navigation():
    named = re.findall(
        r"^ +- (?:[^:\n]+: )?(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(named) == sorted(page.name for page in DOCS.glob("*.md"))


def test_recipe_keys_that_pages_name_exist():
    keys = recipe_keys()
    groups = "|".join({key.partition(".")[0] for key in keys if "." in key})
    pattern = re.compile(rf"(?<![\w./:-])((?:{groups})\.[a-z_0-9]+)(?=[=\s,;`)\]'\"]|$)")
    named = {
        (page, key)
        for page, text in PAGES.items()
        for code in (*re.findall(r"`([^`\n]+)`", text), *(found[0] for found in FENCE.finditer(text)))
        for key in pattern.findall(code)
    }
    assert len(named) > 400
    assert [(page, key) for page, key in sorted(named) if key not in {*keys, *NO_KEYS}] == []


def commands():
    for page, text in PAGES.items():
        for block in FENCE.finditer(text):
            joined = re.sub(r"\\\n\s*", "", block[0])
            for line in re.findall(r"^ *(?:\$ )?(lowmem-ft [^\n]+)$(?!\nerror:)", joined, re.MULTILINE):
                yield page, re.sub(r"\s{2,}#.*| # .*", "", line).strip()


COMMANDS = sorted(set(commands()))


@pytest.mark.parametrize("name", PAGES)
def test_files_of_the_repository_that_a_page_names_are_there(name):
    named = re.findall(r"`((?:lowmem_ft|scripts|tests|recipes|configs)/[\w./-]+\.\w+)", PAGES[name])
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page, command", COMMANDS, ids=lambda words: words)
def test_a_command_exists_and_its_recipe_loads(page, command):
    """Recipes and data of the user's own are replaced; everything else is as the page has it."""
    _, subcommand, *words = shlex.split(command)
    assert f"{subcommand}.py" in {file.name for file in Path(cli_commands.__path__[0]).glob("*.py")}
    if subcommand not in ("train", "estimate", "plan", "rehearse", "data") or "--script" in words:
        return
    settings = [word for word in words if re.match(r"[a-z_.]+=", word) and "NAME" not in word]
    recipe = next((word.partition("=")[2] for word in settings if word.startswith("recipe=")), None)
    if recipe is not None and (recipe.endswith((".yaml", ".yml")) or "/" in recipe):
        recipe = "tiny"
    load_recipe(recipe, [word for word in settings if not word.startswith("recipe=")])


def test_the_readme_is_short_and_begins_with_a_command():
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 150
    assert any(line.startswith("lowmem-ft ") for line in lines[:15])
    assert {"make demo", "make test"} <= {line.partition("    ")[0] for line in lines}


class FakePage:
    def __init__(self, name):
        self.file = type("File", (), {"src_uri": name})()
        self.meta = {}


def test_links_out_of_the_docs_become_paths_on_the_site():
    page = site_hooks.on_page_markdown("See [the data](../tests/data/x.json#a).", page=FakePage("clock.md"))
    assert page == "See the data (`tests/data/x.json`)."


def test_each_published_module_has_its_docstrings_on_the_site():
    fake = FakePage("python_api.md")
    page = site_hooks.on_page_markdown(PAGES["docs/python_api.md"], page=fake)
    assert "\n::: lowmem_ft.planning.estimator\n" in page
    assert page.count("\n::: ") == PAGES["docs/python_api.md"].count("\n## `") - 1
    assert fake.meta["search"]["boost"] < 1, "it would be found before the pages that answer"

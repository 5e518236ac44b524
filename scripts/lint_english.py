"""Check docstrings, comments, messages and pages for the project's English: first words, and words that are not idiom.

    python scripts/lint_english.py [FILE|FOLDER ...]

Prints one line per finding with a better wording, and exits with 1 if there are any. CONTRIBUTING has the rules.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from command_line import parser_of

ROOT = Path(__file__).resolve().parents[1]

FOLDERS = ("lowmem_ft", "scripts", "docs", "README.md", "CONTRIBUTING.md")
"""Folders and pages to check if the command names none."""

OPENINGS = re.compile(
    "(What|Whether|Which|How|Where|Whose|Who|When|Why|Of|Is|Are|Does|Do|Has|Have|And|Or|But|Nor|None|Also|As|So|Not|Only|"
    r"By|Told|Asked)\b"
)
"""Words that begin a question or the rest of a sentence: a docstring begins with a verb or with the thing itself."""

WORDS = {
    r"beside": "next to, and, in addition to",
    r"besides": "also",
    r"anew": "again",
    r"(all|nothing|none|anything|everything|each)\s+but|but\s+for": "except",
    r"go(es|ing)?\s+on|went\s+on": "resume, continue",
    r"(is|are|was|were) none": "there is no",
    r"(stands?|stood|lies?|lay|lying) (in(?! for)|on|at|there|here|above|below|between)": "is, is stored",
    r"nobody": "no one, or name the actor",
    r"somebody('s)?": "a user, another program",
    r"(?<!model )(?<!--)cards?": "GPU",
    r"whose ever": "whoever's",
    r"mend(s|ed|ing)?": "fix",
    r"without\s+a\s+word": "silently",
    r"(says?|tells?)\s+(nothing|little|much|more)\s+of|tells?\s+of": "say about",
    r"told(?!\s+apart)": "gets, is called with, is reported",
    r"(\d+f?|N)(?=\s%%?(?![\w(%.]))": "6%, without a space",
}
"""Patterns and their replacements."""

FEWEST_WORDS = 3
"""Words of a message: shorter strings are keys, names and patterns."""

NOT_PROSE = re.compile(r"\(Tensor.*-> ")
"""Strings whose words a format decides: schemas of operators."""


CODE_IN_PAGES = re.compile(r"^( *)(```|~~~).*?^\1\2|`[^`]*`|\]\([^)]*\)|<!--.*?-->", re.MULTILINE | re.DOTALL)
"""Parts of a page that are no prose: code, addresses of links, comments."""


def findings_in_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line of a Markdown page with a finding, and the finding in words."""
    yield from _words(1, CODE_IN_PAGES.sub(lambda found: "\n" * found[0].count("\n"), text))


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Yield each line of a Python ``source`` with a finding, and the finding in words."""
    tree = ast.parse(source)
    for line, text in _docstrings(tree):
        first = OPENINGS.match(text)
        if first is not None:
            yield (
                line,
                f"a docstring begins with a verb or the thing, not with {first[0]!r}: {text.splitlines()[0]}",
            )
        yield from _words(line, text)
    for line, text in _messages(tree):
        yield from _words(line, text)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _words(token.start[0], token.string)


def _words(line: int, text: str) -> Iterator[tuple[int, str]]:
    for pattern, better in WORDS.items():
        for found in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE):
            yield line + text.count("\n", 0, found.start()), f"{found[0]!r}: write {better}"


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield docstrings of modules, classes and functions, and the strings below constants and fields."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text is not None:
            yield node.body[0].lineno, text
        for before, after in zip(node.body, node.body[1:], strict=False):
            if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                value = after.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield after.lineno, value.value


def _messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield strings of several words: errors, log lines, help. The values in an f-string count as one word each."""
    within = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr | ast.JoinedStr)
        for part in _below(node)
    }
    for node in ast.walk(tree):
        text = ""
        if id(node) not in within and isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "N" for part in node.values)
        if len(text.split()) >= FEWEST_WORDS and NOT_PROSE.match(text) is None:
            yield getattr(node, "lineno", 1), text


def _below(node: ast.Expr | ast.JoinedStr) -> Iterator[ast.AST]:
    """Yield the literal of a docstring, or the literal parts of an f-string."""
    yield from [node.value] if isinstance(node, ast.Expr) else node.values


def findings_below(root: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield the findings of a file, or of the Python files and pages in a folder, with their file."""
    for file in sorted((*root.rglob("*.py"), *root.rglob("*.md"))) if root.is_dir() else [root]:
        of_file = findings_in_page if file.suffix == ".md" else findings
        for line, words in sorted(of_file(file.read_text(encoding="utf-8"))):
            yield file, line, words


def main() -> int:
    """Print the findings; return 1 if there are any."""
    parser = parser_of(__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help=f"default: {' and '.join(FOLDERS)}")
    count = 0
    for root in parser.parse_args().paths or [ROOT / folder for folder in FOLDERS]:
        for file, line, words in findings_below(root):
            print(f"{file}:{line}: {words}")
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())

"""``lowmem-ft docs``: the pages of documentation, which come with the package."""

from __future__ import annotations

import re

from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.output import Output
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.foundation.errors import UserError, did_you_mean
from lowmem_ft.foundation.user_paths import docs_folder


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Print the list of pages, or one page as Markdown.

    Args:
        arguments: nothing, or a page's name.

    Returns:
        The exit code, 0.
    """
    parser = Parser(
        prog="lowmem-ft docs",
        description="List the pages of documentation, or print one as Markdown: on a terminal in its width, in a pipe "
        "as it is.",
    )
    parser.add_argument("page", nargs="?", metavar="PAGE", help="a page's name, such as out_of_memory")
    page = parser.parse_args(arguments).page

    from lowmem_ft.reports.text.document import Pairs
    from lowmem_ft.reports.text.markdown import Markdown

    pages = {path.stem: path for path in sorted(docs_folder().glob("*.md"))}
    if page is None:
        Output().add(
            Pairs(((name, _title(path.read_text("utf-8"))) for name, path in pages.items()), indent=0)
        )
        return 0
    name = re.sub(r"^(?:\./)?docs/|(?:\.md)?(?:#.*)?$", "", page)  # as links of pages have it, too
    if name not in pages:
        raise UserError(
            f"There is no page {page!r}.{did_you_mean(name, pages)} `lowmem-ft docs` lists all {len(pages)}."
        )
    Output().add(Markdown(pages[name].read_text("utf-8")))
    return 0


def _title(text: str) -> str:
    """Return a page's first heading."""
    return re.search(r"^# (.+)$", text, re.MULTILINE)[1]  # pyright: ignore[reportOptionalSubscript]

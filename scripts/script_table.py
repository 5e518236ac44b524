"""The table "trainer, kind of model, adapter": bytes of real runs on this processor next to those of their estimates.

    python scripts/script_table.py [NAME ...] [--write]

Each row's script runs for three steps, by itself and on the virtual machine; ``--write`` puts the table into
docs/scripts_measured.md. NAME is the beginning of rows' names, such as ``SFT`` or ``Trainer-dense``.
"""

from __future__ import annotations

import os
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from command_line import parser_of
from marked_table import put_table, table_of
from measured_on import measured_on, version_of
from user_scripts.measured import PEAK, Measured, measure
from user_scripts.models import write_all
from user_scripts.rows import ROWS

PAGE = Path(__file__).parents[1] / "docs" / "scripts_measured.md"
_HEADS = ("trainer", "model", "trained", "MB, real", "MB, estimated", "off", "worst phase", "off there")

_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "sentence-transformers")
_COLUMNS = 120
_STAR = "\\*"


def page_table(seen: Sequence[Measured]) -> str:
    """Return the page's table, and the notes of its rows below."""
    notes = [*dict.fromkeys(one.row.note for one in seen if one.row.note)]
    rows = [_cells(one, notes) for one in seen]
    explained = "".join(f"\n{_STAR * number} {note}\n" for number, note in enumerate(notes, 1))
    return table_of(_HEADS, rows, numbers=(3, 4, 5, 7)) + "\n" + explained + _measured_with()


def _measured_with() -> str:
    on = measured_on("cpu")
    versions = ", ".join(f"{name} {version_of(name)}" for name in _PACKAGES if version_of(name))
    words = f"{on['date']}, {on['hardware']}, Python {on['host']['python']}, {versions}."
    return f"\n{textwrap.fill(words, _COLUMNS, break_on_hyphens=False)}\n"


def _cells(seen: Measured, notes: Sequence[str]) -> list[str]:
    row = seen.row
    names = [row.trainer, row.kind, row.adapter]
    if seen.problem:
        return [*names, "", "", "", seen.problem, ""]
    whole = seen.estimated_bytes / seen.real_bytes - 1
    megabytes = [f"{size / 1e6:.3f}" for size in (seen.real_bytes, seen.estimated_bytes)]
    is_off = row.note and abs(seen.off) > PEAK
    stars = _STAR * (notes.index(row.note) + 1) if is_off else ""
    return [*names, *megabytes, f"{whole:+.3%}", seen.phase.replace("_", " ") + stars, f"{seen.off:+.3%}"]


def main() -> None:
    """Measure the rows that the command names; all of them by default."""
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginning of a row's name")
    parser.add_argument("--write", action="store_true", help="write the table into its page")
    options = parser.parse_args()
    rows = [row for row in ROWS if not options.names or row.name.startswith(tuple(options.names))]
    if not rows:
        parser.error(f"no row's name begins so; the rows are {', '.join(row.name for row in ROWS)}")
    if options.write and options.names:
        parser.error("--write needs all the rows: leave out the names")
    seen: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        write_all(Path(folder))
        os.chdir(folder)
        for number, row in enumerate(rows, 1):
            began = time.monotonic()
            seen.append(measure(row))
            print(f"[{number}/{len(rows)}] {seen[-1]} ({time.monotonic() - began:.0f} s)", flush=True)
        os.chdir(Path(__file__).parent)
    if options.write:
        put_table(PAGE, "script_table.py", page_table(seen))


if __name__ == "__main__":
    main()

"""Checks of local data before torch and transformers are imported, which takes longer than reading small files.

``datasets`` reads it exactly as the run itself will, and caches it: there is no second reader that might disagree.
Checks that need a tokenizer come later.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from lowmem_ft.data.config import DataConfig
from lowmem_ft.data.files.files import is_saved_dataset, known_files, local_files, reader_of
from lowmem_ft.data.files.reading import Source, reading_error
from lowmem_ft.data.sources.splits import Part, num_held_out, parts_of
from lowmem_ft.data.text.examples import naming_example
from lowmem_ft.data.text.format_choice import choose_format, other_formats
from lowmem_ft.data.text.formats import ExampleFormat
from lowmem_ft.data.text.summary import DataSummary, Outcome
from lowmem_ft.data.text.unused_fields import refuse_images, refuse_judged_answers
from lowmem_ft.foundation.user_paths import expand_user

MOST_BYTES = 64 * 2**20
"""Maximum bytes of files that are read first: about a second. Larger ones would delay errors about a model."""

NUM_ROWS = 1000
"""Rows of a split that are checked one by one."""


def check_small_local_data(config: DataConfig) -> None:
    """Reject local data that cannot be read, whose first rows do not have its format, or of which nothing is left.

    Args:
        config: names the data. Hub names, files of more than 64 MiB, and streams, for which datasets needs torch, are
            not checked.

    Raises:
        DataError: if any of it is unfit.
    """
    if config.streaming:
        return
    with _without_progress_bars():
        for part in parts_of(config):
            with part.listed.named_in_errors():
                if _is_small(part.source):
                    _check(part)


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Hide progress bars: small files are read before one would move, and an error would appear below it."""
    were_shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if were_shown:
            enable_progress_bars()


def _is_small(source: Source) -> bool:
    folder = expand_user(source.path)
    if is_saved_dataset(folder):
        files = [file for file in folder.rglob("*") if file.is_file()]
    elif folder.is_dir():
        files = known_files(folder)
    else:
        files = [Path(file) for file in local_files(source.path, setting=source.setting) or ()]
    if len({reader_of(file) for file in files}) > 1 and not is_saved_dataset(folder):
        return False  # datasets reads files of one kind only; that is reported later, once
    return 0 < sum(file.stat().st_size for file in files) <= MOST_BYTES


def _check(part: Part) -> None:
    rows, config, source = part.open(), part.listed.config, part.source
    try:
        first = list(islice(rows, NUM_ROWS))
    except UnicodeDecodeError as error:  # Arrow accepts any bytes as text; only reading a row decodes them
        raise reading_error(error, source) from error
    name, _, columns = choose_format(config, list(first[0]), str(source))
    used = tuple(columns.values())
    example_format = ExampleFormat(
        name=name,
        columns=used,
        system_prompt=config.system_prompt,
        others=other_formats(used, list(first[0])),
    )
    empty = Counter[Outcome]()
    for index, row in enumerate(first):
        with naming_example(index, str(source)):
            if example_format.read(row) is None:
                empty[Outcome.OTHER_FORMAT if example_format.is_of_another(row) else Outcome.EMPTY] += 1
            else:
                refuse_images(example_format, row)
                refuse_judged_answers(example_format, row)
    if empty.total() == len(rows):
        DataSummary(outcomes=Counter() if source.is_text() else empty).require_examples(str(source))
    if part.is_train and config.eval_size is not None:
        num_held_out(config.eval_size, len(rows))

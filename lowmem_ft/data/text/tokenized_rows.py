"""Tables of tokenized rows, made by as many processes as it takes and kept in the cache of ``datasets``."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import datasets
from datasets.fingerprint import Hasher

from lowmem_ft.data.config import MOST_PROCESSES
from lowmem_ft.data.text.tokenizing import TOKENIZED, Tokenization
from lowmem_ft.foundation.system.cores import usable_cores
from lowmem_ft.foundation.system.forked_signals import forks_ignore_ctrl_c

logger = logging.getLogger(__name__)

BATCH_ROWS = 1000

FEW_ROWS = 20_000
"""Rows that one process tokenizes in seconds, before others would have started."""


def tokenized_rows(rows: Any, tokenization: Tokenization, *, num_proc: int | None) -> datasets.Dataset:
    """Return the tokenized table of some rows, from the cache if it was made before; the log says which.

    Args:
        rows: a ``Dataset`` of the columns that the tokenization reads.
        tokenization: what makes tokens of them.
        num_proc: processes; None: one, or for more than :data:`FEW_ROWS` one on each core.
    """
    if num_proc is None and len(rows) > FEW_ROWS:
        num_proc = min(usable_cores(), len(rows) // BATCH_ROWS, MOST_PROCESSES)
    start = time.time()
    with forks_ignore_ctrl_c():
        table = rows.map(
            tokenization,
            with_indices=True,
            batched=True,
            batch_size=BATCH_ROWS,
            writer_batch_size=BATCH_ROWS,
            remove_columns=rows.column_names,
            features=TOKENIZED,
            num_proc=num_proc,
            # Hashing the function itself would hash the tokenizer's inner state, which changes as it is used.
            new_fingerprint=Hasher.hash([rows._fingerprint, tokenization.key()]),
            desc=f"Tokenizing {tokenization.source}",
        )
    seconds = time.time() - start
    files = [str(file["filename"]) for file in table.cache_files]
    if files and max(map(os.path.getmtime, files)) < start:
        logger.info("The tokens of %s come from the cache of an earlier run.", tokenization.source)
    else:
        logger.info(
            "Tokenized %s rows of %s in %.1f s: %s rows/s, processes: %d.",
            *(
                f"{len(rows):,}",
                tokenization.source,
                seconds,
                f"{len(rows) / max(seconds, 1e-3):,.0f}",
                num_proc or 1,
            ),
        )
    return table

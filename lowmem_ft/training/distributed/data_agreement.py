"""Agreement of all ranks on the data of a run: otherwise their shares of the rows would not fit together."""

from __future__ import annotations

import hashlib
import socket
from itertools import islice

import numpy as np

from lowmem_ft.data.loading import PreparedData
from lowmem_ft.foundation.errors import DataError, raise_problems
from lowmem_ft.training.distributed.processes import Processes
from lowmem_ft.training.distributed.rendezvous import RankInfo, differences

_ROWS = 64
"""Number of rows that are compared token by token."""


def refuse_other_data(data: PreparedData, processes: Processes) -> None:
    """Compare counts over all processes, and the tokens of some rows; a stream is not compared.

    Args:
        data: this process's data.
        processes: those of the run.

    Raises:
        DataError: in all processes, if one has different data from the first.
    """
    if processes.num_processes == 1:
        return
    arrivals = processes.gather([RankInfo(socket.gethostname(), (), _facts_of(data))])
    way_out = "Let data.path and its files be the same on every machine."
    raise_problems(list(differences(arrivals, way_out)), DataError)


def _facts_of(data: PreparedData) -> dict[str, str]:
    """Return facts about the data by name; equal data has equal facts."""
    facts = {}
    for which, summary in (("training", data.summary), ("held-out", data.evaluation_summary)):
        if summary is not None:
            facts[f"number of {which} examples"] = f"{summary.num_examples:,}"
            facts[f"number of {which} tokens"] = f"{summary.num_tokens:,}"
            facts[f"number of {which} label tokens"] = f"{summary.num_label_tokens:,}"
    if data.train.num_rows is not None:
        facts["tokens of the training examples"] = f"digest {_digest(data)}"
    return facts


def _digest(data: PreparedData) -> str:
    """Return a digest of the first rows, in an order that depends on the number and lengths of rows alone."""
    digest = hashlib.sha256()
    for reference in islice(data.train.order(seed=0, epoch=0), _ROWS):
        for example in data.train.read(reference):
            for values_T in (example.input_ids_T, example.labels_T):
                digest.update(np.ascontiguousarray(values_T, dtype=np.int64).tobytes())
    return digest.hexdigest()[:12]

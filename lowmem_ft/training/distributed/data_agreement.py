"""All processes of a run read the same data, or it does not begin: each would train on rows that are not the next's."""

from __future__ import annotations

import hashlib
import socket
from itertools import islice

import numpy as np

from lowmem_ft.data import PreparedData
from lowmem_ft.foundation.errors import DataError
from lowmem_ft.training.distributed.rendezvous import Arrival, differences
from lowmem_ft.training.runtime import RunRuntime

_ROWS = 64
"""How many rows are compared token by token."""


def refuse_other_data(data: PreparedData, runtime: RunRuntime) -> None:
    """Compare counts over all processes, and the tokens of some rows; a stream is not compared.

    Args:
        data: this process's.
        runtime: knows the others.

    Raises:
        DataError: in all processes, if one has other data than the first.
    """
    if runtime.num_processes == 1:
        return
    arrivals = runtime.gather([Arrival(socket.gethostname(), (), _facts_of(data))])
    way_out = "Let data.path and its files be the same on every machine."
    if problems := list(differences(arrivals, way_out)):
        raise DataError(*problems)


def _facts_of(data: PreparedData) -> dict[str, str]:
    """What is the same where data are, by name."""
    facts = {}
    for which, summary in (("training", data.summary), ("held-out", data.evaluation_summary)):
        if summary is not None:
            facts[f"number of {which} examples"] = f"{summary.num_examples:,}"
            facts[f"number of {which} tokens"] = f"{summary.num_tokens:,}"
            facts[f"number of {which} label tokens"] = f"{summary.num_label_tokens:,}"
    if data.train.num_rows is not None:
        facts["tokens of the training examples"] = f"those of digest {_digest(data)}"
    return facts


def _digest(data: PreparedData) -> str:
    """Of the rows that come first, in an order that is the same for the same number and lengths of rows."""
    digest = hashlib.sha256()
    for reference in islice(data.train.order(seed=0, epoch=0), _ROWS):
        for example in data.train.read(reference):
            for values_T in (example.input_ids_T, example.labels_T):
                digest.update(np.ascontiguousarray(values_T, dtype=np.int64).tobytes())
    return digest.hexdigest()[:12]

"""Agreement of all ranks on the data of a run: otherwise their shares of the rows would not fit together."""

from __future__ import annotations

import socket

from lowmem_ft.data.prepared_data import PreparedData
from lowmem_ft.foundation.errors import DataError, raise_problems
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.processes.rendezvous import RankInfo, differences


def refuse_other_data(data: PreparedData, ranks: Ranks) -> None:
    """Compare counts and tokens over all processes; a stream is not compared.

    Args:
        data: this process's data.
        ranks: those of the run.

    Raises:
        DataError: in all processes, if one has different data from the first.
    """
    if ranks.num_processes == 1:
        return
    arrivals = ranks.gather([RankInfo(socket.gethostname(), (), _facts_of(data))])
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
        facts["tokens of the training examples"] = f"digest {data.fingerprint}"
    return facts

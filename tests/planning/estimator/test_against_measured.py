"""The estimator beside every measured row of ``tests/data/measured``, estimated anew."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from measure_memory import recipe_of
from measuring.comparison import METRICS, compare, estimated_peaks, measured_gpu, summarize, table

from lowmem_ft.planning.estimator import estimate_memory

FOLDER = Path(__file__).parents[2] / "data" / "measured"
MAY_BE_UNDER = 0.02
MEDIAN = {"allocated": 0.005, "reserved": 0.02, "process": 0.025}
WORST = {"allocated": 0.02, "reserved": 0.05, "process": 0.06}
FILES = sorted(FOLDER.glob("measured-*.json"))


def is_near(row):
    """On a CPU memory changes with the minor versions of torch and transformers: only rows of the same say anything.

    What was measured on a GPU, with torch 2.11 and transformers 5.17, is what later versions hold too.
    """
    return row["gpu"] is not None or all(
        row["versions"][name].split(".")[:2] == version(name).split(".")[:2]
        for name in ("torch", "transformers")
    )


def few_of(rows):
    """As few as have every setting between them, any family for the others; of those on a GPU, the first.

    A row on a GPU takes seconds.
    """
    if rows and rows[0]["gpu"] is not None:
        return rows[:1]
    missing, few = set().union(*map(settings_of, rows)), []
    while missing:
        few.append(max(rows, key=lambda row: len(missing & settings_of(row))))
        missing -= settings_of(few[-1])
    return few


def settings_of(row):
    return {setting for setting in row["overrides"] if not setting.startswith("model=")}


@pytest.mark.parametrize("chosen", [few_of, pytest.param(list, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_measured_rows_are_met(file, chosen, tmp_path):
    rows = json.loads(file.read_text())
    assert rows
    near = chosen([row for row in rows if is_near(row)])
    if not near:
        pytest.skip(f"the rows of {file.name} are of other versions of torch or transformers")
    comparisons = []
    for row in near:
        estimate = estimate_memory(recipe_of(row["overrides"], tmp_path), measured_gpu(row))
        comparisons += compare(row["name"], row["measured"], estimated_peaks(estimate))
    print(f"{len(near)} of {len(rows)} rows", *table(comparisons), sep="\n")  # noqa: T201
    for metric in METRICS:
        of_metric = [comparison for comparison in comparisons if comparison.metric == metric]
        if of_metric:
            errors = summarize(of_metric)
            assert errors.median <= MEDIAN[metric], errors
            assert errors.worst <= WORST[metric], errors
            assert errors.under <= MAY_BE_UNDER, errors


def test_there_are_measured_rows():
    assert FILES

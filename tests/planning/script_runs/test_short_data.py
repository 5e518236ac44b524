"""Data that a script's estimate shortens, and the library that it leaves as it was."""

from __future__ import annotations

import contextlib
import sys
from unittest import mock

import pytest

from lowmem_ft.planning.script_runs.short_data import DataCut

LIBRARY = {
    "__init__": "from .arrow_dataset import Dataset\nfrom .load import load_dataset",
    "arrow_dataset": "class Dataset:\n    map = filter = select = train_test_split = lambda self: None",
    "load": "def load_dataset(path):\n    return path",
}
"""A package whose first module imports from the others, as that of ``datasets`` does."""


@pytest.mark.parametrize("is_imported_before", [True, False])
def test_reading_is_announced_once_and_no_more_after_the_script(is_imported_before, tmp_path, monkeypatch):
    (tmp_path / "datasets").mkdir()
    for name, text in LIBRARY.items():
        (tmp_path / "datasets" / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    heard = []
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "datasets"]:
            del sys.modules[name]
        if is_imported_before:
            import datasets
        with contextlib.ExitStack() as undo:
            DataCut(1, lambda: heard.append("reading")).apply(undo)
            import datasets
            import datasets.load

            for place in (datasets, datasets.load):
                heard.append(place.load_dataset("rows"))
        assert heard == ["reading", "rows"] * 2
        assert datasets.load_dataset is datasets.load.load_dataset
        assert datasets.load_dataset("after") == "after"
        assert heard == ["reading", "rows"] * 2

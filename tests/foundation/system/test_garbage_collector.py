"""The collector rests while large libraries are imported, and does not walk their objects afterwards."""

import gc
import sys

import pytest
import torch  # noqa: F401 - the tests take it away

from lowmem_ft.foundation.system.garbage_collector import libraries_imported


@pytest.fixture(autouse=True)
def _nothing_stays_frozen():
    yield
    gc.unfreeze()


def test_what_a_first_import_makes_is_left_out_of_collections(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    with libraries_imported():
        assert not gc.isenabled()
        made = [[] for _ in range(10)]
    assert gc.isenabled()
    watched = {id(one) for one in gc.get_objects()}
    assert not watched & {id(one) for one in made}


def test_where_torch_is_there_garbage_is_still_freed():
    with libraries_imported():
        assert gc.isenabled()
    assert not gc.get_freeze_count()


def test_after_an_error_the_collector_works_as_before(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(ValueError, match="no such model"), libraries_imported():
        raise ValueError("no such model")
    assert gc.isenabled()
    assert not gc.get_freeze_count()

"""The length at which memory ends, by estimates that cost nothing here."""

from __future__ import annotations

import dataclasses
import types

import pytest

from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.units import GIB, parse_bytes
from lowmem_ft.planning.estimator import longest_rows as module
from lowmem_ft.planning.estimator.longest_rows import GRID_TOKENS, RESOLUTION, longest_rows
from lowmem_ft.recipe import load_recipe
from lowmem_ft.reports.longest_rows_table import length_words

GPU = dataclasses.replace(load_gpus()["rtx-4090"], memory_bytes=24 * GIB)


@pytest.fixture
def search(monkeypatch):
    """Search with peaks by a function of the tokens; return what was found, and the lengths that were estimated."""

    def search(bytes_of, *, start=2048, most=131072, budget=None, host=None, extra_bytes=0):
        tried = []

        def estimate_memory(recipe, gpu, *, budget, kept):
            tokens = recipe.data.max_length
            tried.append(tokens)
            limit = gpu.memory_bytes if budget.device is None else parse_bytes(budget.device)
            host_limit = None if budget.host is None else parse_bytes(budget.host)
            peak = int(bytes_of(tokens))
            return types.SimpleNamespace(
                process_high_bytes=peak,
                host_peak_bytes=3 * GIB,
                fits=peak <= limit and not (host_limit and host_limit < 3 * GIB),
                budget=types.SimpleNamespace(device_bytes=limit, host_bytes=host_limit),
            )

        monkeypatch.setattr(module, "estimate_memory", estimate_memory)
        monkeypatch.setattr(module, "most_tokens", lambda recipe: most)
        settings = [f"data.max_length={start}", *([f"budget.device={budget}"] if budget else [])]
        settings += [f"budget.host={host}"] if host else []
        return longest_rows(load_recipe("7b-lora", settings), GPU, extra_bytes=extra_bytes), tried

    return search


def stepped(tokens):
    """Memory as the caching allocator takes it, in segments."""
    return 15 * GIB + (tokens * 600_000 // (300 << 20)) * (300 << 20)


def curved(tokens):
    """Memory that short rows do not change, and long rows take by the square of their length."""
    return 15 * GIB + max(0, tokens - 9000) ** 2 * 40


@pytest.mark.parametrize("start", [64, 2048, 16384, 60000])
@pytest.mark.parametrize("bytes_of", [lambda tokens: 15 * GIB + tokens * 600_000, stepped, curved])
def test_the_end_is_found_from_any_length_in_few_estimates(search, bytes_of, start):
    found, tried = search(bytes_of, start=start)
    assert bytes_of(found.tokens) <= 24 * GIB < bytes_of(found.over_tokens)
    assert 0 < found.over_tokens - found.tokens <= max(GRID_TOKENS, RESOLUTION * found.tokens)
    assert len(tried) == len({*tried}) <= 9


def test_a_gib_more_buys_as_many_tokens_as_it_holds(search):
    now, _ = search(lambda tokens: 15 * GIB + tokens * 600_000)
    more, _ = search(lambda tokens: 15 * GIB + tokens * 600_000, extra_bytes=GIB)
    assert more.tokens - now.tokens == pytest.approx(GIB / 600_000, rel=0.35)
    of_budget, _ = search(lambda tokens: 15 * GIB + tokens * 600_000, budget="24GiB", extra_bytes=GIB)
    assert of_budget == more


def test_the_memory_that_is_lacking_is_named(search):
    of_device, _ = search(lambda tokens: 15 * GIB + tokens * GIB, start=128)
    assert (of_device.tokens, of_device.over_tokens, of_device.over_host_bytes) == (0, 64, 0)
    assert of_device.over_device_bytes == 55 * GIB
    assert "Rows of 64 tokens do not fit (up to 55.0 GiB of device memory too little)" in length_words(
        of_device
    )
    of_host, _ = search(lambda tokens: GIB, start=128, host="1GiB")
    assert "do not fit (up to 2.00 GiB of host memory too little)" in length_words(of_host)


def test_the_models_limit_ends_it_too(search):
    found, tried = search(lambda tokens: GIB, start=1024, most=4096)
    assert (found.tokens, found.over_tokens) == (4096, None)
    assert tried == [1024, 2048, 4096]


def test_a_limit_shorter_than_the_grid_is_tried(search):
    found, tried = search(lambda tokens: GIB, most=48)
    assert (found.tokens, found.over_tokens, tried) == (48, None, [48])


def test_where_nothing_fits_there_is_no_length(search):
    found, _ = search(lambda tokens: 30 * GIB, start=2048)
    assert (found.tokens, found.over_tokens) == (0, GRID_TOKENS)

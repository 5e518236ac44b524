"""Batches that were not traced: their seconds lie between those of the shapes that were."""

from __future__ import annotations

import random
import shutil

import pytest
from tiny_models import TINY, save_llama

from lowmem_ft.planning.rehearsal import runtime, window_shapes
from lowmem_ft.planning.rehearsal.seconds_by_tokens import SecondsByTokens


def test_seconds_are_read_on_the_line_through_the_traced_shapes():
    by_tokens = SecondsByTokens([(100, 2.0), (300, 4.0), (300, 6.0), (200, 3.0)])
    assert by_tokens.share(250, of=300) == pytest.approx(4 / 5)
    assert by_tokens.share(300, of=300) == 1
    assert by_tokens.share(50, of=100) == 1  # nothing smaller is known
    assert by_tokens.error == pytest.approx(3.5 / 3 - 1)


def test_a_larger_shape_that_took_less_makes_none_below_it_take_more():
    assert SecondsByTokens([(100, 2.0), (200, 1.5)]).share(100, of=200) == 1


def test_with_few_shapes_or_with_nothing_to_do_no_error_is_known():
    assert SecondsByTokens([]).error == 0
    assert SecondsByTokens([(1, 1.0), (2, 2.0)]).error == 0
    assert SecondsByTokens([(1, 0.0), (2, 0.0), (3, 0.0)]).share(1, of=2) == 1


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose steps take a GPU longer than the host needs to issue them."""
    folder = tmp_path_factory.mktemp("wide")
    for file in TINY.glob("token*"):
        shutil.copy(file, folder)
    save_llama(
        folder, layers=1, hidden=2048, inner=4096, heads=16, vocab_size=512, max_position_embeddings=2048
    )
    return folder


@pytest.mark.parametrize("order", [pytest.param("horizontal", marks=pytest.mark.slow), "vertical"])
def test_a_few_shapes_tell_the_seconds_of_all(rehearse, order, recipe, chats, wide, monkeypatch):
    draw = random.Random(0)
    settings = (
        f"model.name_or_path={wide}",
        f"data={chats([min(900, int(draw.lognormvariate(4, 1))) for _ in range(80)])}",
        "data.eval_size=16",
        "data.max_length=1024",
        "training.num_train_epochs=1",
        f"accumulation.order={order}",
    )
    few = rehearse(recipe(*settings), "rtx-4060")
    assert len(few.steps) < 16
    assert few.rounding > 0.02
    for name in ("MOST_SHAPES", "MOST_EVALUATION_SHAPES"):
        monkeypatch.setattr(runtime, name, 10_000)
    monkeypatch.setattr(window_shapes, "_rounded_up", lambda shape, largest: shape)
    exact = rehearse(recipe(*settings), "rtx-4060")
    assert exact.rounding == 0
    assert few.time.steps == pytest.approx(exact.time.steps, rel=0.015)
    assert few.time.evaluations == pytest.approx(exact.time.evaluations, rel=0.1)
    assert few.longest.peak_bytes == exact.longest.peak_bytes

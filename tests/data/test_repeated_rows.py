"""Rows that stand several times, and held-out rows that are training rows, are counted and said."""

import logging

import pytest

from lowmem_ft.data.repeated_rows import STREAM_NOT_LOOKED_AT


@pytest.fixture(autouse=True)
def _info(caplog):
    caplog.set_level(logging.INFO)


def rows(*numbers):
    return [{"prompt": f"What is {n}?", "completion": f" {n}."} for n in numbers]


def said(caplog, level):
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == level and record.name == "lowmem_ft.data.repeated_rows"
    ]


def test_rows_that_stand_once_are_not_mentioned(write_jsonl, load, caplog):
    held_out = write_jsonl(rows(*range(20, 25)), "held_out.jsonl")
    data = load(write_jsonl(rows(*range(20))), eval_path=held_out)
    assert not said(caplog, logging.WARNING)
    assert not said(caplog, logging.INFO)
    assert (data.repeated.training, data.repeated.most_copies, data.repeated.held_out_in_training) == (
        0,
        1,
        0,
    )


@pytest.mark.parametrize("max_length", [None, 6])
def test_copies_are_counted_by_their_tokens_before_the_cut(max_length, write_jsonl, load, caplog):
    # What is left of them after 6 tokens is the same.
    alike = [{"text": "one two three four five " + end} for end in ("six", "seven", "six", "eight", "six")]
    data = load(write_jsonl(alike), max_length=max_length)
    (warning,) = said(caplog, logging.WARNING)
    assert "2 of 5 rows (40.0%) are copies of an earlier row; example 0 of " in warning
    assert "stands 3 times" in warning
    assert (data.repeated.training, data.repeated.most_copies) == (2, 3)


def test_few_copies_are_told_without_a_warning(write_jsonl, load, caplog):
    data = load(write_jsonl(rows(*range(20), 7)))
    assert not said(caplog, logging.WARNING)
    (note,) = said(caplog, logging.INFO)
    assert "Training data: 1 of 21 rows (4.8%) are copies of an earlier row; example 7 of " in note
    assert data.repeated.training == 1


def test_the_same_prompt_with_another_answer_is_no_copy(write_jsonl, load):
    other = [{"prompt": "What is 3?", "completion": " three."}]
    assert load(write_jsonl(rows(3) + other)).repeated.training == 0


def test_copies_among_several_sources_are_found_and_repeats_of_a_source_are_none(write_jsonl, load, caplog):
    a, b = write_jsonl(rows(*range(10)), "a.jsonl"), write_jsonl(rows(*range(8, 18)), "b.jsonl")
    data = load(None, sources=[{"path": a, "repeats": 3}, {"path": b}])
    assert (data.repeated.training, data.repeated.most_copies) == (2, 2)


@pytest.mark.parametrize("held_out_first", [[2, 1], [1, 2]])
def test_held_out_rows_that_are_training_rows_are_a_warning(held_out_first, write_jsonl, load, caplog):
    held_out = write_jsonl(rows(30, *held_out_first, 31), "held_out.jsonl")
    data = load(write_jsonl(rows(*range(20))), eval_path=held_out)
    (warning,) = said(caplog, logging.WARNING)
    assert "2 of 4 held-out rows (50.0%) are also training rows (first: example 1 of " in warning
    assert "held_out.jsonl" in warning
    assert "name other rows to hold out" in warning
    assert data.repeated.held_out_in_training == 2


def test_a_split_of_a_file_with_copies_leaks_and_says_how_to_mend_it(write_jsonl, load, caplog):
    data = load(write_jsonl(rows(*list(range(5)) * 8)), eval_size=5)
    assert data.repeated.held_out_in_training > 0
    assert "Remove the copies of rows from the file" in said(caplog, logging.WARNING)[-1]


def test_a_document_that_is_split_counts_once(write_jsonl, load):
    data = load(write_jsonl([{"text": "one two " * 40}, {"text": "three four " * 40}]), max_length=16)
    assert data.train.num_rows > 4
    assert data.repeated.training == 0, "pieces with the same words are no copies"


def test_rows_left_out_are_no_copies(write_jsonl, load):
    assert load(write_jsonl([{"text": ""}] * 5 + [{"text": "one two"}])).repeated.training == 0


def test_a_stream_says_that_it_did_not_look(write_jsonl, load, caplog):
    data = load(write_jsonl(rows(1, 1, 1)), streaming=True)
    assert data.repeated is None
    assert STREAM_NOT_LOOKED_AT in caplog.messages

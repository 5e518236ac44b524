"""Rows that are tokens already become the batches that the same rows become as text, or say what is wrong with them."""

from __future__ import annotations

import logging

import datasets
import pytest
import torch

from lowmem_ft.data.batches.position import DataPosition
from lowmem_ft.data.batches.stream import DataStream
from lowmem_ft.data.config import DataConfig
from lowmem_ft.data.early_checks import check_small_local_data
from lowmem_ft.data.text.format_choice import choose_format
from lowmem_ft.data.text.no_tokenizer import NoTokenizer
from lowmem_ft.data.text.summary import Outcome
from lowmem_ft.data.text.token_rows import read_tokens
from lowmem_ft.foundation.errors import DataError, ModelError
from lowmem_ft.foundation.parallel_plan import ParallelPlan

PAIRS = [
    {"prompt": f"{n} one two three" * (1 + n % 5), "completion": f" four {n}" * (1 + n % 7)}
    for n in range(1, 41)
]


@pytest.fixture
def tokens(write_jsonl, load, all_examples):
    """The pairs as ``load`` reads them, in rows of tokens with labels."""
    found = all_examples(load(write_jsonl(PAIRS, "pairs.jsonl"), max_length=None).train)
    return [
        {"input_ids": example.input_ids_T.tolist(), "labels": example.labels_T.tolist()}
        for _, (example,) in sorted(found.items())
    ]


def padded(row, left, right):
    """The row with padding, which is learnt wherever its mask is not looked at."""
    return {
        "input_ids": [7] * left + row["input_ids"] + [9] * right,
        "labels": [7] * left + row["labels"] + [9] * right,
        "attention_mask": [0] * left + [1] * len(row["input_ids"]) + [0] * right,
        "position_ids": [0] * left + list(range(len(row["input_ids"]) + right)),
    }


def windows(data, count=6, position=None):
    stream = DataStream(
        data.train,
        position=position or DataPosition(seed=3),
        per_device_batch_size=2,
        gradient_accumulation_steps=3,
        plan=ParallelPlan(),
        collate=data.collate,
    )
    return [stream.next_window() for _ in range(count)]


def assert_same_batches(ours, others):
    for window, other in zip(ours, others, strict=True):
        for a, b in zip(window.batches, other.batches, strict=True):
            assert torch.equal(a.input_ids_BT, b.input_ids_BT)
            assert torch.equal(a.labels_BT, b.labels_BT)
            assert (a.position_ids_BT is None) == (b.position_ids_BT is None)
            assert a.position_ids_BT is None or torch.equal(a.position_ids_BT, b.position_ids_BT)
            assert (a.sample_ids, a.num_label_tokens) == (b.sample_ids, b.num_label_tokens)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_length": 24},
        {"max_length": 24, "packing": True},
        {"group_by_length": True},
        {"streaming": True, "max_length": 24},
        {"eval_size": 0.25, "max_samples": 30},
    ],
    ids=str,
)
def test_tokens_have_the_batches_of_their_text(write_jsonl, load, tokens, settings):
    text = load(write_jsonl(PAIRS), **settings)
    as_tokens = load(
        write_jsonl([padded(row, n % 3, n % 4) for n, row in enumerate(tokens)], "t.jsonl"), **settings
    )
    assert_same_batches(windows(as_tokens), windows(text))
    assert as_tokens.fingerprint == text.fingerprint or settings.get("streaming")
    assert as_tokens.summary == text.summary


def test_a_run_goes_on_where_it_stopped(write_jsonl, load, tokens):
    data = load(write_jsonl(tokens))
    whole = windows(data)
    assert_same_batches(windows(data, count=3, position=whole[2].position), whole[3:])


def test_without_labels_each_token_is_learnt_but_the_first_and_a_long_row_is_cut(write_jsonl, load, caplog):
    caplog.set_level(logging.INFO)
    data = load(
        write_jsonl([{"input_ids": [5, 6, 7, 8, 9]}, {"input_ids": [5, 6]}, {"input_ids": [5]}]), max_length=4
    )
    first, second = data.train.head(9)
    assert first.input_ids_T.tolist() == [5, 6, 7, 8]
    assert first.labels_T.tolist() == [-100, 6, 7, 8]
    assert second.labels_T.tolist() == [-100, 6]
    assert data.summary.dropped == {Outcome.NO_ANSWER: 1}
    assert data.summary.num_cut == 1
    assert "Loss on: the rows' labels" in caplog.text


def test_a_row_whose_labels_are_all_beyond_the_limit_is_left_out_and_counted(write_jsonl, load):
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
        {"input_ids": [5, 6], "labels": [-100, 6]},
    ]
    assert load(write_jsonl(rows), max_length=2).summary.dropped == {Outcome.ANSWER_CUT_OFF: 1}


@pytest.mark.parametrize("kind", ["parquet", "folder", "tensors", "split"])
def test_tokens_are_read_from_each_kind_of_file(tmp_path, write_jsonl, load, tokens, kind):
    table = datasets.Dataset.from_list(
        [{**row, "attention_mask": [1] * len(row["labels"])} for row in tokens]
    )
    place = tmp_path / kind
    if kind == "parquet":
        place = tmp_path / "rows.parquet"
        table.to_parquet(place)
    elif kind == "split":
        datasets.DatasetDict({"train": table}).save_to_disk(place)
    else:
        (table.with_format("torch", ["input_ids"]) if kind == "tensors" else table).save_to_disk(place)
    assert load(str(place)).fingerprint == load(write_jsonl(tokens)).fingerprint
    check_small_local_data(DataConfig(path=str(place)))


def test_a_column_that_a_saved_format_hides_is_looked_at(tmp_path, load):
    packed = datasets.Dataset.from_list([{"input_ids": [5, 6, 7, 8], "seq_lengths": [2, 2]}])
    packed.with_format("torch", ["input_ids"]).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="hold several"):
        load(str(tmp_path / "saved"))


def test_a_file_of_text_and_one_of_tokens_are_one_epoch(write_jsonl, load, tokens):
    mixed = load(f"{write_jsonl(PAIRS, 'a.jsonl')},{write_jsonl(tokens, 'b.jsonl')}")
    assert mixed.summary.num_examples == 2 * len(PAIRS)
    assert mixed.repeated.training == len(PAIRS)  # the same tokens


def test_text_is_read_where_a_row_has_both_unless_tokens_are_named(write_jsonl, load, tokens, caplog):
    caplog.set_level(logging.INFO)
    both = write_jsonl([{**pair, "input_ids": [5, 6], "labels": [5, 6]} for pair in PAIRS])
    assert load(both).fingerprint == load(write_jsonl(PAIRS, "text.jsonl")).fingerprint
    assert "has tokens, too, and its text is read. For the tokens, set data.format=tokens." in caplog.text
    assert load(both, format="tokens").train.row_lengths.tolist() == [2] * len(PAIRS)


IDS = [5, 6, 7, 8]
GOOD = {
    "input_ids": IDS,
    "labels": [-100, 6, 7, 8],
    "attention_mask": [1, 1, 1, 1],
    "position_ids": [0, 1, 2, 3],
}


@pytest.mark.parametrize(
    "changed, problem",
    [
        ({"input_ids": [5, -6, 7, 8]}, r"input_ids\[1\] is -6, and an id is from 0"),
        ({"input_ids": [5, 6, 7, 2**31]}, r"input_ids\[3\] is 2147483648, and an id is from 0"),
        ({"input_ids": [5.0, 6.0, 7.5, 8.0]}, r"whole numbers, got 5.0 at place 0\. Save it as integers"),
        ({"input_ids": [5, None, 7, 8]}, r"whole numbers, got None at place 1"),
        ({"input_ids": ["5", "6", "7", "8"]}, r"whole numbers, got '5' at place 0"),
        ({"input_ids": [IDS]}, r"whole numbers, got \[\[5, 6, 7, 8\]\]\. A tokenizer with return_tensors"),
        ({"input_ids": [[5, 6], [7]]}, r"whole numbers, got \[\[5, 6\], \[7\]\]"),
        ({"input_ids": "5 6 7 8"}, r"whole numbers, got '5 6 7 8'\. Write the rows as JSON lines or Parquet"),
        ({"input_ids": []}, r"at least one token in input_ids that is not padding, got \[\]"),
        ({"input_ids": None}, r"input_ids is null here"),
        ({"attention_mask": [0, 0, 0, 0]}, r"got 4 and an attention_mask of zeros\. Leave the row out"),
        ({"attention_mask": [1, 0, 1, 1]}, r"got 0 at place 1 between tokens"),
        (
            {"attention_mask": [1, 1, 2, 2]},
            r"attention_mask is 1 at a token and 0 at padding, got 2 at place 2",
        ),
        ({"attention_mask": [1, 1, 1]}, r"attention_mask has a value for each token, got 3 for 4 input_ids"),
        ({"labels": [-100, 6, 7]}, r"labels has a value for each token, got 3 for 4 input_ids"),
        ({"labels": [-100, -1, 7, 8]}, r"labels\[1\]=-1 at input_ids\[1\]=6\. Correct it"),
        ({"labels": [-100, 7, 8, -100]}, r"labels\[1\]=7 at input_ids\[1\]=6\. They are shifted by one"),
        ({"labels": [-100] * 4}, r"labels are -100 at all 4 tokens"),
        ({"labels": 1}, r"labels is a list of whole numbers, got 1\. Write one for each row, or leave"),
        ({"labels": None}, r"labels is null here"),
        ({"position_ids": [0, 1, 0, 1]}, r"position_ids count the tokens of a row from 0, got 0 at place 2"),
        ({"position_ids": [5, 6, 7, 8]}, r"position_ids count the tokens of a row from 0, got 5 at place 0"),
    ],
)
def test_a_bad_row_is_an_error_with_its_value(changed, problem):
    assert read_tokens(GOOD).input_ids_T.tolist() == IDS
    with pytest.raises(DataError, match=problem):
        read_tokens({**GOOD, **changed})


@pytest.mark.parametrize(
    "bad, problem",
    [
        ({"labels": [-100, 17, 7, 8]}, r"labels\[1\]=17 at input_ids\[1\]=6"),
        ({"input_ids": [], "labels": []}, r"got \[\]\. Leave the row out"),
        (
            {"input_ids": [5, 6, 7, 400], "labels": [-100, 6, 7, 400]},
            r"the row has the id 400, but .* ids below 400",
        ),
        ({"text": "one", "input_ids": None}, r"got a row with text and without input_ids"),
        ({"labels": None}, "labels is null"),
        ({"images": ["a.png"]}, "got a row with images"),
        ({"label": True}, "label=true judges the answer"),
    ],
)
@pytest.mark.parametrize("when", ["early", "loading", "streaming"])
def test_the_error_names_the_row(write_jsonl, load, bad, problem, when):
    good = {"input_ids": IDS, "labels": [-100, 6, 7, 8], **dict.fromkeys({*bad} - {"input_ids", "labels"})}
    path = write_jsonl([good, good, {**good, **bad}])
    settings = {"format": "tokens"} if "text" in bad else {}
    if when == "early" and "400" in problem:
        return  # the model's vocabulary is not known then
    read = reads(load, when, path, **settings)
    with pytest.raises(DataError, match=rf"^Example 2 of .*data\.jsonl \(train\): .*{problem}"):
        read()


def reads(load, when, path, **settings):
    """What looks at the data: the check before torch is imported, or a run."""
    if when == "early":
        return lambda: check_small_local_data(DataConfig(path=path, **settings))
    return lambda: load(path, vocab_size=400, streaming=when == "streaming", **settings)


@pytest.mark.parametrize("when", ["early", "loading", "streaming"])
def test_tokens_alone_among_rows_of_text_are_an_error_that_names_the_row(write_jsonl, load, when):
    read = reads(load, when, write_jsonl([{"text": "one"}, {"input_ids": IDS}]))
    with pytest.raises(
        DataError, match=r"^Example 1 of .*: .*got a row with input_ids and without text\. Write"
    ):
        read()


@pytest.mark.parametrize(
    "columns, settings, problem",
    [
        (
            ["input_ids", "seq_lengths"],
            {},
            r"hold several \(seq_lengths\)\. Write them before they are packed",
        ),
        (["input_ids", "labels", "pixel_values"], {}, "has pixel_values next to its tokens"),
        (["input_ids", "completion_mask"], {}, "has completion_mask instead. Write a column labels"),
        (["input_ids", "labels"], {"loss_on": "all"}, r"data\.loss_on=all chooses .* Set data\.loss_on=auto"),
        (
            ["input_ids"],
            {"loss_on": "completion"},
            r"data\.loss_on=completion chooses .* Set data\.loss_on=auto",
        ),
        (["input_ids"], {"system_prompt": "Hi"}, r"data\.system_prompt is for chats"),
        (
            ["text"],
            {"format": "tokens"},
            r"data\.format=tokens reads the column input_ids, which data does not have",
        ),
        (
            ["chosen_ids", "rejected_ids"],
            {},
            "preferences that are tokens already, from which TRL's RewardTrainer",
        ),
        (["prompt_ids", "completion_ids"], {}, "join them as input_ids, with labels of -100 at the prompt"),
        (["prompt_input_ids", "completion_input_ids"], {}, "join them as input_ids"),
        (["question"], {}, r"tokens \(input_ids\)\."),
    ],
)
def test_columns_that_mean_something_else_are_refused(columns, settings, problem):
    with pytest.raises(DataError, match=problem):
        choose_format(DataConfig(**settings), columns, "data")
    choose_format(DataConfig(loss_on="all"), ["input_ids"], "data")
    choose_format(DataConfig(), ["input_ids", "labels", "completion_mask"], "data")


def test_tokens_are_counted_without_a_tokenizer_and_text_says_why_there_is_none(write_jsonl, load, tokens):
    missing = NoTokenizer(ModelError("There is none."))
    with_one, without = load(write_jsonl(tokens)), load(write_jsonl(tokens), tokenizer=missing)
    assert without.summary == with_one.summary
    assert without.fingerprint == with_one.fingerprint
    with pytest.raises(ModelError, match=r"There is none\."):
        load(write_jsonl(PAIRS), tokenizer=missing)

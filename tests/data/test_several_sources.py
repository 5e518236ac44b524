"""Several sources are one epoch: mixed as the recipe says, counted and held out by source."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import islice

import datasets
import numpy as np
import pytest

from lowmem_ft.data.config import DataConfig
from lowmem_ft.data.early_checks import check_small_local_data
from lowmem_ft.data.mixing import drawn
from lowmem_ft.data.sources.listed import listed_sources
from lowmem_ft.foundation.errors import DataError

WORDS = {"a": " one", "b": " two"}


@pytest.fixture
def files(write_jsonl):
    """30 pairs whose completion is one, and 10 chats whose answer is two: of two formats."""
    pairs = [{"prompt": f"a {n}", "completion": WORDS["a"]} for n in range(30)]
    chats = [
        {"messages": [{"role": "user", "content": f"b {n}"}, {"role": "assistant", "content": WORDS["b"]}]}
        for n in range(10)
    ]
    return {"a": write_jsonl(pairs, "a.jsonl"), "b": write_jsonl(chats, "b.jsonl")}


@pytest.fixture
def rows_of(make_tokenizer):
    """What is learnt of each example of an epoch, in its order: one or two."""

    def read(examples, epoch=1, seed=0):
        words = []
        for reference in examples.order(seed, epoch):
            for example in examples.read(reference):
                learnt = example.labels_T[example.labels_T != -100]
                words.append(make_tokenizer().decode(learnt.tolist()).removesuffix("<|im_end|>"))
        return words

    return read


def counts(words):
    return {name: Counter(words)[word] for name, word in WORDS.items()}


@pytest.mark.parametrize("packing", [False, True])
def test_each_example_occurs_once_or_as_often_as_it_is_repeated(files, load, rows_of, packing):
    def load_sources(repeats):
        sources = [{"path": files["a"]}, {"path": files["b"], **repeats}]
        return load(None, sources=sources, packing=packing, max_length=64)

    assert counts(rows_of(load_sources({}).train)) == {"a": 30, "b": 10}
    data = load_sources({"repeats": 3})
    assert counts(rows_of(data.train)) == {"a": 30, "b": 30}
    assert [(one.name, one.examples) for one in data.sources] == [("a", 30), ("b", 30)]
    assert sum(one.tokens for one in data.sources) == data.summary.num_tokens
    assert sum(one.share for one in data.sources) == pytest.approx(1)
    assert data.summary.num_examples == 60


def test_paths_with_commas_are_sources_and_a_file_with_a_comma_is_one(files, load, rows_of, tmp_path):
    data = load(f"{files['a']}, {files['b']}")
    assert counts(rows_of(data.train)) == {"a": 30, "b": 10}
    assert list(data.evaluation_by_source) == []
    one = tmp_path / "a,b.jsonl"
    one.write_text('{"prompt": "q", "completion": " one"}\n')
    assert rows_of(load(str(one)).train) == [" one"]


def test_samples_have_ids_of_their_own(files, load, all_examples, caplog):
    caplog.set_level(logging.INFO)
    data = load(None, sources=[{"path": files["a"]}, {"path": files["b"], "max_samples": 4}])
    assert sorted(all_examples(data.train)) == list(range(34))
    assert "their rows are examples 30 to 33" in caplog.text


@pytest.mark.parametrize("stopping_strategy", ["first_exhausted", "all_exhausted"])
def test_weights_are_probabilities_as_of_interleave_datasets(files, load, rows_of, stopping_strategy):
    sources = [{"path": files["a"], "weight": 1}, {"path": files["b"], "weight": 3}]
    data = load(None, sources=sources, stopping_strategy=stopping_strategy, shuffle=False, seed=7)
    expected = datasets.interleave_datasets(
        [
            datasets.Dataset.from_dict({"word": [WORDS[name]] * count})
            for name, count in (("a", 30), ("b", 10))
        ],
        probabilities=[0.25, 0.75],
        seed=7,
        stopping_strategy=stopping_strategy,
    )["word"]
    assert rows_of(data.train) == list(expected)
    assert counts(rows_of(data.train)) == {one.name: one.examples for one in data.sources}
    if stopping_strategy == "first_exhausted":
        assert counts(rows_of(data.train))["b"] == 10
        other = load(None, sources=sources, shuffle=False, seed=8)
        assert rows_of(other.train) != rows_of(data.train)
    else:
        assert counts(rows_of(data.train))["a"] == 30


def test_a_source_may_be_read_in_a_way_of_its_own(write_jsonl, load, make_tokenizer, all_examples):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    files = [write_jsonl([{"q": "1+1=", "a": "2"}], "q.jsonl"), write_jsonl([{"m": chat}], "m.jsonl")]
    sources = [
        {"path": files[0], "prompt_column": "q", "completion_column": "a", "loss_on": "all"},
        {"path": files[1], "messages_column": "m", "system_prompt": "Be kind."},
    ]
    read = all_examples(load(None, sources=sources).train)
    texts = [make_tokenizer().decode(read[index][0].input_ids_T.tolist()) for index in (0, 1)]
    assert texts[0] == "1+1=2<|im_end|>"
    assert texts[1].startswith("<|im_start|>system\nBe kind.")
    assert (read[0][0].labels_T != -100).sum() == len(read[0][0].labels_T) - 1


@pytest.mark.parametrize("streaming", [False, True])
def test_held_out_rows_come_from_each_source(files, load, rows_of, streaming, write_jsonl):
    held_out = write_jsonl([{"prompt": "c", "completion": " one"}], "c.jsonl")
    sources = [{"path": files["a"], "weight": 1}, {"path": files["b"], "weight": 1}]
    if streaming:
        data = load(None, sources=sources, streaming=True, eval_split="train")
        wanted = {"a": 30, "b": 10}
    else:
        data = load(None, sources=sources, eval_size=0.1)
        wanted = {"a": 3, "b": 1}
    assert {name: len(rows_of(part)) for name, part in data.evaluation_by_source.items()} == wanted
    assert counts(rows_of(data.evaluation)) == wanted
    assert data.evaluation.num_rows == (None if streaming else 4)
    heads = [part.head(3) for part in data.evaluation_by_source.values()]
    first = [heads[0][0], heads[1][0], heads[0][1]]  # of each in turn
    assert [one.input_ids_T.tolist() for one in data.evaluation.head(3)] == [
        one.input_ids_T.tolist() for one in first
    ]
    assert len(data.evaluation.head(99)) == sum(wanted.values())
    data = load(None, sources=sources, streaming=streaming, eval_path=held_out)
    assert rows_of(data.evaluation) == [" one"]
    assert data.evaluation_by_source == {}


def test_streams_are_drawn_by_weight_from_the_same_seed(files, load, rows_of, caplog):
    caplog.set_level(logging.INFO)
    sources = [{"path": files["a"], "weight": 1}, {"path": files["b"], "weight": 3}]
    data = load(None, sources=sources, streaming=True, shuffle_buffer_size=5)
    first = rows_of(data.train)
    assert first == rows_of(data.train)
    assert first != rows_of(data.train, epoch=2)
    assert counts(first)["b"] == 10
    assert 0 < counts(first)["a"] < 15
    assert "75.0% come from" in caplog.text
    after = [example.sample_id for row in data.train.order(0, 1, start=5) for example in row]
    assert after == [example.sample_id for row in data.train.order(0, 1) for example in row][5:]
    everything = load(None, sources=sources, streaming=True, stopping_strategy="all_exhausted")
    assert counts(rows_of(everything.train))["a"] == 30


def test_draws_come_as_often_as_their_probability_says():
    streams = [lambda word=word: iter([word] * 100_000) for word in "ab"]
    endless = drawn(streams, [0.2, 0.8], np.random.default_rng(0), stopping_strategy="first_exhausted")
    words = list(islice(endless, 4000))
    assert words.count("a") == pytest.approx(800, abs=80)


BROKEN = {
    "a path as well": (
        {"path": "a.jsonl", "sources": [{"path": "b.jsonl"}]},
        "takes the place of data.path, got a.jsonl",
    ),
    "no source": ({"sources": []}, "at least one source, got an empty list"),
    "no path": ({"sources": [{"split": "x"}]}, r"data\.sources\[0\]\.path names the source, got None"),
    "one weight": ({"sources": [{"path": "a", "weight": 1}, {"path": "b"}]}, "a weight or none, got 1 of 2"),
    "no weight": (
        {"sources": [{"path": "a", "weight": 0}]},
        r"data\.sources\[0\]\.weight is above 0 and at most 1e\+09, got 0\.",
    ),
    "never": (
        {"sources": [{"path": "a", "repeats": 0}]},
        r"data\.sources\[0\]\.repeats is from 1 to 10,000, got 0",
    ),
    "both": ({"sources": [{"path": "a", "repeats": 2, "weight": 1}]}, "both weight=1 and repeats=2"),
    "no sample": (
        {"sources": [{"path": "a", "max_samples": 0}]},
        r"data\.sources\[0\]\.max_samples is at least 1",
    ),
    "a stream without weights": (
        {"streaming": True, "sources": [{"path": "a"}, {"path": "b"}]},
        "needs a weight for each",
    ),
    "a repeated stream": ({"streaming": True, "sources": [{"path": "a", "repeats": 2}]}, "Use weight"),
    "no weights to stop": (
        {"path": "a", "stopping_strategy": "all_exhausted"},
        "no source of data.sources has a weight",
    ),
}


@pytest.mark.parametrize("config,words", BROKEN.values(), ids=BROKEN)
def test_what_sources_cannot_be_is_said(config, words, load):
    with pytest.raises(DataError, match=words):
        load(config.pop("path", None), **config)


def test_a_stream_of_paths_with_commas_needs_weights(files, load):
    with pytest.raises(DataError, match="draws each example from one of 2 sources"):
        load(f"{files['a']},{files['b']}", streaming=True)


def test_an_error_about_a_source_names_its_own_keys(files, load, write_jsonl):
    other = write_jsonl([{"question": "q", "answer": "a"}], "c.jsonl")
    config = {"sources": [{"path": files["a"]}, {"path": other}]}
    words = r"data\.sources\[1\]\.prompt_column=question data\.sources\[1\]\.completion_column=answer"
    for check in (lambda: load(None, **config), lambda: check_small_local_data(DataConfig(**config))):
        with pytest.raises(DataError, match=words):
            check()
    with pytest.raises(DataError, match=r"data\.sources\[1\]\.path names a file that does not exist"):
        load(None, sources=[{"path": files["a"]}, {"path": other + "l.jsonl"}])


def test_sources_have_different_names():
    paths = ["x/chats.jsonl.gz", "org/chats", "some folder/*.jsonl", "chats_2.csv", "*.txt"]
    config = DataConfig(sources=[{"path": path} for path in paths])
    assert [one.name for one in listed_sources(config)] == [
        "chats",
        "chats_2",
        "some_folder",
        "chats_2_2",
        "data",
    ]


def test_the_fingerprint_is_of_what_is_read_not_of_where_it_is(files, load, write_jsonl):
    rows = [{"prompt": f"a {n}", "completion": " one"} for n in range(30)]
    moved, edited = write_jsonl(rows, "moved.jsonl"), write_jsonl([*rows[:-1], rows[0]], "edited.jsonl")
    for streaming in (False, True):
        prints = [load(path, streaming=streaming).fingerprint for path in (files["a"], moved, edited)]
        assert prints[0] == prints[1] != prints[2]

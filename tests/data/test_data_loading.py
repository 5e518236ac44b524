"""From a file to examples: what is learnt, cut, left out, held out and counted."""

import logging

import numpy as np
import pytest

from lowmem_ft.data.config import DataConfig
from lowmem_ft.data.text import tokenizing
from lowmem_ft.data.text.summary import Outcome
from lowmem_ft.foundation.errors import DataError


def qa_rows(count=20):
    return [{"question": f"What is {i} and {i}?", "answer": f" {2 * i}."} for i in range(count)]


QA = {"prompt_column": "question", "completion_column": "answer"}


def learnt_text(example, tokenizer):
    return tokenizer.decode(example.labels_T[example.labels_T != -100].tolist())


def test_gsm8k_shaped_files_learn_answer_and_eos(write_jsonl, load, make_tokenizer, all_examples):
    data = load(write_jsonl(qa_rows()), **QA)
    (example,) = all_examples(data.train)[7]
    tokenizer = make_tokenizer()
    assert tokenizer.decode(example.input_ids_T.tolist()) == "What is 7 and 7? 14.<|im_end|>"
    assert learnt_text(example, tokenizer) == " 14.<|im_end|>"


def test_every_first_token_is_without_a_label(write_jsonl, load, all_examples):
    data = load(write_jsonl(qa_rows()), loss_on="all", **QA)
    found = all_examples(data.train)
    assert len(found) == 20
    for (example,) in found.values():
        assert example.labels_T[0] == -100
        assert np.array_equal(example.labels_T[1:], example.input_ids_T[1:])


def test_an_eos_that_is_also_pad_is_learnt_at_the_end_of_an_answer(write_jsonl, load, make_tokenizer):
    tokenizer = make_tokenizer(pad=None)
    chats = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho" * n}] for n in (1, 9)]
    data = load(write_jsonl([{"messages": chat} for chat in chats]), tokenizer=tokenizer)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    batch = data.collate([data.train.read(0), data.train.read(1)])
    for row, num_tokens in zip(batch.labels_BT, data.train.row_lengths, strict=True):
        learnt = row[row != -100]
        assert learnt[-1] == tokenizer.eos_token_id
        assert (row[num_tokens:] == -100).all()


def test_a_tokenizer_without_pad_and_eos_is_an_error(write_jsonl, load, make_tokenizer):
    with pytest.raises(DataError, match="pad_token=None and eos_token=None"):
        load(write_jsonl(qa_rows()), tokenizer=make_tokenizer(pad=None, eos=None), **QA)


def test_a_tokenizer_without_a_template_gets_chatml_for_chats_only(write_jsonl, load, make_tokenizer, caplog):
    caplog.set_level(logging.INFO)
    tokenizer = make_tokenizer(chat_template=None, eos="<|endoftext|>")
    size = len(tokenizer)
    load(write_jsonl(qa_rows()), tokenizer=tokenizer, **QA)
    assert tokenizer.chat_template is None
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    data = load(write_jsonl([{"messages": chat}], "chat.jsonl"), tokenizer=tokenizer)
    assert "Chat template: ChatML, because the tokenizer has no template" in caplog.text
    assert len(tokenizer) == size
    assert learnt_text(data.train.head(1)[0], tokenizer) == "Ho<|im_end|><|endoftext|>"


def test_alpaca_files_are_chats_with_a_template_and_plain_text_without(write_jsonl, load, make_tokenizer):
    path = write_jsonl(
        [{"instruction": "Sing.", "input": None, "output": "La"}, {"instruction": "a", "output": "b"}]
    )
    chat = load(path).train.head(1)[0]
    assert make_tokenizer().decode(chat.input_ids_T.tolist()).startswith("<|im_start|>user\nSing.<|im_end|>")
    bare = make_tokenizer(chat_template=None)
    plain = load(path, tokenizer=bare).train.head(1)[0]
    assert bare.decode(plain.input_ids_T.tolist()).startswith("Below is an instruction")
    assert learnt_text(chat, bare) == learnt_text(plain, bare) == "La<|im_end|>"


def test_a_chat_template_from_a_file_replaces_the_tokenizers(write_jsonl, load, make_tokenizer, tmp_path):
    (tmp_path / "template.jinja").write_text("{% for m in messages %}|{{ m['content'] }}{% endfor %}")
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    path = write_jsonl([{"messages": chat}])
    data = load(path, chat_template=str(tmp_path / "template.jinja"))
    assert make_tokenizer().decode(data.train.head(1)[0].input_ids_T.tolist()) == "|Hi|Ho"


def test_answers_cut_off_are_dropped_counted_and_reported(write_jsonl, load, caplog, all_examples):
    caplog.set_level(logging.INFO)
    rows = [{"prompt": "one two three " * n, "completion": "four"} for n in (1, 1, 50)] + [
        {"prompt": "", "completion": "a"}
    ]
    data = load(write_jsonl(rows), max_length=32)
    assert sorted(all_examples(data.train)) == [0, 1]
    assert data.summary.dropped == {Outcome.EMPTY: 1, Outcome.ANSWER_CUT_OFF: 1}
    assert data.summary.num_cut == 1
    assert "left out 1 of 4 (25.0%): no label left within data.max_length" in caplog.text
    assert "left out 1 of 4 (25.0%): a field is empty" in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
def test_blank_lines_of_a_text_file_are_no_rows(tmp_path, load, caplog, all_examples, streaming):
    (tmp_path / "prose.txt").write_text("\n\none two\n \n" + "\n" * 1200 + "three four\n\n")
    data = load(str(tmp_path / "prose.txt"), streaming=streaming, shuffle=False)
    assert len(all_examples(data.train)) == 2
    assert "is empty" not in caplog.text
    if data.summary is not None:
        assert data.summary.outcomes == {Outcome.KEPT: 2}
    (tmp_path / "blank.txt").write_text("\n \n\n")
    with pytest.raises(DataError, match="no example"):
        load(str(tmp_path / "blank.txt"), streaming=streaming)


def answers(*num_words: int) -> list[dict[str, str]]:
    """Pairs whose completions have so many words of two tokens; with the prompt and EOS, two tokens more."""
    return [{"prompt": "one", "completion": " one" * num} for num in num_words]


def warnings_of(caplog) -> list[str]:
    """What was warned of, except that rows are copies: rows here are as few and as alike as a test needs."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and record.name != "lowmem_ft.data.repeated_rows"
    ]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_answers_that_many_examples_lose_are_a_warning_with_the_length_that_holds_them(
    write_jsonl, load, all_examples, caplog, streaming, packing
):
    path = write_jsonl(answers(*range(2, 40, 2), 99))  # 19 of 6 to 78 tokens, and one of 200
    caplog.set_level(logging.INFO)
    data = load(path, max_length=32, streaming=streaming, packing=packing)
    all_examples(data.train)
    (warning,) = [message for message in warnings_of(caplog) if "cuts the answers" in message]
    assert "data.max_length=32 cuts the answers of 13 of 20 (65.0%)" in warning
    assert "data.max_length=80 keeps 95% of the examples whole (longest: 200)" in warning
    caplog.clear()
    all_examples(load(path, max_length=80, streaming=streaming, packing=packing).train)
    assert warnings_of(caplog) == []  # one of 20 is no more than 5%
    assert "truncated 1 of 20 (5.0%) at data.max_length" in caplog.text


def test_the_length_that_is_suggested_is_one_that_the_model_takes(write_jsonl, load, caplog):
    load(write_jsonl(answers(1, 20, 70, 80)), max_length=32, max_positions=64)
    (warning,) = warnings_of(caplog)
    assert "cuts the answers of 3 of 4 (75.0%)" in warning
    assert (
        "the model takes at most 64 tokens, enough for 50.0% of the examples; shorten the other ones"
    ) in warning


def test_a_stream_is_judged_while_it_runs(write_jsonl, load, caplog):
    data = load(write_jsonl(answers(*[90] * 600)), max_length=32, streaming=True, shuffle=False)
    rows = data.train.order(0, 0)
    for _ in range(300):
        next(rows)
    (warning,) = warnings_of(caplog)
    assert "the first 256: data.max_length=32 cuts the answers of 256 of 256 (100.0%)" in warning
    list(rows)
    list(data.train.order(0, 1))
    assert len(warnings_of(caplog)) == 1


def test_documents_that_are_split_and_cut_prompts_with_their_answer_lose_nothing(write_jsonl, load, caplog):
    load(write_jsonl([{"text": "one " * 200}] * 3), max_length=32)
    load(write_jsonl([{"prompt": "one", "completion": " two"}] * 3), max_length=32)
    assert warnings_of(caplog) == []


def test_examples_left_out_are_a_warning_beyond_a_twentieth(write_jsonl, load, caplog):
    rows = [{"text": "one two"}] * 19 + [{"text": ""}]
    load(write_jsonl(rows))
    assert warnings_of(caplog) == []
    load(write_jsonl([*rows, {"text": ""}]))
    (warning,) = warnings_of(caplog)
    assert "left out 2 of 21 (9.5%): a field is empty" in warning


@pytest.mark.parametrize("streaming", [False, True])
def test_nothing_left_to_learn_stops_the_run_with_the_reason(write_jsonl, load, streaming):
    path = write_jsonl([{"prompt": "one two three " * 50, "completion": "four"}] * 3)
    with pytest.raises(DataError, match=r"Nothing is left to learn from .*3 with no label left within"):
        load(path, max_length=32, streaming=streaming)


def test_chats_without_an_answer_are_counted(write_jsonl, load):
    chat = [{"role": "user", "content": "Hi"}]
    rows = [{"messages": chat}, {"messages": [*chat, {"role": "assistant", "content": "Ho"}]}]
    assert load(write_jsonl(rows)).summary.dropped == {Outcome.NO_ANSWER: 1}


def test_max_length_beyond_the_models_is_an_error(write_jsonl, load):
    with pytest.raises(
        DataError, match=r"data\.max_length .* 128 tokens, got 256\. Set data\.max_length=128"
    ):
        load(write_jsonl(qa_rows()), max_positions=128, max_length=256, **QA)


def test_max_length_null_is_the_models_limit(write_jsonl, load):
    assert load(write_jsonl(qa_rows()), max_positions=11, max_length=None, **QA).summary.longest == 11


def test_long_documents_are_split_and_nothing_of_them_is_lost(
    write_jsonl, load, make_tokenizer, all_examples
):
    texts = ["one two three four five " * n for n in (1, 30)]
    data = load(write_jsonl([{"text": text} for text in texts]), max_length=32)
    tokenizer = make_tokenizer()
    for sample_id, pieces in sorted(all_examples(load_in_order(load, write_jsonl, texts)).items()):
        ids = np.concatenate([piece.input_ids_T for piece in pieces])
        assert ids.tolist() == [*tokenizer(texts[sample_id])["input_ids"], tokenizer.eos_token_id]
    assert data.summary.num_cut == 1
    assert data.summary.longest == 32


def load_in_order(load, write_jsonl, texts):
    return load(write_jsonl([{"text": text} for text in texts]), max_length=32, shuffle=False).train


@pytest.mark.parametrize("text", ["ab " * 20 + "z" * 41, "z" * 41 + " ab" * 20])
def test_a_word_without_an_end_is_named_and_long_texts_of_words_are_not(write_jsonl, load, monkeypatch, text):
    monkeypatch.setattr(tokenizing, "MOST_CHARS_OF_WORD", 40)
    load(write_jsonl([{"text": text.replace("z" * 41, "z" * 40)}]))
    with pytest.raises(
        DataError, match=r"Example 1 of .*: it holds a word of 41 characters, beginning with 'zzz"
    ):
        load(write_jsonl([{"text": "fine"}, {"text": text}]))


@pytest.mark.parametrize(
    "text", ["[0,1,22,333]" * 20, "\u4f60\u597d\uff0c\u4e16\u754c\u3002" * 20, "a-b_c/d+e" * 20]
)
def test_text_without_blanks_is_no_word(write_jsonl, load, monkeypatch, text):
    monkeypatch.setattr(tokenizing, "MOST_CHARS_OF_WORD", 40)
    assert load(write_jsonl([{"text": text}])).summary.num_tokens > len(text) / 10


def test_held_out_examples_are_not_trained_on(write_jsonl, load, all_examples):
    path = write_jsonl(qa_rows())
    for size, count in ((5, 5), (0.25, 5)):
        data = load(path, eval_size=size, **QA)
        held_out, trained = all_examples(data.evaluation), all_examples(data.train)
        assert len(held_out) == count
        assert sorted([*held_out, *trained]) == list(range(20))
    assert sorted(all_examples(load(path, eval_size=5, seed=1, **QA).evaluation)) != sorted(held_out)


def test_held_out_data_may_lie_elsewhere_and_keeps_its_order(write_jsonl, load):
    held_out = write_jsonl(qa_rows(4), "held_out.jsonl")
    data = load(write_jsonl(qa_rows()), eval_path=held_out, **QA)
    assert [data.evaluation.read(i)[0].sample_id for i in data.evaluation.order(0, 0)] == [0, 1, 2, 3]
    assert data.evaluation_summary.num_examples == 4


def test_max_samples_takes_the_first(write_jsonl, load, all_examples):
    path = write_jsonl(qa_rows())
    assert sorted(all_examples(load(path, max_samples=3, **QA).train)) == [0, 1, 2]
    assert load(path, max_samples=300, **QA).summary.num_examples == 20
    assert sorted(all_examples(load(path, max_samples=3, streaming=True, **QA).train)) == [0, 1, 2]


def test_tokenizing_twice_reads_the_cache_and_other_settings_do_not(write_jsonl, load, monkeypatch):
    path = write_jsonl(qa_rows())
    load(path, **QA)

    def fail(*_):
        raise AssertionError("tokenized again")

    monkeypatch.setattr("lowmem_ft.data.text.tokenizing.Tokenization.__call__", fail)
    load(path, **QA)
    with pytest.raises(AssertionError, match="tokenized again"):
        load(path, max_length=100, **QA)


def test_several_processes_tokenize_the_same(write_jsonl, load, all_examples):
    path = write_jsonl(qa_rows())
    one, two = load(path, **QA), load(path, num_proc=2, max_length=1000, **QA)
    assert one.summary == two.summary
    assert all(
        np.array_equal(one.train.read(i)[0].labels_T, two.train.read(i)[0].labels_T) for i in range(20)
    )


def test_streaming_gives_the_same_examples(write_jsonl, load, all_examples):
    path = write_jsonl(qa_rows(200))
    mapped, streamed = (
        all_examples(load(path, **QA).train),
        all_examples(load(path, streaming=True, **QA).train),
    )
    assert sorted(mapped) == sorted(streamed) == list(range(200))
    for sample_id in mapped:
        assert np.array_equal(mapped[sample_id][0].labels_T, streamed[sample_id][0].labels_T)


def test_packed_rows_hold_every_example_once(write_jsonl, load, all_examples):
    path = write_jsonl(qa_rows(50))
    data = load(path, packing=True, max_length=64, **QA)
    assert sorted(all_examples(data.train)) == list(range(50))
    assert data.train.num_rows == data.summary.num_rows < 50
    assert data.train.row_lengths.max() <= 64
    assert data.summary.packing_efficiency == data.summary.num_tokens / (data.train.num_rows * 64)
    streamed = load(path, packing=True, max_length=64, streaming=True, **QA)
    assert sorted(all_examples(streamed.train)) == list(range(50))
    with pytest.raises(DataError, match=r"data\.packing needs a row length"):
        load(path, packing=True, max_length=None, max_positions=None, **QA)


def test_the_log_shows_an_example_with_its_learnt_part(write_jsonl, load, caplog):
    caplog.set_level(logging.INFO)
    load(write_jsonl(qa_rows()), **QA)
    assert "What is 0 and 0?⟦ 0.<|im_end|>⟧" in caplog.text


def test_all_contradictions_in_the_configuration_are_reported_at_once():
    problems = DataConfig(
        streaming=True,
        group_by_length=True,
        packing=True,
        max_length=1,
        eval_size=-1,
        eval_split="test",
        num_proc=2,
    ).problems()
    assert len(list(problems)) == 7
    assert list(DataConfig().problems()) == []


@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_that_is_not_utf8_is_named_by_its_file(tmp_path, load, streaming):
    (tmp_path / "data.jsonl").write_bytes('{"prompt": "Grüße", "completion": "b"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"data\.jsonl is not UTF-8 text"):
        load(tmp_path / "data.jsonl", streaming=streaming)


def test_tokens_that_the_model_has_no_embedding_for_are_refused(write_jsonl, load):
    path = write_jsonl([{"prompt": "a", "completion": " b"}])
    load(path, vocab_size=400)
    with pytest.raises(DataError, match=r"Example 0 of .* has embeddings for ids below 10 only"):
        load(path, vocab_size=10)
    with pytest.raises(DataError, match=r"The pad token '<.pad.>' has the id 3,"):
        load(path, vocab_size=3)

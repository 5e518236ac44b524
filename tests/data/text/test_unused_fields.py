"""What other tools' files say and the model does not see: told with its count, refused where it would be wrong."""

from __future__ import annotations

import json
import logging

import pytest

from lowmem_ft.data import early_checks
from lowmem_ft.data.config import DataConfig
from lowmem_ft.foundation.errors import DataError

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
SHARE_GPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
PAIR = {"prompt": "Hi", "completion": " Ho"}
ALPACA = {"instruction": "Hi", "output": "Ho"}
TOOL = {"type": "function", "function": {"name": "look_up"}}
DESCRIBED = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": 'Looks for a "word",\nand says what it means.',
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
WRITES_ALL = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
ROLES_ALONE = (
    "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
)


def chat(**of_the_answer):
    return [CHAT[0], CHAT[1] | of_the_answer]


TOLD = {
    "a weight in messages that are JSON text": (
        {"messages": json.dumps(CHAT)},
        {"messages": json.dumps(chat(weight=0.5))},
        "`weight` in a message that is neither 0 nor 1",
    ),
    "TRL: tools": (
        {"messages": CHAT},
        {"tools": [TOOL]},
        "`tools` or `functions`, but the model does not see",
    ),
    "TRL: tools as text": ({"messages": CHAT}, {"tools": json.dumps([TOOL])}, "`tools` or `functions`"),
    "TRL: tools whose name a question has": (
        {"messages": [{"role": "user", "content": "Can you look_up it?"}, CHAT[1]]},
        {
            "tools": [
                {"type": "function", "function": {"name": "look_up", "description": "Search the index."}}
            ]
        },
        "`tools` or `functions`",
    ),
    "TRL: tools whose name a question has, by their parameters": (
        {"messages": [{"role": "user", "content": "Can you look_up it?"}, CHAT[1]]},
        {
            "tools": [
                {"function": {"name": "look_up", "parameters": {"properties": {"word": {"type": "string"}}}}}
            ]
        },
        "`tools` or `functions`",
    ),
    "TRL: options of the template": (
        {"messages": CHAT},
        {"chat_template_kwargs": {"enable_thinking": False}},
        "`chat_template_kwargs`, which the chat template is not given",
    ),
    "TRL: thinking": (
        {"messages": chat()},
        {"messages": chat(thinking="Hm")},
        "in a message, which the chat template",
    ),
    "strings: system": (
        PAIR,
        {"system": "Be brief."},
        "or the rows are plain strings. Put it into the prompt",
    ),
    "strings: history": (PAIR, {"history": [["a", "b"]]}, "does not see all of the earlier turns"),
    "OpenAI: functions": ({"messages": CHAT}, {"functions": [TOOL["function"]]}, "`tools` or `functions`"),
    "DeepSeek, Qwen: reasoning": (
        {"messages": CHAT},
        {"messages": chat(reasoning_content="Hm")},
        "neither sees nor learns it. Set data.chat_template",
    ),
    "a weight between": ({"messages": CHAT}, {"messages": chat(weight=0.5)}, "is neither 0 nor 1"),
    "ShareGPT: system": (
        {"conversations": [{"from": "system", "value": "Be kind."}, *SHARE_GPT]},
        {"system": "Be brief."},
        "the chat has a system message of its own",
    ),
    "Alpaca: reasoning": (ALPACA, {"reasoning": "Hm"}, "neither sees nor learns: the chat template"),
    "axolotl: parts of turns": (
        {"messages": CHAT},
        {"messages": chat(train_detail=[{"begin_offset": 0, "end_offset": 1, "train": True}])},
        "turns are learnt whole",
    ),
    "examples of some weight": (PAIR, {"weight": 0.5}, "every learnt token counts the same"),
    "reasoning as a column": (PAIR, {"thinking": "Hm"}, "Write it into the answer"),
}


def warnings_of(caplog):
    """What was warned of, except that rows are copies: rows here are as few and as alike as a test needs."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and record.name != "lowmem_ft.data.repeated_rows"
    ]


@pytest.mark.parametrize("of_all,of_some,words", TOLD.values(), ids=TOLD)
def test_a_field_that_is_not_used_is_told_with_its_count(of_all, of_some, words, write_jsonl, load, caplog):
    caplog.set_level(logging.INFO)
    rows = [of_all] * 6 + [of_all | of_some] * 2
    load(write_jsonl(rows))
    (told,) = warnings_of(caplog)
    assert "2 of 8 (25.0%) have `" in told
    assert words in told
    assert [line for line in caplog.messages if line.startswith("Example 6, the first with a field that the")]


@pytest.mark.parametrize("of_all,of_some,words", TOLD.values(), ids=TOLD)
def test_a_field_that_says_nothing_is_not_told(of_all, of_some, words, write_jsonl, load, caplog):
    """Arrow gives every row, and every message, the fields of all others."""
    nothing = {key: of_all.get(key) for key in of_some}
    load(write_jsonl([of_all, of_all | nothing]))
    assert warnings_of(caplog) == []


def test_a_stream_tells_them_too(write_jsonl, load, caplog, all_examples):
    caplog.set_level(logging.INFO)
    data = load(write_jsonl([PAIR] * 5 + [PAIR | {"history": [["a", "b"]]}] * 300), streaming=True)
    list(data.train.order(seed=0, epoch=0))
    assert any("`history`, but the model" in told for told in warnings_of(caplog))
    (shown,) = [line for line in caplog.messages if "the first with a field" in line]
    assert shown.startswith("Example 5,")


def test_counts_come_from_the_cache_too(write_jsonl, load, caplog):
    path = write_jsonl([PAIR | {"history": [["a", "b"]]}] * 3)
    load(path)
    caplog.clear()
    load(path)
    assert any("3 of 3 (100.0%) have `history`" in told for told in warnings_of(caplog))


USED = {
    "reasoning": {"messages": chat(reasoning_content="Hm")},
    "thinking": {"messages": chat(thinking=" Hm\n")},
    "ShareGPT: system": {"conversations": SHARE_GPT, "system": "Be brief."},
    "ShareGPT: tools": {"conversations": SHARE_GPT, "tools": json.dumps([TOOL["function"]])},
    "OpenAI: tools": {"messages": CHAT, "tools": [DESCRIBED]},
    "TRL: tools": {"prompt": CHAT[:1], "completion": CHAT[1:], "tools": [TOOL]},
    "Alpaca": ALPACA | {"history": [["a", "b"]], "system": "Be brief.", "thinking": "Hm", "tools": [TOOL]},
}


@pytest.mark.parametrize("row", USED.values(), ids=USED)
def test_what_the_template_writes_is_used(row, write_jsonl, load, caplog, make_tokenizer):
    caplog.set_level(logging.INFO)
    path = write_jsonl([row])
    data = load(path, tokenizer=make_tokenizer(chat_template=WRITES_ALL))
    assert warnings_of(caplog) == []
    assert "Not used from" not in caplog.text
    text = make_tokenizer().decode(data.train.head(1)[0].input_ids_T.tolist())
    wanted = [word for word in ("Hm", "Be brief.", "look_up") if word in json.dumps(row)]
    assert wanted
    assert all(word in text for word in wanted)
    load(path, tokenizer=make_tokenizer(chat_template=ROLES_ALONE))
    assert warnings_of(caplog) != []


def test_a_column_that_is_read_under_another_name_is_used(write_jsonl, load, caplog):
    load(
        write_jsonl([{"system": "Hi", "history": "Ho"}]), prompt_column="system", completion_column="history"
    )
    assert warnings_of(caplog) == []


def test_raw_text_may_have_any_column(write_jsonl, load, caplog):
    load(write_jsonl([{"text": "Hi there", "label": False, "weight": 0, "system": "x"}]))
    assert warnings_of(caplog) == []


def test_columns_and_keys_that_nobody_knows_are_listed_once(write_jsonl, load, caplog):
    caplog.set_level(logging.INFO)
    load(write_jsonl([{"id": n, "source": "web", "messages": chat(stamp=n)} for n in range(3)]))
    (line,) = [told for told in caplog.messages if told.startswith("Not used from ")]
    assert line.endswith("(train): id, source; in messages stamp.")


KTO = [PAIR | {"label": True}] * 3 + [PAIR | {"label": False}]
REFUSED = {
    "KTO": (KTO, {}, r"Example 0 of .*label=true judges the answer.*TRL's KTOTrainer"),
    "KTO by numbers": ([PAIR | {"label": 1}], {}, "label=1 judges"),
    "KTO in words": ([PAIR | {"label": "False"}], {}, "label=false judges"),
    "LLaMA-Factory's KTO": ([{"conversations": SHARE_GPT, "kto_tag": False}], {}, "kto_tag=false judges"),
    "Alpaca's KTO": ([ALPACA | {"kto_tag": False}], {}, "kto_tag=false judges"),
    "TRL's images": (
        [{"messages": CHAT, "images": []}, {"messages": CHAT, "images": ["a.png"]}],
        {},
        r"Example 1 of .*trains on text, got a row with images.*Leave those rows out",
    ),
    "LLaMA-Factory's videos": ([ALPACA | {"videos": ["a.mp4"]}], {}, "got a row with videos"),
    "an image in a message": (
        [
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]},
                    CHAT[1],
                ]
            }
        ],
        {},
        r"Example 0 of .*trains on text, got a message with a part of type 'image'.*Leave those chats out",
    ),
}


@pytest.mark.parametrize("rows,config,words", REFUSED.values(), ids=REFUSED)
def test_a_row_that_must_not_be_learnt_is_refused(rows, config, words, write_jsonl, load):
    path = write_jsonl(rows)
    with pytest.raises(DataError, match=words):
        early_checks.check_small_local_data(DataConfig(path=path, **config))
    with pytest.raises(DataError, match=words):
        load(path, **config)


@pytest.mark.parametrize(
    "row", [PAIR | {"label": "sports"}, PAIR | {"label": 3}, {"messages": CHAT, "label": 1}]
)
def test_a_label_that_judges_nothing_passes(row, write_jsonl, load, caplog):
    path = write_jsonl([row])
    early_checks.check_small_local_data(DataConfig(path=path))
    load(path)
    assert warnings_of(caplog) == []

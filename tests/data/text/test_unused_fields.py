"""What other tools' files say and training here does not use: told with its count, refused where it would be wrong."""

from __future__ import annotations

import logging

import pytest

from lowmem_ft.data.config import DataConfig
from lowmem_ft.data.sources import early_checks
from lowmem_ft.data.text.unused_fields import ALL, fields_of
from lowmem_ft.foundation.errors import DataError

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
SHARE_GPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
PAIR = {"prompt": "Hi", "completion": " Ho"}
ALPACA = {"instruction": "Hi", "output": "Ho"}
TOOL = {"type": "function", "function": {"name": "look_up"}}


def chat(**of_the_answer):
    return [CHAT[0], CHAT[1] | of_the_answer]


TOLD = {
    "TRL: tools": (
        {"messages": CHAT},
        {"tools": [TOOL]},
        "`tools` or `functions`, so the model does not see",
    ),
    "TRL: tools as text": ({"messages": CHAT}, {"tools": "[{}]"}, "`tools` or `functions`"),
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
    "KTO by numbers": (PAIR, PAIR | {"label": 0}, "If 0 marks a bad answer"),
    "OpenAI: tools": (
        {"messages": CHAT},
        {"tools": [TOOL], "parallel_tool_calls": False},
        "`tools` or `functions`",
    ),
    "OpenAI: functions": ({"messages": CHAT}, {"functions": [TOOL["function"]]}, "`tools` or `functions`"),
    "DeepSeek, Qwen: reasoning": (
        {"messages": CHAT},
        {"messages": chat(reasoning_content="Hm")},
        "neither sees nor learns it. Set data.chat_template",
    ),
    "a weight between": ({"messages": CHAT}, {"messages": chat(weight=0.5)}, "is neither 0 nor 1"),
    "ShareGPT: system": (
        {"conversations": SHARE_GPT},
        {"system": "Be brief."},
        "which the model does not see",
    ),
    "ShareGPT: tools": ({"conversations": SHARE_GPT}, {"tools": "[{}]"}, "`tools` or `functions`"),
    "Alpaca: history": (ALPACA, {"history": [["a", "b"]]}, "does not see the earlier turns"),
    "Alpaca: system": (ALPACA, {"system": "Be brief."}, "which the model does not see"),
    "axolotl: parts of turns": (
        {"messages": CHAT},
        {"messages": chat(train_detail=[{"begin_offset": 0, "end_offset": 1, "train": True}])},
        "turns are learnt whole",
    ),
    "examples of some weight": (PAIR, {"weight": 0.5}, "every learnt token counts the same"),
    "reasoning as a column": (PAIR, {"thinking": "Hm"}, "Write it into the answer"),
}


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("of_all,of_some,words", TOLD.values(), ids=TOLD)
def test_a_field_that_is_not_used_is_told_with_its_count(of_all, of_some, words, write_jsonl, load, caplog):
    caplog.set_level(logging.INFO)
    rows = [of_all] * 6 + [of_all | of_some] * 2
    load(write_jsonl(rows))
    (told,) = warnings_of(caplog)
    assert "2 of 8 (25.0%) have `" in told
    assert words in told


@pytest.mark.parametrize("of_all,of_some,words", TOLD.values(), ids=TOLD)
def test_a_field_that_says_nothing_is_not_told(of_all, of_some, words, write_jsonl, load, caplog):
    """Arrow gives every row, and every message, the fields of all others."""
    nothing = {key: of_all.get(key) for key in of_some}
    load(write_jsonl([of_all, of_all | nothing]))
    assert warnings_of(caplog) == []


def test_a_stream_tells_them_too(write_jsonl, load, caplog, all_examples):
    data = load(write_jsonl([ALPACA | {"history": [["a", "b"]]}] * 300), streaming=True)
    list(data.train.order(seed=0, epoch=0))
    assert any("`history`, so the model" in told for told in warnings_of(caplog))


def test_counts_come_from_the_cache_too(write_jsonl, load, caplog):
    path = write_jsonl([ALPACA | {"history": [["a", "b"]]}] * 3)
    load(path)
    caplog.clear()
    load(path)
    assert any("3 of 3 (100.0%) have `history`" in told for told in warnings_of(caplog))


def test_what_the_template_writes_is_used(write_jsonl, load, caplog, make_tokenizer):
    template = "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}<|im_end|>\n{% endfor %}"
    load(
        write_jsonl([{"messages": chat(reasoning_content="Hm")}]),
        tokenizer=make_tokenizer(chat_template=template),
        loss_on="all",
    )
    assert warnings_of(caplog) == []


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
    "KTO": (KTO, {}, r"Example 3 of .*label=false says that the answer is a bad one.*KTO"),
    "KTO in words": ([PAIR | {"label": "False"}], {}, "label=false says"),
    "KTO of chats": ([{"prompt": CHAT[:1], "completion": CHAT[1:], "label": False}], {}, "label=false says"),
    "LLaMA-Factory's KTO": ([{"conversations": SHARE_GPT, "kto_tag": False}], {}, "kto_tag=false says"),
    "Alpaca's KTO": ([ALPACA | {"kto_tag": False}], {}, "kto_tag=false says"),
    "OpenAI's weight": (
        [{"messages": chat(weight=0)}],
        {},
        r"Message 2 has weight: 0, which excludes it.*Remove the turn and those after it",
    ),
    "a turn before": (
        [{"messages": chat(weight=0) + chat(weight=1)}],
        {},
        r"Message 2 has weight: 0.*data\.loss_on=completion to learn only the last turn",
    ),
    "ms-swift's loss": ([{"messages": chat(loss=False)}], {}, "Message 2 has loss: false"),
    "axolotl's train": ([{"messages": chat(train=False)}], {}, "Message 2 has train: false"),
    "axolotl's training": ([{"messages": chat(training=False)}], {}, "Message 2 has training: false"),
    "ShareGPT's weight": (
        [{"conversations": [SHARE_GPT[0], SHARE_GPT[1] | {"weight": 0}]}],
        {},
        "Message 2 has",
    ),
    "a question, where all is learnt": (
        [{"messages": [CHAT[0] | {"weight": 0}, CHAT[1]]}],
        {"loss_on": "all"},
        r"Message 1 has weight: 0.*data\.loss_on=all",
    ),
    "a completion in messages": (
        [{"prompt": CHAT[:1], "completion": [CHAT[1] | {"weight": 0}, *CHAT]}],
        {},
        "Message 2 has weight: 0",
    ),
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
    "rows,config",
    [
        ([PAIR | {"label": True}], {}),
        ([{"messages": chat(weight=0) + chat(weight=1)}], {"loss_on": "completion"}),
        (
            [{"messages": [CHAT[0] | {"weight": 0, "train": False}, CHAT[1] | {"weight": 1, "train": True}]}],
            {},
        ),
        ([{"prompt": chat(weight=0) + CHAT[:1], "completion": CHAT[1:]}], {}),
    ],
)
def test_what_is_not_learnt_anyway_passes(rows, config, write_jsonl, load, caplog):
    path = write_jsonl(rows)
    early_checks.check_small_local_data(DataConfig(path=path, **config))
    load(path, **config)
    assert warnings_of(caplog) == []


def test_each_field_has_a_bit_of_its_own():
    assert [list(fields_of(1 << bit)) for bit in range(len(ALL))] == [[field] for field in ALL]
    assert len(ALL) <= 31  # of an int32

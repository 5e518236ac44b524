"""Formats are recognised from the columns, can be named, and say what is wrong with a row."""

import json

import pytest

from lowmem_ft.data.config import DataConfig
from lowmem_ft.data.text.examples import Chat, Completion, Document
from lowmem_ft.data.text.format_choice import choose_loss_on, recognise_format
from lowmem_ft.foundation.errors import DataError


def recognise(columns, *, has_chat_template=True, **config):
    return recognise_format(
        DataConfig(**config), columns, has_chat_template=has_chat_template, source="data.jsonl"
    )


@pytest.mark.parametrize(
    "columns, name",
    [
        (["id", "messages"], "messages"),
        (["conversations", "source"], "conversations"),
        (["prompt", "completion"], "prompt_completion"),
        (["instruction", "input", "output", "text"], "alpaca"),
        (["instruction", "output"], "alpaca"),
        (["text", "meta"], "text"),
        (["input_ids", "attention_mask", "labels"], "tokens"),
    ],
)
def test_the_columns_tell_the_format(columns, name):
    assert recognise(columns).name == name


def test_gsm8k_columns_need_only_their_names():
    fmt = recognise(["question", "answer"], prompt_column="question", completion_column="answer")
    assert fmt.read({"question": "1+1?", "answer": "2"}) == Completion("1+1?", "2")


def test_alpaca_takes_other_columns_too():
    fmt = recognise(["q", "a"], format="alpaca", prompt_column="q", completion_column="a")
    assert fmt.read({"q": "Hi", "a": "Ho"}).messages == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
    ]


def test_unknown_columns_list_what_was_seen_and_what_is_known():
    with pytest.raises(DataError) as caught:
        recognise(["q", "a"])
    message = str(caught.value)
    assert "Columns seen: q, a." in message
    for known in ("messages", "conversations", "prompt_completion", "alpaca", "text", "tokens"):
        assert known in message
    assert "data.prompt_column=question" in message


def test_share_gpt_and_openai_messages_are_the_same_chat():
    fmt = recognise(["conversations"])
    openai = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    share_gpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    assert fmt.read({"conversations": share_gpt}) == fmt.read({"conversations": openai}) == Chat(openai)


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_messages_in_a_cell_of_a_table_are_json_text(column):
    openai = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "[Ho]"}]
    fmt = recognise([column])
    assert fmt.read({column: json.dumps(openai)}) == fmt.read({column: openai}) == Chat(openai)
    assert fmt.read({column: " "}) is None
    assert fmt.read({column: "[]"}) is None


def test_keys_that_arrow_filled_with_null_are_left_out():
    message = {"role": "user", "content": "Hi", "tool_calls": None, "name": "Ann"}
    read = recognise(["messages"]).read({"messages": [message, {"role": "assistant", "content": "Ho"}]})
    assert read.messages[0] == {"role": "user", "content": "Hi", "name": "Ann"}


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert (
        recognise(["messages"])
        .read({"messages": [{"role": "user", "content": parts}]})
        .messages[0]["content"]
        == "Hi"
    )


def test_alpaca_becomes_a_chat_or_the_classic_prompt():
    row = {"instruction": "Add.", "input": "1 and 1", "output": "2"}
    chat = recognise(list(row)).read(row)
    assert chat.num_prompt_messages == 1
    assert chat.messages[0]["content"] == "Add.\n\n1 and 1"
    plain = recognise(list(row), has_chat_template=False).read(row)
    assert plain.prompt.endswith("### Instruction:\nAdd.\n\n### Input:\n1 and 1\n\n### Response:\n")
    assert plain.completion == "2"


@pytest.mark.parametrize("nothing", [{}, {"input": None}, {"input": ""}, {"input": " "}])
def test_alpaca_without_an_input(nothing):
    row = {"instruction": "Sing.", "output": "La", **nothing}
    assert recognise(list(row)).read(row).messages[0]["content"] == "Sing."
    assert "Input" not in recognise(list(row), has_chat_template=False).read(row).prompt


FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
WRAPPED = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize("has_chat_template", [True, False])
def test_alpacas_earlier_turns_and_system_prompt_come_before_its_question(has_chat_template):
    row = {
        "instruction": "c",
        "output": "d",
        "history": [["a", "b"]],
        "system": "Be brief.",
        "thinking": "Hm",
    }
    read = recognise(list(row), has_chat_template=has_chat_template).read(row)
    if not has_chat_template:
        before = "### Instruction:\na\n\n### Response:\nb\n\n"
        assert read == Completion(f"Be brief.\n\n{before}### Instruction:\nc\n\n### Response:\n", "d")
        return
    assert [message["content"] for message in read.messages] == ["Be brief.", "a", "b", "c", "d"]
    assert read.num_prompt_messages == 4
    assert read.messages[-1]["reasoning_content"] == "Hm"
    for nothing in (None, []):
        assert len(recognise(list(row)).read(row | {"history": nothing, "system": nothing}).messages) == 2


def test_a_system_column_is_for_chats_without_a_system_message_of_their_own():
    chat, own = [{"role": "user", "content": "Hi"}], {"role": "system", "content": "Be long."}
    fmt = recognise(["conversations", "system"], system_prompt="Be kind.")
    contents = [
        fmt.read({"conversations": messages, "system": system}).messages[0]["content"]
        for messages, system in ((chat, "Be brief."), ([own, *chat], "Be brief."), (chat, None))
    ]
    assert contents == ["Be brief.", "Be long.", "Be kind."]


@pytest.mark.parametrize(
    "tools",
    [[WRAPPED], [FUNCTION], json.dumps([FUNCTION]), json.dumps(WRAPPED), [FUNCTION | {"strict": None}]],
)
@pytest.mark.parametrize("column", ["tools", "functions"])
def test_tools_are_read_in_each_spelling(tools, column):
    chat = recognise(["messages"]).read({"messages": [{"role": "user", "content": "Hi"}], column: tools})
    assert chat.tools == [WRAPPED]


ARGUMENTS = {"city": "Paris"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{**CALL, "id": None}]},
        {
            "role": "assistant",
            "tool_calls": [{"function": CALL["function"] | {"arguments": '{"city": "Paris"}'}}],
        },
        {
            "role": "assistant",
            "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": ARGUMENTS | {"a": None}}}],
        },
        {"role": "assistant", "content": "", "function_call": CALL["function"], "tool_calls": []},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "tool_call", "value": json.dumps([CALL["function"]])},
    ],
)
def test_tool_calls_are_read_in_each_spelling(turn):
    turns = [{"from": "human", "value": "q"}, turn, {"from": "observation", "value": "Rain."}]
    chat = recognise(["conversations"]).read({"conversations": turns})
    _, called, answered = chat.messages
    assert (called["role"], called["content"]) == ("assistant", "")
    assert [call["function"] for call in called["tool_calls"]] == [CALL["function"]]
    assert "function_call" not in called
    assert answered == {"role": "tool", "content": "Rain."}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": None},
        {"messages": []},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]},
        {"prompt": "a", "completion": None},
        {"prompt": " ", "completion": "b"},
        {"prompt": [], "completion": [{"role": "assistant", "content": "b"}]},
        {"instruction": "a", "input": "b", "output": ""},
        {"text": "\n"},
    ],
)
def test_an_example_with_an_empty_field_is_none(row):
    assert recognise(list(row)).read(row) is None


@pytest.mark.parametrize(
    "row, problem",
    [
        ({"messages": "[1]"}, "messages is a list of messages"),
        (
            {"conversations": [{"from": "function_call", "value": "{}"}]},
            r"conversations: a tool call has a name and arguments, got '\{\}'\. Write it as",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "look up"}]},
            r"a tool call is JSON text, which cannot be read \(Expecting value\): 'look up'\. Correct it",
        ),
        (
            {"messages": [{"role": "user", "content": "Hi"}], "tools": "look_up"},
            "tools: a list of tools is JSON text, which cannot be read",
        ),
        (
            {"messages": [{"role": "user", "content": "Hi"}], "tools": ["look_up"]},
            r"tools is a list of tools, .*got \[",
        ),
        (
            {"instruction": "a", "output": "b", "history": [["only a question"]]},
            r"history is a list of \[question, answer\] pairs, got \[\['only",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "txt": "Hi"}]}]}, "is text, got list"),
        ({"messages": [{"role": "user", "says": "Hi"}]}, "got one with the keys role, says. Rename"),
    ],
)
def test_a_row_of_the_wrong_structure_is_an_error(row, problem):
    with pytest.raises(DataError, match=problem):
        recognise(list(row)).read(row)


def test_what_is_learnt_by_default_and_what_cannot_be():
    assert choose_loss_on(DataConfig(), recognise(["messages"])) == "assistant"
    assert choose_loss_on(DataConfig(), recognise(["conversations"])) == "assistant"
    assert choose_loss_on(DataConfig(), recognise(["prompt", "completion"])) == "completion"
    assert choose_loss_on(DataConfig(), recognise(["instruction", "output"])) == "completion"
    assert choose_loss_on(DataConfig(), recognise(["text"])) == "all"
    assert recognise(["text"]).read({"text": "a"}) == Document("a")


def test_preferences_are_refused_with_what_can_be_learnt_of_them():
    with pytest.raises(DataError, match=r"preferences.*TRL's DPOTrainer.*data\.completion_column=chosen\."):
        recognise(["prompt", "chosen", "rejected"])
    with pytest.raises(DataError, match=r"preferences.*data\.messages_column=chosen\."):
        recognise(["chosen", "rejected"])
    with pytest.raises(DataError, match=r"preferences.*append them to the conversations"):
        recognise(["conversations", "chosen", "rejected"])  # LLaMA-Factory's


def test_the_settings_that_an_unknown_format_suggests_read_it():
    with pytest.raises(DataError) as caught:
        recognise(["instruction", "context", "response", "category"])
    suggested = str(caught.value).split("`")[1]
    settings = dict(setting.removeprefix("data.").split("=") for setting in suggested.split())
    fmt = recognise(["instruction", "context", "response", "category"], **settings)
    chat = fmt.read({"instruction": "When?", "context": "In 2000.", "response": "2000"})
    assert [message["content"] for message in chat.messages] == ["When?\n\nIn 2000.", "2000"]


def test_roles_are_read_whatever_their_case():
    fmt = recognise(["conversations"])
    chat = fmt.read({"conversations": [{"from": "Human", "value": "q"}, {"from": "ChatGPT", "value": "a"}]})
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    "columns,kind",
    [
        (["input", "preferred_output", "non_preferred_output"], "holds preferences"),
        (["segments"], "axolotl's input_output"),
        (["contents"], "Google's format"),
    ],
)
def test_data_of_another_kind_is_called_by_it(columns, kind):
    with pytest.raises(DataError, match=kind):
        recognise(columns)

"""The learnt part of a chat is what the assistant has to say, whatever the template looks like."""

import pytest

from lowmem_ft.data.text.chat_templates import CHATML
from lowmem_ft.data.text.examples import Chat, Completion, Document
from lowmem_ft.data.text.masking import mark_learnt
from lowmem_ft.foundation.errors import DataError

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
MARKED_WITHOUT_END = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + UNMARKED
)
NO_GENERATION_PROMPT = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|im_end|>\n{% endfor %}"
LIKE_LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }} <|im_end|>"
    "{% else %}{{ raise_exception('System role not supported') }}{% endif %}{% endfor %}"
)
LIKE_DEEPSEEK_R1 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<User>{{ m['content'] }}"
    "{% else %}<Assistant>{{ m['content'].split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<Assistant><think>\n{% endif %}"
)
LIKE_QWEN_3 = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last and '<think>' not in m['content'] %}"
    "<think>\n\n</think>\n\n{% endif %}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LIKE_GPT_OSS = (
    "{% for m in messages %}<|start|>{{ m['role'] }}{% if m['role'] == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' and loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


TWO_TURNS = [user("Hi"), assistant("Ho"), user("Hi"), assistant("Ho ho")]


def learnt(
    messages, template, make_tokenizer, loss_on="assistant", num_prompt_messages=None, eos="<|im_end|>"
):
    tokenizer = make_tokenizer(chat_template=template, eos=eos)
    marked = mark_learnt(Chat(messages, num_prompt_messages), tokenizer, loss_on)
    return [marked.text[start:end] for start, end in marked.learnt]


@pytest.mark.parametrize("template", [MARKED, UNMARKED, MARKED_WITHOUT_END, DEFAULT_SYSTEM])
def test_every_answer_with_its_end_of_turn_is_learnt(template, make_tokenizer):
    assert learnt(TWO_TURNS, template, make_tokenizer) == ["Ho<|im_end|>", "Ho ho<|im_end|>"]


@pytest.mark.parametrize(
    "messages",
    [
        TWO_TURNS,
        [{"role": "system", "content": "Be brief."}, *TWO_TURNS],
        [assistant("I begin."), *TWO_TURNS],
        [user("Hi"), assistant("<b>Ho</b>\n"), user("?"), assistant("  indented")],
        [user("Hi"), assistant("Ho"), user("and nothing after")],
        [user("Hi"), assistant("é 你好 🙂"), user("🙂"), assistant("🙂")],
    ],
)
def test_generation_marks_and_rendered_prefixes_agree(messages, make_tokenizer):
    tokenizers = [make_tokenizer(chat_template=template) for template in (MARKED, UNMARKED)]
    by_marks, by_prefixes = (mark_learnt(Chat(messages), tokenizer, "assistant") for tokenizer in tokenizers)
    assert by_marks == by_prefixes
    assert len(by_marks.learnt) == sum(message["role"] == "assistant" for message in messages)


def test_completion_is_the_last_answer_or_what_follows_the_prompt(make_tokenizer):
    assert learnt(TWO_TURNS, UNMARKED, make_tokenizer, "completion") == ["Ho ho<|im_end|>"]
    after_prompt = learnt(TWO_TURNS, UNMARKED, make_tokenizer, "completion", num_prompt_messages=1)
    assert after_prompt == [
        "Ho<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo ho<|im_end|>"
    ]


def test_all_is_the_whole_chat(make_tokenizer):
    assert learnt(TWO_TURNS, UNMARKED, make_tokenizer, "all")[0].startswith("<|im_start|>user\nHi")


def test_a_chat_without_an_assistant_turn_marks_nothing(make_tokenizer):
    assert learnt([user("Hi")], UNMARKED, make_tokenizer) == []
    assert (
        learnt([*TWO_TURNS, user("Hi")], UNMARKED, make_tokenizer, "completion", num_prompt_messages=4) == []
    )


def test_templates_without_a_generation_prompt(make_tokenizer):
    turns = learnt(TWO_TURNS, NO_GENERATION_PROMPT, make_tokenizer)
    assert turns == ["[assistant]Ho<|im_end|>", "[assistant]Ho ho<|im_end|>"]
    assert learnt(TWO_TURNS, LIKE_LLAMA_2, make_tokenizer) == [" Ho <|im_end|>", " Ho ho <|im_end|>"]


def test_a_generation_prompt_that_the_chat_does_not_repeat(make_tokenizer):
    assert learnt(TWO_TURNS, LIKE_DEEPSEEK_R1, make_tokenizer) == ["Ho<|im_end|>", "Ho ho<|im_end|>"]


def test_a_template_that_writes_the_last_turn_otherwise(make_tokenizer):
    expected = ["Ho<|im_end|>", "<think>\n\n</think>\n\nHo ho<|im_end|>"]
    assert learnt(TWO_TURNS, LIKE_QWEN_3, make_tokenizer) == expected


def test_an_ending_that_only_history_has_is_not_learnt(make_tokenizer):
    expected = ["<|channel|>final<|message|>Ho", "<|channel|>final<|message|>Ho ho<|return|>"]
    assert learnt(TWO_TURNS, LIKE_GPT_OSS, make_tokenizer) == expected


def test_a_template_that_drops_part_of_an_answer_is_an_error_with_a_way_out(make_tokenizer):
    thinking = [user("Hi"), assistant("<think>hm</think>Ho"), user("Hi"), assistant("<think>ah</think>Ho ho")]
    with pytest.raises(DataError, match=r"rewrites .* message 2 .*data\.loss_on=completion"):
        learnt(thinking, LIKE_QWEN_3, make_tokenizer)
    last = learnt(thinking, LIKE_QWEN_3, make_tokenizer, "completion")
    assert last == ["<think>ah</think>Ho ho<|im_end|>"]


def test_a_template_that_refuses_a_role_is_an_error_with_its_reason(make_tokenizer):
    with pytest.raises(
        DataError, match=r"rejects a conversation with the roles system, user.*System role not supported"
    ):
        learnt([{"role": "system", "content": "Be."}, *TWO_TURNS], LIKE_LLAMA_2, make_tokenizer)


def test_marks_that_mark_nothing_are_an_error(make_tokenizer):
    empty = MARKED.replace(
        "{% generation %}{{ message['content'] }}<|im_end|>", "{{ message['content'] }}{% generation %}"
    )
    with pytest.raises(DataError, match="marks no answer, although the chat has an assistant turn"):
        learnt(TWO_TURNS, empty, make_tokenizer, eos="<|endoftext|>")


def test_default_chatml_ends_an_answer_with_the_tokenizers_own_eos(make_tokenizer):
    turns = learnt(TWO_TURNS, CHATML, make_tokenizer, eos="<|endoftext|>")
    assert turns == ["Ho<|im_end|><|endoftext|>", "Ho ho<|im_end|><|endoftext|>"]
    assert learnt(TWO_TURNS, CHATML, make_tokenizer) == ["Ho<|im_end|>", "Ho ho<|im_end|>"]


def test_strings_are_joined_as_they_are(make_tokenizer):
    tokenizer = make_tokenizer()
    marked = mark_learnt(Completion("1+1=", "2"), tokenizer, "completion")
    assert (marked.text, marked.learnt, marked.holds_special_tokens) == ("1+1=2", ((4, 5),), False)
    assert mark_learnt(Completion("1+1=", "2"), tokenizer, "all").learnt == ((0, 5),)
    assert mark_learnt(Document("text"), tokenizer, "all").learnt == ((0, 4),)
    with pytest.raises(DataError, match=r"data\.loss_on=assistant needs chats"):
        mark_learnt(Completion("1+1=", "2"), tokenizer, "assistant")


def test_tool_calls_that_the_template_leaves_out_are_not_learnt_as_empty_answers(make_tokenizer):
    tokenizer = make_tokenizer(chat_template=UNMARKED)
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    question = "How is the weather?"  # which has the name of the tool
    chat = Chat([user(question), assistant("") | {"tool_calls": [call]}])
    with pytest.raises(DataError, match="does not write the tool calls"):
        mark_learnt(chat, tokenizer, "assistant")
    tokenizer.chat_template = UNMARKED.replace(
        "{{ message['content'] }}",
        "{{ message['content'] }}{% for c in message.tool_calls %}{{ c.function.name }}{% endfor %}",
    )
    marked = mark_learnt(chat, tokenizer, "assistant")
    assert [marked.text[start:end] for start, end in marked.learnt] == ["weather<|im_end|>"]


def test_a_call_that_is_excluded_may_come_after_the_last_learnt_turn(make_tokenizer):
    call = {"function": {"name": "weather", "arguments": {}}}
    chat = [*TWO_TURNS, user("And?"), assistant("") | {"tool_calls": [call], "weight": 0}]
    template = UNMARKED.replace("{{ message['content'] }}", "{{ message['content'] ~ message.tool_calls }}")
    assert learnt(chat, template, make_tokenizer) == learnt(TWO_TURNS, template, make_tokenizer)


CALLS = "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ ARGUMENTS }}</call>{% endfor %}"
WITH_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    f"{{{{ m.content }}}}{CALLS}<|im_end|>\n{{% endfor %}}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKS_A_TOOL = [
    user("Weather?"),
    assistant("") | {"tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}]},
    {"role": "tool", "content": "Rain."},
    assistant("It rains."),
]


@pytest.mark.parametrize(
    "arguments", ["c.function.arguments | tojson", "'' + c.function.arguments", "c.function.arguments"]
)
def test_arguments_are_written_as_json_whichever_form_a_template_takes(arguments, make_tokenizer):
    """And a turn that calls a tool is learnt although the template writes it otherwise once others follow."""
    template = WITH_CALLS.replace("ARGUMENTS", arguments)
    call, answer = learnt(ASKS_A_TOOL, template, make_tokenizer)
    assert call == '<call>weather {"city": "Paris"}</call><|im_end|>'
    assert answer == "<think>\n\n</think>\n\nIt rains.<|im_end|>"


WEIGHTLESS = [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}]


@pytest.mark.parametrize("said", WEIGHTLESS)
@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_a_turn_without_weight_is_read_and_not_learnt(said, template, make_tokenizer):
    chat = [user("Hi"), assistant("Ho") | said, user("Hi"), assistant("Ho ho") | {"weight": 1, "train": True}]
    assert learnt(chat, template, make_tokenizer) == ["Ho ho<|im_end|>"]
    assert learnt([*chat, user("?"), assistant("Huh") | said], template, make_tokenizer) == [
        "Ho ho<|im_end|>"
    ]
    assert learnt(chat[:2], template, make_tokenizer) == []


def test_a_turn_without_weight_is_cut_out_of_what_is_learnt(make_tokenizer):
    chat = [user("Hi"), assistant("Ho") | {"weight": 0}, user("Hi") | {"weight": 0}, assistant("Ho ho")]
    kept = "".join(learnt(chat, UNMARKED, make_tokenizer, "all"))
    assert kept == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n\nHo ho<|im_end|>\n".replace(
        "assistant\n\nHo", "assistant\n\n<|im_start|>assistant\nHo"
    )
    assert learnt(chat, UNMARKED, make_tokenizer, "completion") == ["Ho ho<|im_end|>"]
    assert learnt([*chat, user("?"), chat[1]], UNMARKED, make_tokenizer, "completion") == []
    after_a_prompt = learnt(chat, UNMARKED, make_tokenizer, "completion", num_prompt_messages=1)
    assert after_a_prompt == ["\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo ho<|im_end|>"]


def test_marks_that_belong_to_no_turn_are_refused_where_a_turn_is_not_learnt(make_tokenizer):
    twice = MARKED.replace("{% generation %}", "{% generation %}:{% endgeneration %}{% generation %}")
    with pytest.raises(
        DataError, match=r"Message 2 is excluded from learning, but the chat template marks 4 parts"
    ):
        learnt([user("Hi"), assistant("Ho") | {"weight": 0}, *TWO_TURNS[2:]], twice, make_tokenizer)


def test_reasoning_is_learnt_where_the_template_writes_it(make_tokenizer):
    template = UNMARKED.replace(
        "{{ message['content'] }}", "{{ message.reasoning_content }}{{ message['content'] }}"
    )
    for name in ("reasoning_content", "thinking"):
        assert learnt([user("Hi"), assistant("Ho") | {name: "Hm. "}], template, make_tokenizer) == [
            "Hm. Ho<|im_end|>"
        ]


def test_the_template_is_given_the_tools(make_tokenizer):
    tokenizer = make_tokenizer(
        chat_template="{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + UNMARKED
    )
    tool = {"type": "function", "function": {"name": "weather"}}
    assert mark_learnt(Chat(TWO_TURNS, tools=[tool]), tokenizer, "assistant").text.startswith(
        "weather <|im_start|>"
    )

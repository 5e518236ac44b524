"""What a template makes of chats is checked: others' templates raise no alarm, each broken one raises its own."""

import importlib.util
import json
import logging
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from lowmem_ft.data.text.examples import Chat, Completion, Document
from lowmem_ft.data.text.masking import mark_learnt
from lowmem_ft.data.text.template_checks import _problems as template_problems
from lowmem_ft.foundation.errors import DataError

OF_TRL = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
"""The published templates that trl holds; those whose name ends in _training are its own."""

SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}"
    "{%- else %}{% set turns = messages %}{% endif %}{{ bos_token }}"
    "{%- for m in turns %}{% if m.role == 'user' %}[INST] {% if loop.last or loop.index0 == turns | length - 2 %}"
    "{% if system is defined %}{{ system }}\n\n{% endif %}{% endif %}{{ m.content }} [/INST]"
    "{%- else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
FAMILIES = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_training": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "llama3_training": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "gemma4": "<turn|> <|tool_response>",
    "gptoss": "<|return|> <|call|>",
    "gptoss_training": "<|return|> <|call|>",
    "phi3": "<|end|>",
    "phi3_5": "<|end|>",
}
"""Templates of trl, with the tokens at which their models stop: the tokenizer's EOS, and others."""

TEMPLATES = {
    "smollm2": (SMOLLM2, "<|im_end|>"),
    "mistral": (MISTRAL, "</s>"),
    **{
        name: ((OF_TRL / f"{name}.jinja").read_text("utf-8"), ends)
        for name, ends in FAMILIES.items()
        if (OF_TRL / f"{name}.jinja").exists()
    },
}


def said(role, content, **more):
    return {"role": role, "content": content, **more}


PAIR = [said("user", "Hi"), said("assistant", "Ho")]
SYSTEM = said("system", "Be brief.")
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Ulm"}}}
CHATS = {
    "pair": Chat(PAIR),
    "a prompt of its own": Chat(PAIR, 1),
    "system": Chat([SYSTEM, *PAIR]),
    "turns": Chat([*PAIR, *PAIR, *PAIR]),
    "system and turns": Chat([SYSTEM, *PAIR, *PAIR]),
    "a question after the last answer": Chat([*PAIR, PAIR[0]]),
    "odd words": Chat([said("user", " 🙂\n/no_think \n"), said("assistant", "\n  <b>Ho</b>\n")]),
    "a call": Chat([PAIR[0], said("assistant", "", tool_calls=[CALL])]),
    "a call and its result": Chat(
        [PAIR[0], said("assistant", "", tool_calls=[CALL]), said("tool", "1", name="weather"), PAIR[1]]
    ),
}


@pytest.fixture
def tokenizer_of(byte_level_bpe):
    def make(template, eos, bos="<s>", *, adds_bos=False):
        markers = re.findall(r"<\|?\w+\|?>", template)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(byte_level_bpe), eos_token=eos, bos_token=bos, pad_token=eos
        )
        tokenizer.add_tokens(sorted({*markers} - {"<b>"}), special_tokens=True)
        tokenizer.chat_template = template
        if adds_bos:
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
            )
        return tokenizer

    return make


def checks(examples, tokenizer, loss_on="assistant", ends=None):
    return [problem.check for problem in template_problems(examples, tokenizer, loss_on, ends)]


def test_enough_published_templates_are_here():
    assert len(TEMPLATES) >= 10


@pytest.mark.parametrize("name", TEMPLATES)
def test_published_templates_raise_no_alarm(name, tokenizer_of):
    template, ends = TEMPLATES[name]
    tokenizer = tokenizer_of(template, ends.split()[0])
    num_marked = 0
    for words, chat in CHATS.items():
        for loss_on in ("assistant", "completion", "all"):
            try:
                num_marked += bool(mark_learnt(chat, tokenizer, loss_on).learnt)
            except DataError:  # no alarm is due for what training refuses
                continue
            for known in (None, tokenizer.convert_tokens_to_ids(ends.split())):
                assert template_problems([chat], tokenizer, loss_on, known) == [], (words, loss_on)
    assert num_marked >= 9


CHATML = SMOLLM2.replace("You help.", "")
MARKED = CHATML.replace(
    "{{ m.content }}<|im_end|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}",
)
BROKEN = {
    "no end": (CHATML.replace("{{ m.content }}<|im_end|>", "{{ m.content }}"), ["end_of_turn"]),
    "an end outside the marks": (
        MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|end|>"),
        ["end_of_turn"],
    ),
    "an end that stops no generation": (CHATML.replace("}<|im_end|>", "}<|end|>"), ["other_end"]),
    "no system message": (
        CHATML.replace(
            "{% for m in", "{% for m in messages if m.role != 'system' %}{% endfor %}{% for m in"
        ).replace("{{ m.content }}", "{{ m.content if m.role != 'system' }}"),
        ["message_lost"],
    ),
    "no questions": (
        CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'user' }}"),
        ["message_lost"],
    ),
    "no answer": (
        CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' else m.text }}"),
        ["answer_not_learnt"],
    ),
    "marks around the header": (
        CHATML.replace(
            "{{ m.role }}\n{{ m.content }}<|im_end|>",
            "{% generation %}{{ m.role }}{% endgeneration %}{{ '\n' }}{{ m.content }}"
            "{% generation %}<|im_end|>{% endgeneration %}",
        ),
        ["answer_not_learnt"],
    ),
    "marks around everything": (
        MARKED.replace(
            "{% else %}{{ m.content }}", "{% else %}{% generation %}{{ m.content }}{% endgeneration %}"
        ),
        ["question_learnt"],
    ),
    "another generation prompt": (
        CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"),
        ["generation_prompt"],
    ),
    "two beginnings": ("{{ bos_token }}{{ bos_token }}" + CHATML, ["two_begins"]),
}


@pytest.mark.parametrize("template,expected", BROKEN.values(), ids=BROKEN)
def test_each_broken_template_raises_its_own_alarm(template, expected, tokenizer_of):
    tokenizer = tokenizer_of(template, "<|im_end|>")
    chat = CHATS["system and turns"]
    problems = template_problems(
        [chat, chat, CHATS["pair"]], tokenizer, "assistant", [tokenizer.eos_token_id]
    )
    assert [problem.check for problem in problems] == expected
    assert "data.chat_template" in problems[0].words


def test_what_the_data_does_not_hold_is_not_missed(tokenizer_of):
    template, expected = BROKEN["no system message"]
    tokenizer = tokenizer_of(template, "<|im_end|>")
    assert checks([CHATS["system"]], tokenizer) == expected
    assert checks([CHATS["pair"]], tokenizer) == []
    assert checks([Chat([PAIR[0]])], tokenizer) == [], "a chat without an answer is left out, and counted"


def test_an_end_is_judged_by_what_is_known_of_generation(tokenizer_of):
    tokenizer = tokenizer_of(BROKEN["an end that stops no generation"][0], "<|im_end|>")
    assert checks([CHATS["pair"]], tokenizer, ends=None) == []
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert checks([CHATS["pair"]], tokenizer, ends=[end]) == []
    (problem,) = template_problems([CHATS["pair"]], tokenizer, "assistant", [0])
    assert "Answers end with '<|end|>'" in problem.words
    assert f"Add {end} to eos_token_id in the model's generation_config.json" in problem.words


def test_reasoning_in_the_data_is_seen_as_the_template_sees_it(tokenizer_of):
    """A template whose prompt opens the reasoning suits answers that have it, and no others."""
    template = BROKEN["another generation prompt"][0]
    tokenizer = tokenizer_of(template, "<|im_end|>")
    thinking = Chat([PAIR[0], said("assistant", "<think>\nhm\n</think>\n\nHo")])
    assert checks([thinking], tokenizer) == []
    (problem,) = template_problems([thinking, CHATS["pair"]], tokenizer, "assistant")
    assert "ends with '<|im_end|>\\n<|im_start|>assistant\\n<think>\\n'" in problem.words
    assert "are learnt after '<|im_end|>\\n<|im_start|>assistant\\n'" in problem.words


def test_a_prompt_that_ends_inside_a_token(tokenizer_of, byte_level_bpe):
    merges = json.loads(byte_level_bpe)
    first = len(merges["model"]["vocab"])
    merges["model"]["vocab"]["ĠZ"] = first
    merges["model"]["merges"] = [["Ġ", "Z"], *merges["model"]["merges"]]
    template = CHATML.replace("{{ m.role }}\n", "{{ m.role }}: ").replace("assistant\n", "assistant: ")
    tokenizer = tokenizer_of(template, "<|im_end|>")
    assert checks([CHATS["pair"]], tokenizer) == []
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(merges)), eos_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    (problem,) = template_problems([CHATS["pair"]], tokenizer, "assistant")
    assert problem.check == "generation_prompt"
    assert "inside a token" in problem.words


def test_strings_that_meet_inside_a_token_are_counted(tokenizer_of):
    tokenizer = tokenizer_of(CHATML, "<|im_end|>")
    good, bad = Completion("What is", " the sky?"), Completion("What is ", "the sky?")
    assert checks([good] * 20, tokenizer, "completion") == []
    assert checks([*[good] * 20, bad], tokenizer, "completion") == [], (
        "one in twenty-one may be an odd answer"
    )
    (problem,) = template_problems([good, bad, bad], tokenizer, "completion")
    assert problem.words.startswith("2 of the first 3 prompts end inside a token")


@pytest.mark.parametrize("example", [Document("<s>Hi"), Completion("<s>Hi", " Ho")])
def test_text_that_has_its_beginning_already(example, tokenizer_of):
    assert checks([example], tokenizer_of(CHATML, "<|im_end|>", adds_bos=True), "all") == ["two_begins"]
    assert checks([example], tokenizer_of(CHATML, "<|im_end|>"), "all") == []


@pytest.mark.parametrize("streaming", [False, True])
def test_training_logs_it_once(streaming, tokenizer_of, write_jsonl, load, caplog):
    caplog.set_level(logging.WARNING)
    tokenizer = tokenizer_of(BROKEN["no end"][0], "<|im_end|>")
    rows = [{"messages": [{"role": "user", "content": f"Say {n}"}, PAIR[-1]]} for n in range(3)]
    load(write_jsonl(rows), tokenizer=tokenizer, streaming=streaming, eval_size=None)
    (record,) = caplog.records
    assert record.check == "end_of_turn"
    assert "data.jsonl (train): The chat template writes no end-of-turn token" in record.getMessage()

"""Talk to a model in the terminal."""

from __future__ import annotations

import io
import signal
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import TINY, model_of
from transformers import AutoTokenizer, LlamaForCausalLM

from lowmem_ft.cli import main
from lowmem_ft.cli.commands import chat
from lowmem_ft.cli.console import exit_codes
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.lora import enable_lora
from lowmem_ft.training.step import conversation
from lowmem_ft.training.step.conversation import Conversation

GREEDY = ("--no-sample", "--max-new-tokens", "6", "training.use_cpu=true")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A model of random weights with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    model_of(TINY, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return str(folder)


def said_by_transformers(folder, messages):
    from transformers import AutoModelForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    answer = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(answer[0, ids.shape[1] :])


def test_one_turn_prints_the_answer_alone(model_folder, capsys):
    assert main(["chat", model_folder, "--once", "Hello", "--system", "Be brief.", *GREEDY]) == 0
    out, err = capsys.readouterr()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert out == said_by_transformers(model_folder, messages) + "\n"
    assert "of weights on cpu" in err
    assert "of keys and values for 256 tokens" in err


def test_packed_weights_answer_on_a_processor(model_folder, capsys):
    assert main(["chat", model_folder, "--once", "Hello", "model.quantization=nf4", *GREEDY]) == 0
    out, err = capsys.readouterr()
    assert len(out) > 1
    assert "76.6 KiB of weights" in err  # of 161 KiB


def test_what_is_said_of_memory_fits_a_terminal(model_folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["chat", model_folder, "--once", "Hello", *GREEDY]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "of weights on cpu" in " ".join(lines)
    assert [line for line in lines if len(line) > 80 and " " in line.strip()] == []


def test_a_saved_adapter_answers_fused_and_the_log_says_one_thing(model_folder, tmp_path, capsys, caplog):
    lora = enable_lora(
        LlamaForCausalLM.from_pretrained(model_folder),
        AdapterConfig(name="lora", r=4),
        base_name=model_folder,
    )
    lora.save(tmp_path)
    caplog.set_level("INFO")
    assert main(["chat", str(tmp_path), "--once", "Hello", *GREEDY]) == 0
    assert [one.getMessage().split(":")[0] for one in caplog.records].count("Fused adapters") == 1


def test_turns_are_kept_until_they_are_cleared(model_folder, capsys, monkeypatch):
    lines = iter(["Hello", "Again", "/clear", "Hello", "/nothing", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    asked = []
    ask = Conversation.ask
    monkeypatch.setattr(
        Conversation, "ask", lambda self, text: asked.append((self, [*self.messages])) or ask(self, text)
    )
    assert main(["chat", model_folder, *GREEDY]) == 0
    out, err = capsys.readouterr()
    assert [len(before) for _, before in asked] == [0, 2, 0]
    first, last = asked[1][1], asked[2][0].messages
    assert first == last
    assert first[0] == {"role": "user", "content": "Hello"}
    assert out.startswith(said_by_transformers(model_folder, first[:1]) + "\n")
    assert "There is no /nothing" in err


def interrupted(*_, end="\n", **__):
    if end == "":
        raise KeyboardInterrupt


def test_an_answer_that_is_stopped_stays_in_the_conversation(model_folder, capsys, monkeypatch):
    stopped = []
    lines = iter(["Hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    stop = Conversation.stop
    monkeypatch.setattr(Conversation, "stop", lambda self: stopped.append(self) or stop(self))
    monkeypatch.setattr(chat, "print", interrupted, raising=False)
    assert main(["chat", model_folder, "--no-sample", "--max-new-tokens", "200"]) == 0
    (conversation,) = {*stopped}
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]


def test_ctrl_c_leaves_an_answer_that_is_the_only_one(model_folder, capsys, monkeypatch):
    monkeypatch.setattr(chat, "print", interrupted, raising=False)
    assert main(["chat", model_folder, "--once", "Hello", *GREEDY]) == 130
    assert "Stopped by SIGINT while it answered." in capsys.readouterr().err


def test_ctrl_c_at_the_prompt_leaves(model_folder, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: signal.raise_signal(signal.SIGINT))
    assert main(["chat", model_folder, *GREEDY]) == 130


def test_a_second_ctrl_c_leaves_once_nothing_computes_any_more(model_folder, capsys, monkeypatch):
    waited: list[bool] = []

    class Interrupted(threading.Event):
        def wait(self, timeout=None):
            waited.append(len(waited) == 1)
            if len(waited) == 1:
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr("builtins.input", lambda _: "Hello")
    monkeypatch.setattr(chat, "print", interrupted, raising=False)
    monkeypatch.setattr(
        conversation, "threading", SimpleNamespace(Thread=threading.Thread, Event=Interrupted)
    )
    assert main(["chat", model_folder, *GREEDY]) == 130
    assert waited == [False, True]
    assert "Stopped by SIGINT while it answered." in capsys.readouterr().err


@pytest.mark.parametrize("stop", [BrokenPipeError, signal.SIGTERM], ids=str)
def test_what_ends_the_command_ends_the_thread_that_answers(model_folder, monkeypatch, stop):
    def stops(*_, end="\n", **__):
        if end == "" and stop == signal.SIGTERM:
            signal.raise_signal(stop)
        raise BrokenPipeError

    monkeypatch.setattr("builtins.input", lambda _: "Hello")
    monkeypatch.setattr(chat, "print", stops, raising=False)
    monkeypatch.setattr(exit_codes, "_give_up", lambda stream: BrokenPipeError())
    monkeypatch.setattr(chat, "_say", lambda text: None)
    ended = main(["chat", model_folder, "--no-sample", "--max-new-tokens", "200"])
    assert ended == (141 if stop is BrokenPipeError else 143)
    assert [one.name for one in threading.enumerate() if "_generate" in one.name] == []


def test_an_answer_ends_where_the_model_does(model_folder, monkeypatch, caplog):
    settings = []
    generate = LlamaForCausalLM.generate
    monkeypatch.setattr(
        LlamaForCausalLM, "generate", lambda self, **given: settings.append(given) or generate(self, **given)
    )
    assert (
        main(["chat", model_folder, "--once", "long " * 50, "--no-sample", "--max-new-tokens", "100000"]) == 0
    )
    (given,) = settings
    assert given["max_new_tokens"] == 256 - given["input_ids"].shape[1]


def test_bytes_that_are_no_text_are_told(model_folder, capsys, monkeypatch):
    assert main(["chat", model_folder, "--once", "a\udce9", *GREEDY]) == 2
    assert r"A conversation is Unicode text, got '\udce9'" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8"))
    assert main(["chat", model_folder, *GREEDY]) == 2
    assert r"The input is UTF-8 text, got b'\xe9'. Save it as UTF-8" in capsys.readouterr().err


def test_a_conversation_longer_than_the_model_takes_is_told(model_folder, capsys):
    assert main(["chat", model_folder, "--once", "long " * 300, *GREEDY]) == 2
    assert "the model takes 256. Start over with /clear" in " ".join(capsys.readouterr().err.split())

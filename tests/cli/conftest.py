"""The files that the table of bad inputs names, all small: each is wrong in one way that users' files are."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import safetensors.torch
import torch
import transformers
from tiny_models import TINY, model_of

from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.lora import enable_lora

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
CALL = {"name": "weather", "arguments": "{}"}
GOOD_LINE = json.dumps({"messages": CHAT})


@pytest.fixture
def base_and_adapter(tmp_path):
    """Write a base, and an adapter of it that changes something, with their tokenizer."""

    def make(hidden_size):
        base, adapter = tmp_path / "base", tmp_path / "adapter"
        config = transformers.LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=512,
        )
        model = model_of(config, dtype=torch.bfloat16)
        model.save_pretrained(base)
        transformers.AutoTokenizer.from_pretrained(TINY).save_pretrained(base)
        lora = enable_lora(model, AdapterConfig(name="lora", r=4), base_name=str(base))
        for parameter in lora.parameters().values():
            torch.nn.init.normal_(parameter, std=0.1)
        adapter.mkdir()
        lora.save(adapter)
        return tmp_path, base, adapter, model

    return make


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory):
    """A folder with everything that a row of the table may name, relative to it."""
    folder = tmp_path_factory.mktemp("bad_inputs")
    (folder / "good.jsonl").write_text(f"{GOOD_LINE}\n" * 4, encoding="utf-8")
    for write in (
        _write_rows,
        _write_text_files,
        _write_bytes,
        _write_folders,
        _write_recipes,
        _write_models,
    ):
        write(folder)
    return folder


def _write_rows(folder: Path) -> None:
    """Well-formed JSON lines whose examples cannot be trained on."""
    rows: dict[str, list[Any]] = {
        "other_columns": [{"foo": "a", "bar": "b"}],
        "preferences": [{"prompt": "a", "chosen": "b", "rejected": "c"}],
        "misspelt_value": [{"conversations": [{"from": "human", "vlaue": "Hi"}, {"from": "gpt", "vlaue": "Hello"}]}],
        "function_call": [{"messages": [CHAT[0], {"role": "assistant", "content": None, "function_call": CALL}]}],
        "role_misspelt": [{"messages": [{"role": "asistant", "content": "Hi"}]}],
        "role_is_list": [{"messages": [{"role": ["user"], "content": "Hi"}]}],
        "weight_is_text": [{"messages": [CHAT[0], CHAT[1] | {"weight": "no"}]}],
        "train_is_text": [{"messages": [CHAT[0], CHAT[1] | {"train": "false"}]}],
        "tool_without_name": [{"messages": CHAT, "tools": [{"description": "adds"}]}],
        "kto": [
            {"prompt": "Hi", "completion": "Hello", "label": True},
            {"prompt": "Hi", "completion": "Go away", "label": False},
        ],
        "steps": [{"prompt": "Hi", "completions": ["a", "b"], "labels": [True, False]}],
        "no_role": [{"messages": [{"content": "Hi"}]}],
        "messages_are_text": [{"messages": "Hi"}],
        "messages_as_python": [{"messages": "[{'role': 'user', 'content': 'Hi'}]"}],
        "two_formats": [{"messages": json.loads(GOOD_LINE)["messages"]}, {"prompt": "a b", "completion": "c d"}] * 2,
        "null_messages": [{"messages": None}],
        "content_is_number": [{"messages": [{"role": "user", "content": 3}]}],
        "images": [{"messages": [{"role": "user", "content": [{"type": "image", "url": "x.png"}]}]}],
        "no_answer": [{"messages": CHAT[:1]}],
        "blank": [{"prompt": " ", "completion": "b"}],
        "pairs": [{"prompt": "a b", "completion": "c d"}] * 4,
        "number_text": [{"text": 7}],
        "prompt_list_and_text": [{"prompt": CHAT[:1], "completion": "Hello"}],
        "prompt_is_number": [{"prompt": 1, "completion": "b"}],
        "text": [{"text": "one two three four five six"}] * 4,
        "empty_text": [{"text": ""}] * 4,
        "long_prompts": [{"prompt": "word " * 300, "completion": "b"}] * 4,
        "half_empty": [{"text": "one two three"}, {"text": ""}] * 4,
        "capitals": [{"Question": "a b", "Answer": "c d"}],
        "long_answers": [{"prompt": "a b", "completion": "word " * 40}] * 4,
    }  # fmt: skip
    for name, examples in rows.items():
        text = "".join(f"{json.dumps(example)}\n" for example in examples)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def _write_text_files(folder: Path) -> None:
    files = {
        "empty.jsonl": "",
        "blank_lines.jsonl": "\n\n\n",
        "dollar$HOME.jsonl": f"{GOOD_LINE}\n",
        "line_3.jsonl": f"{GOOD_LINE}\n{GOOD_LINE}\n{{'messages': 1}}\n",
        "deep.jsonl": '{"text": ' + "[" * 9_000 + "]" * 9_000 + "}\n",
        "strings.jsonl": '"only a string"\n"another"\n',
        "numbers.json": "[1, 2, 3]",
        "mixed_texts.json": '["a b c", 3]',
        "mixed.json": '[{"text": "a b c"}, 3]',
        "trailing_comma.json": '[{"text": "a b c"},]',
        "mixed_types.jsonl": '{"text": "a"}\n{"text": {"inner": 1}}\n{"text": [1]}\n',
        "key_twice.jsonl": '{"text": "a", "text": "b"}\n',
        "half_character.jsonl": '{"text": "a b"}\n{"text": "a\\ud800b"}\n',
        "header_only.csv": "prompt,completion\n",
        "semicolons.csv": "prompt;completion\na;b\n",
        "twice.csv": "text,text\na,b\n",
        "ragged.csv": "prompt,completion\na,b\nc,d,e,f\n",
        "no_header.csv": "a,b\nc,d\n",
        "open_quote.csv": 'prompt,completion\n"a,b\nc,d\n',
        "blank.txt": "\n\n\n",
        "data.xlsx": "x",
        "no_suffix": "x",
        "words.txt": "root:x:0:0 and so on\nmore words\n",
        "template_broken.jinja": "{% for message in messages %}",
        "template_divides.jinja": "{{ 1 / 0 }}",
        "template_too_long.jinja": "{% for _ in range(10**9) %}x{% endfor %}",
        "template_calls_itself.jinja": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "template_empty.jinja": "",
        "template_refuses.jinja": "{{ raise_exception('no chats here') }}",
        "good.py": "print('Hello')\n",
        "ends.py": "import torch\n\n1 / 0\n",
        "not_python.py": "import torch\nprint 'Hello'\n",
        "missing_package.py": "import torch\nimport no_such_package.parts\n",
        "notebook.ipynb": "{}",
        "notebook_of_r.ipynb": '{"nbformat": 4, "metadata": {"language_info": {"name": "R"}}, "cells": []}',
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _write_bytes(folder: Path) -> None:
    """Files whose suffix promises something else than they hold."""
    good = f"{GOOD_LINE}\n".encode()
    pd.DataFrame({"text": ["one two three"] * 4}).to_parquet(folder / "good.parquet")
    pd.DataFrame({"text": ["a"]})[:0].to_parquet(folder / "no_rows.parquet")
    parquet = (folder / "good.parquet").read_bytes()
    whole = gzip.compress(good * 500)
    files = {
        "not_gzip.jsonl.gz": good,
        "cut.jsonl.gz": whole[: len(whole) // 2],
        "cut_later.jsonl.gz": _gzip_of_random_text()[:-40_000],
        "flipped.jsonl.gz": whole[:60] + bytes([whole[60] ^ 0xFF]) + whole[61:],
        "empty_inside.jsonl.gz": gzip.compress(b""),
        "twice.jsonl.gz": gzip.compress(gzip.compress(good)),
        "good.parquet.gz": gzip.compress(parquet),
        "text.parquet": good,
        "cut.parquet": parquet[: len(parquet) // 2],
        "hollow.parquet": b"PAR1" + bytes(100) + b"PAR1",
        "parquet.jsonl": parquet,
        "zip.jsonl": b"PK\x03\x04" + bytes(200),
        "zeros.jsonl": bytes(4096),
        "latin1.jsonl": '{"text": "café au lait"}\n'.encode("latin-1"),
        "latin1.csv": "prompt,completion\ncafé,b\n".encode("latin-1"),
        "utf16.jsonl": good.decode().encode("utf-16"),
        "binary.yaml": bytes(range(256)),
        "latin1.yaml": "name: café\n".encode("latin-1"),
        "zeros.yaml": bytes(64),
        "latin1.jinja": "café".encode("latin-1"),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _gzip_of_random_text() -> bytes:
    """What is long enough, compressed, to be damaged beyond the beginning that is looked at first."""
    numbers = random.Random(0)
    lines = (json.dumps({"text": f"{numbers.getrandbits(4096):x}"}) for _ in range(100))
    return gzip.compress("\n".join(lines).encode())


def _write_folders(folder: Path) -> None:
    (folder / "nowhere_link.jsonl").symlink_to("no_such_file")
    (folder / "going_on" / "checkpoint-60").mkdir(parents=True)
    (folder / "going_on" / "checkpoint-100").mkdir()
    (folder / "link_to_itself").symlink_to("link_to_itself")
    (folder / "link_to_itself.yaml").symlink_to("link_to_itself.yaml")
    os.mkfifo(folder / "pipe.jsonl")
    os.mkfifo(folder / "pipe.jinja")
    (folder / "empty_folder").mkdir()
    (folder / "mixed_folder").mkdir()
    (folder / "mixed_folder" / "a.jsonl").write_text('{"text": "a b"}\n')
    (folder / "mixed_folder" / "b.csv").write_text("text\na b\n")
    (folder / "damaged_folder").mkdir()
    (folder / "damaged_folder" / "a.jsonl").write_text('{"text": "a b"}\n')
    (folder / "damaged_folder" / "b.jsonl").write_text('{"text": "a b"}\n{"text": \n')
    (folder / "other_files").mkdir()
    (folder / "other_files" / "notes.md").write_text("x")
    (folder / "saved").mkdir()
    (folder / "saved" / "state.json").write_text("{}")
    (folder / "old_run" / "model").mkdir(parents=True)
    (folder / "old_run" / "recipe.yaml").write_text("name: old\nmodel: {name_or_path: x}\n")
    (folder / "old_run" / "metrics.jsonl").write_text("")
    (folder / "checkpoint-broken").mkdir()
    (folder / "checkpoint-without-manifest").mkdir()
    (folder / "checkpoint-broken" / "checkpoint.json").write_text("{")


def _write_recipes(folder: Path) -> None:
    model = f"model: {{name_or_path: {TINY}, weights: random}}\n"
    recipes = {
        "good": f"{model}data: {{path: good.jsonl, max_length: 64}}\ntraining: {{max_steps: 1}}\n"
        "budget: {preflight: false}\n",  # a process more for each row that gets so far
        "tabs": "model:\n\tname_or_path: x\n",
        "deep": f"training: {'{a: ' * 3_000}1{'}' * 3_000}\n",
        "open_bracket": "model: [\n",
        "list": "- model: x\n",
        "scalar": "just text\n",
        "nul_in_name": 'name: "a\\0b"\n' + model,
        "nul_in_folder": f'{model}training: {{output_dir: "a\\0b"}}\n',
        "escape_in_name": 'name: "\\e[2Jx"\n' + model,
        "empty": "",
        "two_documents": "name: a\n---\nname: b\n",
        "key_twice": "training:\n  seed: 1\n  seed: 2\n",
        "unknown_group": f"{model}trainig: {{seed: 1}}\n",
        "group_is_list": f"{model}training: [1, 2]\n",
        "group_is_text": "model: some/model\n",
        "wrong_type": f"{model}training: {{seed: one}}\n",
        "number_for_text": f"{model}data: {{path: 1.5}}\n",
        "interpolation": "model: {name_or_path: '${nowhere.key}'}\n",
        "environment": "model: {name_or_path: '${oc.env:HOME}'}\n",
        "base_of_environment": "base: environment.yaml\n",
        "base_by_environment": "base: ${oc.env:HOME}/environment.yaml\n",
        "many_references": f"name: {'x' * 2000}\ntraining: {{run_name: '{'${name}' * 2000}'}}\n",
        "many_aliases": "a0: &a0 [x]\n"
        + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(9)),
        "many_digits": f"training: {{seed: {'1' * 6000}}}\n",
        "resolver": "model: {name_or_path: '${no_such_resolver:1}'}\n",
        "open_interpolation": "model: {name_or_path: '${oc.env'}\n",
        "cycle": "base: cycle.yaml\n",
        "cycle_a": "base: cycle_b.yaml\n",
        "cycle_b": "base: cycle_a.yaml\n",
        "base_missing": "base: nowhere.yaml\n",
        "base_misspelt": "base: tinny\n",
        "base_list": "base: [tiny, demo]\n",
        "base_broken": "base: open_bracket.yaml\n",
        "self_reference": "model: {name_or_path: '${model.name_or_path}'}\n",
        "alias": "model: &m {name_or_path: *m}\n",
        "tag": "model: !!python/object/apply:os.system ['true']\n",
        "number_keys": f"{model}training: {{1: 2}}\n3: 4\n",
        "nested": f"{model}training: {{seed: {{value: 3}}}}\n",
    }
    for name, text in recipes.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def _write_models(folder: Path) -> None:
    """Model folders, each lacking or damaging one thing; ``good`` has weights."""
    good = folder / "good_model"
    shutil.copytree(TINY, good, ignore=shutil.ignore_patterns("data.jsonl"))
    model_of().save_pretrained(good)

    def variant(name: str, change: Callable[[Path], None]) -> None:
        shutil.copytree(good, folder / name)
        change(folder / name)

    weights = "model.safetensors"
    variant("no_weights", lambda model: (model / weights).unlink())
    variant("no_tokenizer", lambda model: [file.unlink() for file in model.glob("tokenizer*")])
    lost_token = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}}
    variant("other_tokenizer", lambda model: (model / "tokenizer.json").write_text('{"version": "1.0"}'))
    variant("hollow_tokenizer", lambda model: (model / "tokenizer.json").write_text("{}"))
    variant("lost_token", lambda model: _set_tokenizer(model, **lost_token))
    table = {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8A"}  # points beyond its end
    variant("cut_normalizer", lambda model: _set_tokenizer(model, normalizer=table))
    variant("config_is_list", lambda model: (model / "config.json").write_text("[]"))
    variant("config_not_json", lambda model: (model / "config.json").write_text("{model_type: llama}"))
    variant("no_model_type", lambda model: _set_config(model, model_type=None))
    variant("unknown_model_type", lambda model: _set_config(model, model_type="lama"))
    variant("no_hidden_size", lambda model: _set_config(model, hidden_size=None))
    variant("no_heads", lambda model: _set_config(model, num_attention_heads=0))
    variant("no_vocabulary", lambda model: _set_config(model, vocab_size=-5))
    variant("no_positions", lambda model: _set_config(model, max_position_embeddings=-5))
    variant("too_much_dropout", lambda model: _set_config(model, attention_dropout=1.5))
    variant("endless_width", lambda model: _set_config(model, hidden_size=10**9))
    variant("odd_dtype", lambda model: _set_config(model, dtype="float7"))
    variant("odd_key_heads", lambda model: _set_config(model, num_attention_heads=4, num_key_value_heads=3))
    variant("odd_head_size", lambda model: _set_config(model, hidden_size=204, head_dim=None))
    variant("odd_head_dim", lambda model: _set_config(model, head_dim=15))
    variant("odd_rope", lambda model: _set_config(model, rope_scaling={"type": "nosuch", "factor": 2}))
    for name, settings in {
        "odd_end": {"eos_token_id": 99_999},
        "cold": {"temperature": -1, "do_sample": True},
    }.items():
        text = json.dumps(settings)
        variant(name, lambda model, text=text: (model / "generation_config.json").write_text(text))
    variant("tokenizer_is_list", lambda model: (model / "tokenizer_config.json").write_text("[]"))
    for name, method in {"quantized": "gptq", "quantized_4bit": "bitsandbytes"}.items():
        settings = {"quant_method": method, "bits": 4, "load_in_4bit": True}
        variant(name, lambda model, settings=settings: _set_config(model, quantization_config=settings))
    variant("odd_heads", lambda model: _set_config(model, num_attention_heads=3, num_key_value_heads=3))
    variant("other_width", lambda model: _set_config(model, hidden_size=64))
    variant("odd_activation", lambda model: _set_config(model, hidden_act="no_such_function"))
    variant("layers_in_words", lambda model: _set_config(model, num_hidden_layers="two"))
    variant("text_weights", lambda model: (model / weights).write_text("not weights"))
    variant("cut_weights", lambda model: (model / weights).write_bytes((good / weights).read_bytes()[:-100]))
    variant("weights_too_long", lambda model: (model / weights).open("ab").write(b"more"))
    variant("cut_shard", lambda model: _shard(model, keep_bytes=100))
    variant("lost_shard", lambda model: _shard(model, keep_bytes=0))
    variant("broken_index", lambda model: (model / f"{weights}.index.json").write_text('{"weight_map": []}'))
    variant("pickled_weights", _pickle_weights)
    variant("classifier", _make_classifier)
    variant("weights_missing_one", _drop_one_weight)
    variant("small_vocabulary", _shrink_vocabulary)
    for name, kind in {"bert": "bert", "vision": "vit"}.items():
        variant(
            name,
            lambda model, kind=kind: transformers.AutoConfig.for_model(kind).to_json_file(
                model / "config.json", False
            ),
        )
    (folder / "empty_model").mkdir()
    _write_adapters(folder)
    for name, content in {
        "cut.gguf": b"GGUF" + bytes(10),
        "cut_later.gguf": b"GGUF" + struct.pack("<IQQ", 3, 20, 20) + bytes(60),
        "random.gguf": b"GGUF" + random.Random(0).randbytes(3000),
        "random_later.gguf": b"GGUF" + struct.pack("<IQQ", 3, 5, 5) + random.Random(0).randbytes(3000),
        "gguf_of_other_version.gguf": b"GGUF" + struct.pack("<IQQ", 99, 1, 1) + bytes(200),
        "other.gguf": b"not a gguf file at all, only text",
    }.items():
        (folder / name).write_bytes(content)


def _write_adapters(folder: Path) -> None:
    """LoRA adapters of ``good_model``, but for the weights: what is refused is refused before they are read."""
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": "good_model",
        "r": 4,
        "target_modules": ["q_proj"],
    }
    for name, text in {
        "adapter": json.dumps(settings),
        "adapter_run/model": json.dumps(settings),
        "adapter_with_rank_in_words": json.dumps({**settings, "r": "four"}),
        "adapter_without_alpha": json.dumps({**settings, "lora_alpha": None}),
        "adapter_of_number": json.dumps({**settings, "base_model_name_or_path": 5}),
        "adapter_damaged": json.dumps(settings),
        "adapter_not_json": "{",
        "adapter_is_list": "[]",
        "adapter_of_other_kind": json.dumps({**settings, "peft_type": "IA3"}),
        "adapter_without_base": json.dumps({"peft_type": "LORA"}),
    }.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "adapter_config.json").write_text(text)
        weights = folder / name / "adapter_model.safetensors"
        safetensors.torch.save_file({}, weights)
        if name == "adapter_damaged":
            weights.write_bytes(b"not weights")


def _set_config(model: Path, **fields: Any) -> None:
    written = json.loads((model / "config.json").read_text())
    written = {name: value for name, value in {**written, **fields}.items() if value is not None}
    (model / "config.json").write_text(json.dumps(written))


def _set_tokenizer(folder: Path, **parts: Any) -> None:
    """With parts that tokenizers panics over, as it reads them or as it reads a text."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))


def _pickle_weights(model: Path) -> None:
    torch.save(safetensors.torch.load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()


def _make_classifier(model: Path) -> None:
    _set_config(model, architectures=["LlamaForSequenceClassification"], tie_word_embeddings=False)
    weights = safetensors.torch.load_file(model / "model.safetensors")
    weights.pop("lm_head.weight", None)
    weights["score.weight"] = torch.zeros(2, weights["model.norm.weight"].numel())
    safetensors.torch.save_file(weights, model / "model.safetensors", {"format": "pt"})


def _drop_one_weight(model: Path) -> None:
    weights = safetensors.torch.load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    safetensors.torch.save_file(weights, model / "model.safetensors", {"format": "pt"})


def _shard(model: Path, *, keep_bytes: int) -> None:
    """Weights in two files, of which the second ends early, or is not there."""
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    whole = model / "model.safetensors"
    names = list(safetensors.torch.load_file(whole))
    index = {"weight_map": {name: second if name == names[0] else first for name in names}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / second).write_bytes(whole.read_bytes()[:keep_bytes])
    whole.rename(model / first)
    if not keep_bytes:
        (model / second).unlink()


def _shrink_vocabulary(model: Path) -> None:
    _set_config(model, vocab_size=100)
    (model / "model.safetensors").unlink()

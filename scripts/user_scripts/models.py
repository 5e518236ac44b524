"""Tiny models with weights, and rows of random words, for the scripts of the table: written into a folder once."""

from __future__ import annotations

import json
import random
import shutil
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig

TOKENIZER = Path(__file__).parents[2] / "recipes" / "tiny"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
NUM_ROWS = 64
FEWEST_WORDS, MOST_WORDS = 4, 40
VOCABULARY = 512

_WIDTHS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def write_all(folder: Path) -> None:
    """Write every model and every dataset into a folder."""
    for name, (auto_class, model_type, sizes) in _MODELS.items():
        model = getattr(transformers, auto_class).from_config(AutoConfig.for_model(model_type, **sizes))
        model.save_pretrained(folder / "models" / name)
        for file in TOKENIZER_FILES:
            shutil.copy(TOKENIZER / file, folder / "models" / name)
    words = _Words(random.Random(0))
    for name, row in _ROWS.items():
        file = folder / "data" / name / "train.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text("".join(json.dumps(row(words)) + "\n" for _ in range(NUM_ROWS)), encoding="utf-8")
    _write_sounds(folder / "data" / "sounds", random.Random(1))
    (folder / "rewards.py").write_text(_REWARD, encoding="utf-8")  # TRL's scripts look for it where they run


_REWARD = """def length(completions, **columns):
    return [float(len(str(completion))) for completion in completions]
"""


class _Words:
    """Texts of random words, as long as chance has it."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def __call__(self, share: float = 1.0) -> str:
        count = max(2, round(self.chance.randint(FEWEST_WORDS, MOST_WORDS) * share))
        return " ".join(
            "".join(self.chance.choices("abcdefghijklmnopqrstuvwxyz", k=self.chance.randint(2, 7)))
            for _ in range(count)
        )

    def said_by(self, role: str, share: float = 1.0) -> list[dict[str, str]]:
        return [{"role": role, "content": self(share)}]


_ROWS: dict[str, Callable[[_Words], dict[str, Any]]] = {
    "text": lambda words: {"text": words(2)},
    "chats": lambda words: {"messages": words.said_by("user") + words.said_by("assistant")},
    "prompts": lambda words: {"prompt": words.said_by("user", 0.5)},
    "preferences": lambda words: {
        "prompt": words.said_by("user"),
        "chosen": words.said_by("assistant"),
        "rejected": words.said_by("assistant"),
    },
    "judged": lambda words: {
        "prompt": words.said_by("user"),
        "completion": words.said_by("assistant"),
        "label": words.chance.random() < 0.5,
    },
    "classes": lambda words: {"text": words(), "label": words.chance.randint(0, 2)},
    "translations": lambda words: {"text": words(), "target": words(0.6)},
    "pairs": lambda words: {"anchor": words(0.5), "positive": words()},
}


def _write_sounds(folder: Path, chance: random.Random) -> None:
    """Write noise of one to three seconds, 16 kHz, each with a text."""
    folder.mkdir(parents=True)
    words, rows = _Words(chance), []
    for number in range(16):
        file = folder / f"{number}.wav"
        with wave.open(str(file), "wb") as sound:
            sound.setnchannels(1)
            sound.setsampwidth(2)
            sound.setframerate(16_000)
            sound.writeframes(chance.randbytes(2 * chance.randint(16_000, 48_000)))
        rows.append({"file": file.name, "text": words(0.4)})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


_DECODER = {**_WIDTHS, "max_position_embeddings": 1024}
_ENCODER = {
    name: _WIDTHS[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "pad_token_id")
}
_T5 = {
    **{name: _WIDTHS[name] for name in ("vocab_size", "pad_token_id", "eos_token_id")},
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 160,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_WHISPER = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 160,
    "decoder_ffn_dim": 160,
    "max_target_positions": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "begin_suppress_tokens": None,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dense": ("AutoModelForCausalLM", "qwen3", _DECODER),
    "tied": ("AutoModelForCausalLM", "llama", {**_DECODER, "tie_word_embeddings": True}),
    "mixture": ("AutoModelForCausalLM", "qwen3_moe", {**_DECODER, **_EXPERTS}),
    "reward": ("AutoModelForSequenceClassification", "qwen3", {**_DECODER, "num_labels": 1}),
    "encoder": (
        "AutoModelForSequenceClassification",
        "bert",
        {**_ENCODER, "num_hidden_layers": 3, "num_attention_heads": 4, "num_labels": 3},
    ),
    "encoder_decoder": ("AutoModelForSeq2SeqLM", "t5", _T5),
    "speech": ("AutoModelForSpeechSeq2Seq", "whisper", _WHISPER),
}
"""Class and type of each model, and its sizes."""

"""Tiny tokenizers made here, and data files in a cache of their own."""

import json

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lowmem_ft.data.config import DataConfig
from lowmem_ft.data.loading import load_data

TEXT_TO_LEARN_MERGES_FROM = [
    "What is the colour of the sky? The sky is blue, and the grass is green.",
    "<|im_start|>user\nHello there, how are you?<|im_end|>\n<|im_start|>assistant\nFine, thank you.<|im_end|>\n",
    "Below is an instruction that describes a task. Write a response that completes the request.",
    "one two three four five six seven eight nine ten 0 1 2 3 4 5 6 7 8 9",
]

CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def byte_level_bpe():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|pad|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT_TO_LEARN_MERGES_FROM, trainer)
    return tokenizer.to_str()


@pytest.fixture
def make_tokenizer(byte_level_bpe):
    def make(*, pad="<|pad|>", eos="<|im_end|>", chat_template=CHATML_TEMPLATE):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(byte_level_bpe), pad_token=pad, eos_token=eos
        )
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture
def write_jsonl(tmp_path):
    def write(rows, name="data.jsonl"):
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)

    return write


@pytest.fixture
def load(make_tokenizer):
    def load_with(
        path,
        *,
        tokenizer=None,
        max_positions=4096,
        seed=0,
        attn_implementation="sdpa",
        vocab_size=None,
        **config,
    ):
        return load_data(
            DataConfig(path=path, **config),
            make_tokenizer() if tokenizer is None else tokenizer,
            max_positions=max_positions,
            seed=seed,
            attn_implementation=attn_implementation,
            vocab_size=vocab_size,
        )

    return load_with


@pytest.fixture
def all_examples():
    def read_all(examples):
        """Every example of an epoch, by sample id; a document's pieces in their order."""
        found = {}
        for reference in examples.order(0, 1):
            for example in examples.read(reference):
                found.setdefault(example.sample_id, []).append(example)
        return found

    return read_all

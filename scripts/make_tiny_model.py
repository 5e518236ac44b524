"""Write ``recipes/tiny``: the architecture, tokenizer and data of the recipe that the tests train.

    python scripts/make_tiny_model.py

There are no weights to write: the recipe initialises them at random from its seed.
"""

from __future__ import annotations

import json
from pathlib import Path

from command_line import parser_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

FOLDER = Path(__file__).resolve().parent.parent / "recipes" / "tiny"
VOCABULARY = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Norway": "Oslo",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Ireland": "Dublin",
    "Finland": "Helsinki",
    "Canada": "Ottawa",
}
OPPOSITES = {
    "hot": "cold",
    "early": "late",
    "empty": "full",
    "heavy": "light",
    "young": "old",
    "open": "shut",
    "loud": "quiet",
    "rough": "smooth",
    "deep": "shallow",
    "cheap": "dear",
    "wet": "dry",
    "wide": "narrow",
    "sharp": "blunt",
    "first": "last",
    "strong": "weak",
    "rich": "poor",
}
YOUNG_ANIMALS = {
    "cow": "calf",
    "sheep": "lamb",
    "dog": "puppy",
    "cat": "kitten",
    "horse": "foal",
    "goose": "gosling",
    "duck": "duckling",
    "bear": "cub",
    "deer": "fawn",
    "goat": "kid",
    "hen": "chick",
    "frog": "tadpole",
    "swan": "cygnet",
    "eagle": "hatchling",
    "pig": "piglet",
    "seal": "pup",
}
SUMS = [(2, 3), (4, 4), (7, 1), (9, 6), (5, 8), (3, 9), (6, 6), (8, 2)]


def main() -> None:
    """Write the data, then a tokenizer that has seen it, then the architecture."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    chats = make_chats()
    lines = [json.dumps({"messages": chat}) + "\n" for chat in chats]
    (FOLDER / "data.jsonl").write_text("".join(lines), encoding="utf-8")
    make_tokenizer(chats).save_pretrained(FOLDER)
    make_config().save_pretrained(FOLDER)
    print(f"{FOLDER}: {len(chats)} chats, {VOCABULARY} tokens")


def make_chats() -> list[list[dict[str, str]]]:
    """Return 64 short chats of different lengths: one turn, two turns, and with a system message."""
    chats = [_chat((f"What is the capital of {land}?", f"{city}.")) for land, city in CAPITALS.items()]
    chats += [
        _chat((f"What is the opposite of {word}?", f"The opposite of {word} is {other}."))
        for word, other in OPPOSITES.items()
    ]
    chats += [
        _chat(
            (f"What is a young {animal} called?", f"A {young}."), system="Answer with an article and a noun."
        )
        for animal, young in YOUNG_ANIMALS.items()
    ]
    chats += [
        _chat((f"{a} plus {b}?", f"{a + b}."), ("And times two?", f"{2 * (a + b)}, which is {a + b} twice."))
        for a, b in SUMS
    ]
    chats += [
        _chat((f"Count from {a} to {a + b}.", ", ".join(str(number) for number in range(a, a + b + 1)) + "."))
        for a, b in SUMS
    ]
    return chats


def _chat(*turns: tuple[str, str], system: str | None = None) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def make_tokenizer(chats: list[list[dict[str, str]]]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the chats, with ChatML markers and a template that marks answers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f"{message['role']}\n{message['content']}" for chat in chats for message in chat]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
    )


def make_config() -> LlamaConfig:
    """Return a config of two layers, grouped heads and tied embeddings: small, yet with every part of a real Llama."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    main()

"""Tiny models that see or hear, with their processors and rows, for the scripts next to this file.

Nothing is downloaded. Processors are those of transformers, with image processors that need no torchvision; where one
asks for a processor of videos, it gets none.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

_DATA = json.loads(Path(__file__).with_suffix(".json").read_text())

CONFIGS: dict[str, dict[str, Any]] = _DATA["configs"]
"""The config of each family, by its name."""

ID = {word: at for at, word in enumerate(_DATA["words"].split())}
_SPECIAL = [word for word in ID if word[0] == "<"]

_CHAT = (
    "{% for turn in messages %}{{ turn['role'] }} : {% if turn['content'] is string %}{{ turn['content'] }}"
    "{% else %}{% for part in turn['content'] %}{% if part['type'] == 'text' %} {{ part['text'] }} "
    "{% elif part['type'] == 'audio' %} <|audio|> {% else %} IMAGE {% endif %}{% endfor %}{% endif %} </s> {% endfor %}"
)
_SIZES = ((64, 48), (40, 72), (96, 32), (33, 57))


def model_of(family: str) -> Any:
    """Make a model by a config that is read from a folder."""
    folder = Path("model-" + family)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    return getattr(transformers, CONFIGS[family]["architectures"][0])(
        transformers.AutoConfig.from_pretrained(str(folder))
    )


def tokenizer(**roles: str) -> Any:
    """Make a tokenizer of a few words, split at spaces; ``roles`` are attributes such as ``image_token``."""
    words = Tokenizer(models.WordLevel(ID, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=_SPECIAL[4:],
    )
    for role, word in roles.items():
        setattr(made, role, word)
        setattr(made, role + "_id", ID[word])
    return made


def processor(family: str) -> Any:
    """Make a family's processor."""
    small = {"size": {"height": 32, "width": 32}}
    if family.startswith("qwen"):
        pixels = {"shortest_edge": 256, "longest_edge": 2**16}
        images = _images(
            "qwen2_vl", "Qwen2VL", patch_size=8, merge_size=2, temporal_patch_size=2, size=pixels
        )
        kind = "Qwen2_5_VL" if family == "qwen2_5_vl" else "Qwen3VL"
        return _made(kind, "<|vision_start|> <|image_pad|> <|vision_end|>", images, tokenizer())
    if family in ("smolvlm", "idefics3"):
        tiles = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
        images = _images(family, "Idefics3" if family == "idefics3" else "SmolVLM", **tiles)
        if family == "idefics3":
            return _made("Idefics3", "<image>", images, tokenizer(), image_seq_len=4)
        module: Any = importlib.import_module("transformers.models.smolvlm.processing_smolvlm")
        module.num2words = module.num2words or str  # of a package that only videos need
        frames = {"num_frames": 1, "fps": 1, "size": {"longest_edge": 32}, "model_input_names": []}
        frames["video_sampling"] = {"max_frames": 1, "fps": 1}
        return _made("SmolVLM", "<image>", images, tokenizer(), SimpleNamespace(**frames), image_seq_len=4)
    if family == "gemma3":
        words = tokenizer(boi_token="<boi>", eoi_token="<eoi>", image_token="<image>")
        return _made("Gemma3", "<boi>", _images(family, "Gemma3", **small), words, image_seq_length=4)
    if family == "gemma4":
        of_pictures = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
        words = tokenizer(**of_pictures, boa_token="<boa>", eoa_token="<eoa>", audio_token="<|audio|>")
        images = _images(family, "Gemma4", patch_size=8, max_soft_tokens=70, pooling_kernel_size=2)
        sounds = transformers.Gemma4AudioFeatureExtractor()
        return _made("Gemma4", "<image>", sounds, images, words, None, image_seq_length=70)
    if family == "llava_onevision":
        pinpoints = CONFIGS[family]["image_grid_pinpoints"]
        images = _images(family, "LlavaOnevision", image_grid_pinpoints=pinpoints, **small)
        more = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
        return _made("LlavaOnevision", "<image>", images, tokenizer(), None, **more)
    images = _images("got_ocr2", "GotOcr2", crop_to_patches=True, min_patches=1, max_patches=4, **small)
    roles = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
    }
    words = tokenizer(**roles, video_token="<video>")
    return _made("InternVL", "<IMG_CONTEXT>", images, words, None, image_seq_length=4)


def _images(module: str, name: str, **settings: Any) -> Any:
    found = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    return getattr(found, name + "ImageProcessorPil")(**settings)


def _made(name: str, image: str, *parts: Any, **settings: Any) -> Any:
    """Make a processor that takes its parts without looking at their classes."""
    kind = getattr(transformers, name + "Processor")
    bare = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *anything: None})
    return bare(*parts, chat_template=_CHAT.replace("IMAGE", image), **settings)


def rows_with_pictures(number: int) -> list[dict[str, Any]]:
    """Chats of different lengths about pictures of different sizes."""
    draw = np.random.default_rng(0)
    return [
        {
            "images": [Image.fromarray(draw.integers(1, 255, (*_SIZES[row % 4], 3), dtype=np.uint8))],
            "messages": [
                {"role": "user", "content": "a b " * (1 + row % 4)},
                {"role": "assistant", "content": "c d " * (2 + row % 4)},
            ],
        }
        for row in range(number)
    ]


def collator_of_pictures(family: str) -> Any:
    """Make a collator as scripts write it around a processor."""
    process = processor(family)

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        texts = []
        for row in rows:
            asked, answered = row["messages"]
            content = [{"type": "image"}, {"type": "text", "text": asked["content"]}]
            turns = [{"role": "user", "content": content}, answered]
            texts.append(process.apply_chat_template(turns, tokenize=False))
        images = [row["images"] for row in rows]
        return with_labels(process(text=texts, images=images, return_tensors="pt", padding=True))

    return collate


def rows_with_sounds(family: str, number: int) -> list[Any]:
    """Noise of different lengths, for Whisper as the features and the words to write down."""
    draw = np.random.default_rng(0)
    noise = [draw.standard_normal(4000 * (1 + row % 3)).astype(np.float32) for row in range(number)]
    if family != "whisper":
        return noise
    extract = transformers.WhisperFeatureExtractor(chunk_length=2)
    features = [extract(row, sampling_rate=16000)["input_features"][0] for row in noise]
    return [{"input_features": one, "labels": [ID["a"]] * (3 + row % 4)} for row, one in enumerate(features)]


def collator_of_sounds(family: str) -> Any:
    """Make the same for sounds, and text about them or to write down."""
    if family == "whisper":
        extract, words = transformers.WhisperFeatureExtractor(chunk_length=2), tokenizer()

        def transcribe(rows: list[dict[str, Any]]) -> dict[str, Any]:
            features = [{"input_features": row["input_features"]} for row in rows]
            said = words.pad([{"input_ids": row["labels"]} for row in rows], return_tensors="pt")
            labels = said["input_ids"].masked_fill(said["attention_mask"].ne(1), -100)
            return {**extract.pad(features, return_tensors="pt"), "labels": labels}

        return transcribe
    process = processor(family)

    def collate(rows: list[np.ndarray]) -> dict[str, Any]:
        texts = ["user : <|audio|> a b assistant : c d </s>" for _ in rows]
        return with_labels(process(text=texts, audio=rows, return_tensors="pt", padding=True))

    return collate


def with_labels(batch: Any) -> dict[str, Any]:
    """Return a batch in which everything except padding is learnt."""
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100)}

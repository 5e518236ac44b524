"""Models that read images, their processors without torchvision, and chats about images of several sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers as hf
from datasets import Dataset
from PIL import Image
from tiny_models import TINY

_SIDE = 28
_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": _SIDE,
    "patch_size": 14,
}
_TEMPLATE = """{% for message in messages %}<|{{ message.role }}|>{% if message.content is string %}
{{- message.content }}{% else %}{% for part in message.content %}
{{- 'IMAGE' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{% endfor %}"""


class _WithoutVideos(hf.Qwen2_5_VLProcessor):
    """Videos need torchvision."""

    def check_argument_for_proper_class(self, argument_name, argument):
        return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)


def _tokenizer(*marks: str) -> Any:
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    return tokenizer


def _text(tokenizer: Any, **fields: Any) -> dict[str, Any]:
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return {**_TEXT, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **ends, **fields}


def _llava() -> tuple[Any, Any]:
    tokenizer = _tokenizer("<image>")
    sides = {"size": {"shortest_edge": _SIDE}, "crop_size": {"height": _SIDE, "width": _SIDE}}
    processor = hf.LlavaProcessor(
        hf.CLIPImageProcessorPil(**sides),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE.replace("IMAGE", "<image>"),
    )
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**_text(tokenizer)),
        vision_config=hf.CLIPVisionConfig(**_VISION),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
    )
    return hf.LlavaForConditionalGeneration(config), processor


def _gemma3() -> tuple[Any, Any]:
    marks = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(TINY, extra_special_tokens=marks)
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    processor = hf.Gemma3Processor(
        hf.Gemma3ImageProcessorPil(size={"height": _SIDE, "width": _SIDE}),
        tokenizer,
        image_seq_length=4,
        chat_template=_TEMPLATE.replace("IMAGE", marks["boi_token"]),
    )
    config = hf.Gemma3Config(
        text_config=_text(tokenizer, sliding_window=64), vision_config=_VISION, mm_tokens_per_image=4, **ids
    )
    return hf.Gemma3ForConditionalGeneration(config), processor


def _idefics3() -> tuple[Any, Any]:
    marks = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    tokenizer = _tokenizer(*marks)
    sides = {"size": {"longest_edge": 2 * _SIDE}, "max_image_size": {"longest_edge": _SIDE}}
    processor = hf.Idefics3Processor(
        hf.Idefics3ImageProcessorPil(**sides, do_image_splitting=True),
        tokenizer,
        image_seq_len=4,
        chat_template=_TEMPLATE.replace("IMAGE", "<image>"),
    )
    config = hf.Idefics3Config(
        text_config=_text(tokenizer, model_type="llama"),
        vision_config={**_VISION, "patch_size": 7},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    return hf.Idefics3ForConditionalGeneration(config), processor


def _qwen2_5_vl() -> tuple[Any, Any]:
    marks = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    tokenizer = _tokenizer(*marks)
    image, video, start, end = map(tokenizer.convert_tokens_to_ids, marks)
    processor = _WithoutVideos(
        hf.Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=112 * 112),
        tokenizer,
        video_processor=None,
        chat_template=_TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
    )
    vision = dict.fromkeys(("hidden_size", "out_hidden_size"), 32)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    config = hf.Qwen2_5_VLConfig(
        text_config=_text(tokenizer, rope_parameters=rope),
        vision_config={
            **vision,
            "depth": 2,
            "intermediate_size": 64,
            "num_heads": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return hf.Qwen2_5_VLForConditionalGeneration(config), processor


_FAMILIES = {"llava": _llava, "gemma3": _gemma3, "idefics3": _idefics3, "qwen2_5_vl": _qwen2_5_vl}
FAMILIES = tuple(_FAMILIES)
"""Their losses are means over a step's tokens, but Qwen2.5-VL's: that of means of micro-batches. Its processor saves no
files without torchvision.
"""


def seeing(family: str, *, dtype: torch.dtype = torch.float32, frozen: bool = True) -> tuple[Any, Any]:
    """A model of a family for training, its tower frozen or not, and its processor; the same each time."""
    torch.manual_seed(0)
    model, processor = _FAMILIES[family]()
    for name, weight in model.named_parameters():
        if not weight.isfinite().all() or weight.abs().max() > 10:  # some are not initialised
            torch.nn.init.normal_(weight, std=0.02)
        weight.requires_grad_(not (frozen and is_of_tower(name)))
    return model.to(dtype).train(), processor


def is_of_tower(name: str) -> bool:
    """Whether a weight is one of the tower."""
    return "vision" in name or "visual" in name


def picture_rows(num_rows: int = 16) -> Dataset:
    """Chats, each about an image of one of three sizes."""
    noise = np.random.default_rng(0)
    rows = []
    for number in range(num_rows):
        height, width = ((28, 28), (56, 84), (84, 56))[number % 3]
        image = Image.fromarray(noise.integers(0, 255, (height, width, 3), dtype=np.uint8))
        question, answer = "What is this? " * (number % 3 + 1), "A picture of noise. " * (number % 4 + 1)
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"images": [image], "messages": chat})
    return Dataset.from_list(rows)

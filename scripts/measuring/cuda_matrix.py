"""Runs for a CUDA device of 80 GB or more: from 0.1B to 8B, with random weights of the catalogue's architectures.

Shipped recipes come first, with all their rows of a step. Of the matrix, the first rows are the most informative: one
model, with everything else varied one thing at a time. Sizes follow, then longer rows, then the models that take
longest to load.
"""

from __future__ import annotations

from measuring.cpu_matrix import FACTORS, Choice

_PRECISION: dict[str, Choice] = {**FACTORS["precision"], "fp16": ("training.mixed_precision=fp16",)}
_CHECKPOINTING = FACTORS["checkpointing"]
_LOSS: dict[str, Choice] = {"plain": ("loss.chunk_tokens=null",), "chunked": ("loss.chunk_tokens=1024",)}
_ALWAYS: Choice = ("model.weights=random", "data=any", "data.eval_size=8")
_OF_RECIPE: Choice = ("model.weights=random", "data=any")

_RECIPES = """
8b-bf16
8b-bf16       model.kernels=liger
7b-lora
7b-lora       model.kernels=liger
7b-qlora
7b-qlora      model.kernels=liger
1b-bf16
1b-bf16       accumulation.fusion=true
1b-bf16       accumulation.fusion=true  accumulation.dtype=weights
1b-bf16       model.kernels=liger
8b-24gb
8b-24gb       accumulation.fusion=true  model.kernels=liger
3b-bf16
7b-bf16
1b-fp16-t4
7b-qlora-t4
8b-16gb
"""

# model, rows x tokens, precision, optimizer, checkpointing, loss, attention, micro-batches, packed
_ROWS = """
llama-3.2-1b    1x2048  bf16           adamw              recomputed  chunked  sdpa   1  -
llama-3.2-1b    1x2048  autocast       adamw              recomputed  chunked  sdpa   2  -
llama-3.2-1b    1x2048  fp32           adamw              kept        plain    eager  1  -
llama-3.2-1b    1x2048  bf16           adamw_bnb_8bit     kept        plain    sdpa   1  -
llama-3.2-1b    2x1024  fp16           adamw              kept        plain    sdpa   1  -
llama-3.2-1b    1x2048  autocast       adamw              kept        plain    eager  1  -
llama-3.2-1b    2x2048  bf16           lion               recomputed  plain    sdpa   2  packed
qwen3-0.6b      2x2048  bf16           adamw              kept        chunked  sdpa   1  -
smollm2-135m    8x512   autocast       adamw              kept        plain    sdpa   1  -
llama-3.1-8b    1x2048  bf16           adamw_bnb_8bit     recomputed  chunked  sdpa   1  -
gemma-3-1b      1x2048  bf16           adamw              kept        plain    eager  1  -
llama-3.2-3b    1x4096  bf16           adamw              recomputed  chunked  sdpa   1  -
llama-3.2-1b    1x2048  autocast       adafactor          recomputed  chunked  sdpa   1  -
llama-3.2-1b    1x2048  bf16           sgd                half        chunked  sdpa   1  -
llama-3.2-1b    1x2048  autocast       paged_adamw_8bit   recomputed  chunked  sdpa   2  -
llama-3.2-1b    1x2048  bf16           paged_adamw_32bit  recomputed  chunked  sdpa   1  -
llama-3.2-1b    1x2048  bf16           lion_8bit          recomputed  chunked  sdpa   1  packed
llama-3.2-1b    1x8192  bf16           adamw              recomputed  chunked  sdpa   1  -
llama-3.2-1b    1x8192  bf16           adamw              recomputed  plain    sdpa   1  -
llama-3.2-1b    1x4096  autocast       adamw_bnb_8bit     kept        chunked  sdpa   1  -
smollm2-135m    4x2048  fp32           adamw              kept        plain    eager  2  -
smollm2-135m    2x8192  bf16           adamw_bnb_8bit     recomputed  chunked  sdpa   1  packed
smollm2-360m    4x1024  fp16           adamw              recomputed  plain    sdpa   2  -
pythia-410m     4x2048  autocast       adamw              kept        plain    sdpa   1  -
gpt2-medium     8x512   fp32           adamw              kept        plain    sdpa   1  -
olmo-2-1b       1x2048  autocast       adamw              recomputed  chunked  sdpa   2  packed
qwen2.5-0.5b    2x4096  bf16           adamw              recomputed  plain    sdpa   1  -
qwen2.5-1.5b    1x2048  fp32           adamw_bnb_8bit     recomputed  chunked  sdpa   1  -
gemma-2-2b      1x4096  bf16           adamw_bnb_8bit     recomputed  plain    eager  1  -
gemma-3-1b      2x4096  autocast       adamw              recomputed  chunked  sdpa   1  packed
phi-2           1x2048  bf16           adamw              recomputed  plain    sdpa   1  -
llama-3.2-3b    2x2048  autocast       adamw_bnb_8bit     recomputed  chunked  sdpa   2  -
llama-3.2-3b    1x512   bf16           adamw              kept        plain    eager  1  -
phi-3-mini      1x4096  bf16           adamw_bnb_8bit     recomputed  chunked  sdpa   1  -
olmoe-1b-7b     1x2048  bf16           adamw_bnb_8bit     recomputed  chunked  sdpa   1  -
mistral-7b-v0.3 1x4096  bf16           adamw_bnb_8bit     recomputed  chunked  sdpa   1  packed
qwen2.5-7b      1x2048  bf16           lion_8bit          recomputed  plain    sdpa   1  -
qwen3-8b        1x8192  bf16           adamw_bnb_8bit     recomputed  chunked  sdpa   2  -
llama-3.1-8b    4x512   bf16           lion               recomputed  plain    sdpa   1  -
"""


def cuda_rows() -> dict[str, Choice]:
    """Return the settings of each run by its name, in the order in which to run them."""
    recipes = (line.split() for line in _RECIPES.strip().splitlines())
    rows = {" ".join(words): (f"recipe={words[0]}", *_OF_RECIPE, *words[1:]) for words in recipes}
    return rows | {" ".join(line.split()): _overrides(*line.split()) for line in _ROWS.strip().splitlines()}


def _overrides(
    model: str,
    rows: str,
    precision: str,
    optimizer: str,
    checkpointing: str,
    loss: str,
    attention: str,
    micro_batches: str,
    packed: str,
) -> Choice:
    num_rows, length = rows.split("x")
    return (
        *_ALWAYS,
        f"model={model}",
        f"training.per_device_train_batch_size={num_rows}",
        f"data.max_length={length}",
        *_PRECISION[precision],
        f"optimizer.name={optimizer}",
        *_CHECKPOINTING[checkpointing],
        *_LOSS[loss],
        f"model.attn_implementation={attention}",
        f"training.gradient_accumulation_steps={micro_batches}",
        f"data.packing={'true' if packed == 'packed' else 'false'}",
    )

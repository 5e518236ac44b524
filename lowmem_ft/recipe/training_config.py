"""The training loop's config: length, speed and bookkeeping, with the names of ``TrainingArguments``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lowmem_ft.foundation.knob import NO_EFFECT, Effect, knob
from lowmem_ft.foundation.memory.least_memory import PARTS_BY_TOKENS, as_it_is
from lowmem_ft.foundation.packages import require_package

MOST_EPOCHS = 1_000_000
MOST_PROFILED_STEPS = 20
"""More steps tell no more, and the events of each take hundreds of megabytes in a large model."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The training loop's settings."""

    output_dir: str | None = knob(None, "Run folder; null: runs/<recipe name>.")
    overwrite_output_dir: bool = knob(False, "Replace the run in output_dir, once this one has succeeded.")

    per_device_train_batch_size: int = knob(
        1,
        "Examples (packed rows) of one micro-batch on one device.",
        frees="a smaller micro-batch: activations, in proportion to its tokens",
        costs="a smaller micro-batch: less work per kernel; gradient_accumulation_steps keeps the sum",
        effects=NO_EFFECT,
        remaining_bytes=PARTS_BY_TOKENS,
    )
    per_device_eval_batch_size: int | None = knob(
        None, "The same for evaluation; null: per_device_train_batch_size."
    )
    gradient_accumulation_steps: int = knob(
        1,
        "Micro-batches of one optimizer step; the loss is the mean over all their tokens.",
        frees="against one micro-batch of the same total size: activations, to 1/n",
        costs="n smaller passes instead of one; the gradients stay allocated between them",
        effects=NO_EFFECT,
        off=1,
        remaining_bytes={**PARTS_BY_TOKENS, "sums": as_it_is},
    )

    learning_rate: float = knob(2e-5, "Peak learning rate.")
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    ] = knob("cosine", "Learning rate schedule, by transformers' name.")
    lr_scheduler_kwargs: dict[str, Any] | None = knob(
        None, "Further arguments of the schedule, such as {min_lr_rate: 0.1} or {num_decay_steps: 200}."
    )
    warmup_steps: float = knob(
        0.0, "Optimizer steps of linear warmup; below 1: that fraction of all steps, rounded up."
    )
    num_train_epochs: float = knob(1.0, "Passes over the training data; max_steps takes precedence.")
    max_steps: int = knob(-1, "Optimizer steps in all; -1: as many as num_train_epochs gives.")
    max_grad_norm: float | None = knob(
        1.0,
        (
            "Global gradient norm above which gradients are scaled down; null: the norm is measured, but gradients "
            "are not clipped."
        ),
    )
    max_skipped_steps: int = knob(
        5, "Steps in a row with a non-finite loss or gradient (each is skipped) after which the run stops."
    )

    mixed_precision: Literal["no", "bf16", "fp16"] = knob(
        "no",
        "Type that matrix products compute in, by autocast; weights keep model.dtype.",
        frees="about half of the activations kept for the backward pass",
        costs="products round to 8 (bf16) or 11 (fp16) bits; fp16 adds a loss scaler",
        effects={
            "bf16": Effect(fidelity="unbiased rounding"),
            "fp16": Effect(fidelity="unbiased rounding"),
        },
        search_values=("no", "bf16", "fp16"),
        remaining_bytes=PARTS_BY_TOKENS,
    )
    use_cpu: bool = knob(False, "Train on the CPU even if there is an accelerator.")
    seed: int = knob(42, "Seed of the data order, random weights and dropout.")
    full_determinism: bool = knob(
        False,
        "Only deterministic kernels of torch, cuBLAS and flash-attn: on a GPU, runs and resumed runs agree bit for "
        "bit (same model of GPU, versions and number of processes); it is slower. Runs on a CPU do not need it.",
    )

    logging_steps: int = knob(
        10, "Optimizer steps between two lines of the log and of the trackers; metrics.jsonl has every step."
    )
    profile_steps: tuple[int, int] | None = knob(
        None,
        "First and last optimizer step to profile, such as [10, 12]: output_dir gets torch.profiler's trace and a "
        "table by operator and module; these steps take longer. null: none.",
    )
    eval_steps: int | None = knob(None, "Optimizer steps between evaluations; null: only at the end.")
    eval_on_start: bool = knob(False, "Also evaluate before the first step, as a baseline.")
    eval_generations: int | None = knob(
        None,
        "Prompts that the model answers before the first step and at each evaluation, greedily: the beginnings of the "
        "first held-out rows. The log, trackers, generations.jsonl, the report and the model card show the answers.",
    )
    generation_prompts: str | None = knob(
        None,
        "File of prompts for eval_generations, in place of held-out rows: lines of text, or rows with messages or a "
        "prompt. Without eval_generations all of them are answered.",
    )
    max_new_tokens: int = knob(64, "Most tokens of an answer of eval_generations.")
    save_steps: int | None = knob(500, "Optimizer steps between checkpoints; null: only the finished model.")
    save_total_limit: int | None = knob(
        2, "Checkpoints to keep, newest first, the best evaluated one among them; null: all."
    )
    load_best_model_at_end: bool = knob(
        False,
        "The finished model is the one with the best evaluation, not the last one. Each evaluation that is better than "
        "all before saves a checkpoint, whatever save_steps is.",
    )
    metric_for_best_model: Literal["loss", "eval_loss", "perplexity", "eval_perplexity"] | None = knob(
        None, "Held-out metric that says which evaluation is better; null: eval_loss."
    )
    greater_is_better: bool | None = knob(
        None,
        "Whether a greater value of that metric is better; null: the smaller one is, as these metrics mean it.",
    )
    early_stopping_patience: int | None = knob(
        None,
        "Evaluations in a row without a better result after which the run ends; null: it never ends early.",
    )
    early_stopping_threshold: float = knob(
        0.0, "Least difference from the best result so far that early_stopping_patience counts as better."
    )
    resume_from_checkpoint: str | None = knob(
        None,
        "auto: the newest complete checkpoint of output_dir, if there is one; or a checkpoint's path. The resumed "
        "run uses this recipe's length, schedule and batch; data, optimizer and seed cannot change.",
    )
    resume_with_other_kernels: bool = knob(
        False,
        "Let a resumed run compute by other kernels than before, of the same mathematics, which round differently: "
        "model.kernels and its package's version, adapter.kernel, accumulation.fusion.",
    )
    resume_with_other_data: bool = knob(
        False,
        "Let a resumed run continue with training rows that have changed since its checkpoint, from the same place in "
        "their order.",
    )

    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = knob(
        (), "Trackers in addition to metrics.jsonl, such as [tensorboard, wandb]."
    )
    project: str = knob("lowmem_ft", "Project name in the trackers.")
    run_name: str | None = knob(None, "Run name in the trackers; null: the name of the run folder.")
    push_to_hub: bool = knob(False, "Upload the finished model to the hub.")
    hub_model_id: str | None = knob(None, "Hub repository, such as me/my-model; null: the run folder's name.")
    hub_private_repo: bool | None = knob(
        None,
        "Whether a repository that the upload creates is private; null: the hub's default.",
    )

    @property
    def generates(self) -> bool:
        """True if the model answers prompts at evaluations."""
        return self.eval_generations is not None or self.generation_prompts is not None

    def profiled_after(self, num_steps: int) -> Iterator[str]:
        """Yield what is wrong with steps to profile if the run has only ``num_steps``."""
        first, last = self.profile_steps or (0, 0)
        if num_steps < last:
            yield (
                f"training.profile_steps=[{first}, {last}] must be steps of the run, which ends with step {num_steps}. "
                f"Set training.profile_steps to earlier steps, or training.max_steps={last} or more."
            )

    def problems(self) -> Iterator[str]:
        """Yield the rules that these values break by themselves."""
        yield from _not_positive(self)
        yield from _out_of_range(self)


def require_tracker(name: str) -> None:
    """Refuse a tracker that is not installed.

    Args:
        name: its name in ``training.report_to``.

    Raises:
        MissingPackageError: if it is not installed.
    """
    asked_for_by = f"training.report_to={name}"
    if name == "tensorboard":  # accelerate writes its files with either
        require_package(asked_for_by, name, "tensorboard", stand_in="tensorboardX")
    else:
        require_package(asked_for_by, name, "track")


def _not_positive(config: TrainingConfig) -> Iterator[str]:
    for name in (
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "max_skipped_steps",
        "logging_steps",
        "eval_steps",
        "eval_generations",
        "max_new_tokens",
        "save_steps",
        "save_total_limit",
        "early_stopping_patience",
    ):
        value = getattr(config, name)
        if value is not None and value < 1:
            yield f"training.{name} must be at least 1, got {value}."
    for name in ("learning_rate", "num_train_epochs", "max_grad_norm"):
        value = getattr(config, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            way_out = (
                " Set training.max_grad_norm=null to switch clipping off." if name == "max_grad_norm" else ""
            )
            yield f"training.{name} must be a finite number above 0, got {value}.{way_out}"


def _out_of_range(config: TrainingConfig) -> Iterator[str]:
    if config.num_train_epochs > MOST_EPOCHS:
        yield f"training.num_train_epochs must be at most {MOST_EPOCHS}, got {config.num_train_epochs:g}. Try 3."
    if config.early_stopping_threshold < 0:
        yield f"training.early_stopping_threshold must be at least 0, got {config.early_stopping_threshold:g}."
    if config.max_steps != -1 and config.max_steps < 1:
        yield f"training.max_steps must be at least 1, or -1 for num_train_epochs; got {config.max_steps}."
    warmup = config.warmup_steps
    if not (math.isfinite(warmup) and (0 <= warmup < 1 or (warmup >= 1 and warmup == int(warmup)))):
        yield f"training.warmup_steps must be a whole number of steps, or a fraction in [0, 1); got {warmup}."
    first, last = config.profile_steps or (1, 1)
    if not 1 <= first <= last < first + MOST_PROFILED_STEPS:
        yield (
            "training.profile_steps must be the first and the last step to profile, from step 1 and at most "
            f"{MOST_PROFILED_STEPS} in all, got [{first}, {last}]. Set training.profile_steps=[10, 12], for example."
        )
    if not 0 <= config.seed < 2**32:
        yield f"training.seed must be a whole number from 0 to 2**32 - 1, got {config.seed}."

"""Training scripts as somebody has them: stock trainers on a tiny model; and, for their estimates, no other process."""

from __future__ import annotations

import pickle
from typing import Any

from tiny_models import tiny_llama
from transformers import Trainer, TrainingArguments, default_data_collator

TOKENS = 64

CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)
"""The field as transformers names it since 5.23, or before."""


IN_FOURS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
}
"""Arguments of micro-batches of four rows on the CPU; each step is logged and nothing else."""


class ProcessHere:
    """In place of ``EstimatingProcess``, whose imports take seconds: what it is asked goes through pickle here too."""

    def __enter__(self) -> ProcessHere:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def call(self, function: Any, *arguments: Any, **callbacks: Any) -> Any:
        function, arguments = pickle.loads(pickle.dumps((function, arguments)))
        return pickle.loads(pickle.dumps(function(*arguments, **callbacks)))

    def close(self) -> None:
        pass


def arguments(folder: Any, **fields: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), **{**IN_FOURS, "max_steps": 2, **fields})


def trainer_of(folder: Any, *, model: Any = None, callbacks: Any = None, **fields: Any) -> Trainer:
    tokens = list(range(2, 2 + TOKENS))
    rows = [{"input_ids": tokens, "labels": tokens, "attention_mask": [1] * TOKENS}] * 16
    return Trainer(
        model=model or tiny_llama(vocab_size=512, max_position_embeddings=2 * TOKENS),
        args=arguments(folder, **fields),
        train_dataset=rows,
        eval_dataset=rows[:2] if "eval_strategy" in fields else None,
        data_collator=default_data_collator,
        callbacks=callbacks,
    )

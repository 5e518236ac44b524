"""The rows of the table: which script, with which model, adapter and arguments."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN = Path(__file__).parent / "scripts"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A script to measure, and to estimate.

    Args:
        trainer: the trainer's name.
        kind: kind of model.
        adapter: what is trained, ``full`` or the adapter's name.
        script: file of the script.
        arguments: its arguments.
        package: package that the script needs in addition to those that this project is tested with; empty: none.
        off: what the estimate may be off by in a phase, relative; its whole peak is within 0.1% always.
        note: why it may be off by more than others.
    """

    trainer: str
    kind: str
    adapter: str
    script: Path
    arguments: tuple[str, ...]
    package: str = ""
    off: float = 0.001
    note: str = ""

    @property
    def name(self) -> str:
        """The row's name in the command and in tests."""
        return "-".join(part.replace(" ", "_") for part in (self.trainer, self.kind, self.adapter))

    @property
    def is_runnable(self) -> bool:
        """True if its package is installed."""
        return not self.package or importlib.util.find_spec(self.package) is not None


_SHORT = ("--max_steps", "3", "--save_strategy", "no", "--report_to", "none", "--use_cpu", "--bf16", "false")
_BATCH = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1")
_LORA = ("--use_peft", "--lora_r", "8", "--lora_target_modules", "all-linear")
_ADAPTERS = {"full": (), "LoRA": _LORA, "DoRA": (*_LORA, "--use_dora"), "QLoRA": (*_LORA, "--load_in_4bit")}


_SCRATCH: dict[str, Any] = {
    "off": 0.08,
    "note": "this phase's peak is scratch that kernels of the processor take within themselves",
}
_LOG: dict[str, Any] = {
    "off": 0.01,
    "note": "a few hundred bytes of numbers that libraries keep for the log, where little else is held",
}


def _trl(
    trainer: str, script: str, data: str, adapter: str, *more: str, kind: str = "dense", **notes: Any
) -> Row:
    root = importlib.util.find_spec("trl")
    assert root is not None
    assert root.origin is not None
    return Row(
        trainer=trainer,
        kind=kind,
        adapter=adapter,
        script=Path(root.origin).parent / "scripts" / f"{script}.py",
        arguments=(
            *(
                "--model_name_or_path",
                f"models/{kind}",
                "--dataset_name",
                f"data/{data}",
                "--output_dir",
                "out",
            ),
            *(*_SHORT, *_BATCH, *_ADAPTERS[adapter], *more),
        ),
        **notes,
    )


_GENERATES = ("--max_completion_length", "32")
_GROUPS = (*_GENERATES, "--num_generations", "4", "--reward_funcs", "rewards.length")
_TEACHER = ("--teacher_model_name_or_path", "models/tied")


def _trainer(kind: str, adapter: str, data: str, *more: str, trainer: str = "Trainer", **notes: Any) -> Row:
    model = kind.split(",")[0].replace(" ", "_").replace("-", "_")
    arguments = ("--model", f"models/{model}", "--data", f"data/{data}", *more)
    named = () if adapter == "full" else ("--adapter", adapter.lower())
    return Row(
        trainer=trainer,
        kind=kind,
        adapter=adapter,
        script=OWN / "trainer.py",
        arguments=(*arguments, *named),
        **notes,
    )


def _preferences(trainer: str, adapter: str) -> Row:
    return Row(
        trainer=trainer,
        kind="dense",
        adapter=adapter,
        script=OWN / "preferences.py",
        arguments=(
            *("--trainer", trainer.lower(), "--model", "models/dense", "--data", "data/preferences"),
            *(("--lora",) if adapter == "LoRA" else ()),
        ),
        **(_SCRATCH if trainer == "SimPO" else {}),
    )


def _pictures(trainer: str, family: str, adapter: str = "full") -> Row:
    return Row(
        trainer=trainer,
        kind=f"pictures, {family}",
        adapter=adapter,
        script=OWN / "pictures.py",
        arguments=("--trainer", trainer, "--family", family, *(("--lora",) if adapter == "LoRA" else ())),
    )


def _on_policy(trainer: str, name: str, data: str, *more: str) -> Row:
    return Row(
        trainer=trainer,
        kind="dense",
        adapter="full",
        script=OWN / "on_policy.py",
        arguments=("--trainer", name, "--model", "models/dense", "--data", f"data/{data}", *more),
        **_SCRATCH,
    )


_SMALL = ("VeRA", "IA3", "LoHa", "LoKr")

ROWS = (
    *(_trl("SFT", "sft", "chats", adapter) for adapter in _ADAPTERS),
    _trl("SFT", "sft", "chats", "full", "--gradient_checkpointing", "false", kind="tied"),
    _trl("SFT", "sft", "chats", "full", kind="mixture"),
    _trl("SFT", "sft", "chats", "LoRA", "--lora_dropout", "0", kind="mixture"),
    *(_trl("DPO", "dpo", "preferences", adapter) for adapter in ("full", "LoRA", "QLoRA")),
    *(_trl("KTO", "kto", "judged", adapter) for adapter in ("full", "LoRA")),
    _trl("Reward", "reward", "preferences", "full", kind="reward", **_SCRATCH),
    _trl("Reward", "reward", "preferences", "LoRA", "--lora_task_type", "SEQ_CLS", kind="reward", **_SCRATCH),
    *(_trl("GRPO", "grpo", "prompts", adapter, *_GROUPS) for adapter in ("full", "LoRA")),
    *(_trl("RLOO", "rloo", "prompts", adapter, *_GROUPS) for adapter in ("full", "LoRA")),
    *(
        _trl("Distillation", "distillation", "prompts", adapter, *_GENERATES, *_TEACHER)
        for adapter in ("full", "LoRA")
    ),
    *(_preferences(trainer, adapter) for trainer in ("ORPO", "CPO", "SimPO") for adapter in ("full", "LoRA")),
    *(
        _trainer("dense", adapter, "text", **(_LOG if adapter in _SMALL else {}))
        for adapter in ("full", "LoRA", "DoRA", "OFT", *_SMALL)
    ),
    _trainer("tied", "full", "text", "--accumulate", "4", "--checkpointing"),
    _trainer("mixture", "full", "text"),
    _trainer("encoder", "full", "classes", "--task", "classes"),
    _trainer("encoder", "LoRA", "classes", "--task", "classes"),
    _trainer("encoder-decoder", "full", "translations", "--task", "seq2seq"),
    _trainer("encoder-decoder", "LoRA", "translations", "--task", "seq2seq"),
    _trainer(
        *("encoder-decoder", "full", "translations", "--task", "seq2seq", "--generate"),
        trainer="Seq2SeqTrainer",
    ),
    *(
        Row(
            trainer="Seq2SeqTrainer",
            kind="speech",
            adapter=adapter,
            script=OWN / "speech.py",
            arguments=("--model", "models/speech", "--data", "data/sounds", *more),
            **_SCRATCH,
        )
        for adapter, more in (("full", ()), ("LoRA", ("--lora",)))
    ),
    *(_pictures("Trainer", family) for family in ("qwen3_vl", "smolvlm", "internvl")),
    *(_pictures("SFT", family) for family in ("qwen2_5_vl", "llava_onevision", "gemma4")),
    *(_pictures("SFT", family, "LoRA") for family in ("qwen3_5", "gemma3", "idefics3")),
    _on_policy("GKD", "gkd", "chats", "--teacher", "models/tied"),
    _on_policy("Online DPO", "online_dpo", "prompts"),
    Row(
        trainer="sentence-transformers",
        kind="encoder",
        adapter="full",
        script=OWN / "embeddings.py",
        arguments=("--model", "models/encoder", "--data", "data/pairs"),
        package="sentence_transformers",
    ),
)

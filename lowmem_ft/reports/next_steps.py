"""Next steps with a finished model: where it is, and the commands that take it, each a function in ``_STEPS``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowmem_ft.recipe.checks.path_checks import MODEL_FOLDER
from lowmem_ft.recipe.command_lines import command_line
from lowmem_ft.reports.run_record import RunRecord
from lowmem_ft.reports.text.document import Command, Document

Step = tuple[str, Sequence[str]]
"""A reason for a command, and its words."""


def next_steps(run: RunRecord) -> Document | None:
    """Return where a run's model is, what loads it, and the commands that take it; None before it is finished."""
    if not run.is_finished:
        return None
    steps = [step for step_of in _STEPS if (step := step_of(run)) is not None]
    commands = (Document(f"{reason}:", Command(*words), gap=0) for reason, words in steps)
    return Document(_what_loads_it(run), *commands, gap=0)


def _model(run: RunRecord) -> str:
    return str(run.path / MODEL_FOLDER)


def _lacks_its_base(run: RunRecord) -> bool:
    """Return whether the model is an adapter of random weights, which no one has kept."""
    return run.recipe.adapter.name != "none" and run.recipe.model.weights == "random"


def _what_loads_it(run: RunRecord) -> str:
    if run.recipe.adapter.name == "none":
        return f"The model is in {_model(run)}; from_pretrained loads it."
    if _lacks_its_base(run):
        return f"The adapter is in {_model(run)}; its base model had random weights, which are not kept."
    return f"The adapter is in {_model(run)}; peft.AutoPeftModelForCausalLM loads it with its base model."


def _talk(run: RunRecord) -> Step | None:
    if _lacks_its_base(run):
        return None
    return "Talk to it", command_line("chat", str(run.path))


def _export(run: RunRecord) -> Step | None:
    if _lacks_its_base(run):
        return None
    converter = ("--gguf", "q8_0", "--llama-cpp", "../llama.cpp")
    return (
        "Write it for llama.cpp and Ollama (--merged and --quantized nf4: for transformers)",
        command_line("export", str(run.path), str(run.path / "gguf"), *converter),
    )


def _merge(run: RunRecord) -> Step | None:
    if run.recipe.adapter.name == "none" or _lacks_its_base(run):
        return None
    return "Merge it into its base model", command_line("merge", _model(run), str(run.path / "merged"))


def _compare(run: RunRecord) -> Step:
    return "Compare it with another run", command_line("report", str(run.path), "OTHER_RUN")


def _upload(run: RunRecord) -> Step | None:
    training = run.recipe.training
    if training.push_to_hub or _lacks_its_base(run):
        return None
    return "Upload it to the hub", ("hf", "upload", training.hub_model_id or run.path.name, _model(run))


_STEPS: tuple[Callable[[RunRecord], Step | None], ...] = (_talk, _merge, _export, _compare, _upload)
"""In the order in which they are shown."""

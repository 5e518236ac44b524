"""Teach a small model to answer in a fixed style, on any machine, in minutes; show it before and after.

python scripts/demo/demo.py [--model FOLDER]
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from answer_style import follows_style
from get_demo_model import default_cache_dir, get_demo_model
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.foundation.errors import ModelError

REPOSITORY = Path(__file__).parents[2]
HELDOUT_FILE = REPOSITORY / "recipes" / "demo" / "heldout.jsonl"
RUN_DIR = REPOSITORY / "runs" / "demo"

NUM_ASKED, NUM_SHOWN = 12, 3
MAX_NEW_TOKENS = 96
"""Limit of an answer; one of the training data has at most 91 tokens."""
REPETITION_PENALTY = 1.1
"""Penalty against repetition: without it a model of this size says a line twice, before training as after."""

console = Console()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The model's answer; ``cut`` if it reached the token limit."""

    text: str
    cut: bool


@explains_user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Teach SmolLM2-135M-Instruct an answer style and show it before and after."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a copy of SmolLM2-135M-Instruct")
    arguments = parser.parse_args(argv)
    start = time.perf_counter()

    _heading(1, "Get the model")
    model_dir = _model_folder(arguments.model) if arguments.model else get_demo_model(default_cache_dir())

    _heading(2, f"Ask it {NUM_ASKED} questions it will not see in training")
    questions = heldout_questions(NUM_ASKED)
    before = ask(model_dir, questions)
    console.print(
        f"{_num_in_style(before)} of {NUM_ASKED} answers are in the style that it is about to learn."
    )

    _heading(3, "Fine-tune it")
    exit_code = fine_tune(model_dir)
    if exit_code != 0:
        return exit_code

    _heading(4, "Ask again, with plain transformers and the saved folder")
    after = ask(RUN_DIR / "model", questions)
    show_side_by_side(questions[:NUM_SHOWN], before, after)
    show_summary(before, after, seconds=time.perf_counter() - start)
    return 0


def heldout_questions(count: int) -> list[str]:
    """Return the first question of each of ``count`` held-out conversations without a system prompt."""
    questions = []
    for line in HELDOUT_FILE.read_text("utf-8").splitlines():
        first, *_ = json.loads(line)["messages"]
        if first["role"] == "user":
            questions.append(first["content"])
    return questions[:count]


def ask(model_dir: Path, questions: Sequence[str]) -> list[Answer]:
    """Return one greedy answer per question, all in one batch; always the likeliest token, so nothing is random."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Padding on the left: generation continues from the last column of every row.
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.to(device)
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    ).to(device)
    with console.status("The model is answering."):
        tokens_BT = model.generate(
            **prompts,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            repetition_penalty=REPETITION_PENALTY,
        )
    answers_BT = tokens_BT[:, prompts["input_ids"].shape[1] :]
    return [
        Answer(
            text=tokenizer.decode(answer_T, skip_special_tokens=True).strip(),
            cut=tokenizer.eos_token_id not in answer_T,
        )
        for answer_T in answers_BT
    ]


def fine_tune(model_dir: Path) -> int:
    """Run the recipe as a user would, with its progress on this terminal; return its exit code."""
    import torch

    # Without the number of threads `accelerate launch` would set it to one; without the rest it warns about defaults.
    launch = ["--num_processes=1", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    launch.append(f"--num_cpu_threads_per_process={torch.get_num_threads()}")
    script = ["scripts/finetune.py", "recipe=demo", f"model={model_dir}"]
    script += [f"training.output_dir={RUN_DIR}", "training.overwrite_output_dir=true"]
    console.print(f"$ accelerate launch {shlex.join(launch + script)}", style="bold", soft_wrap=True)
    console.file.flush()
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch, *script]
    return subprocess.run(command, cwd=REPOSITORY).returncode


def heldout_losses() -> list[float]:
    """Return the held-out losses that the run measured, in order: before the first step, ..., after the last."""
    rows = map(json.loads, (RUN_DIR / "metrics.jsonl").read_text("utf-8").splitlines())
    return [row["eval_loss"] for row in rows if "eval_loss" in row]


def show_side_by_side(questions: Sequence[str], before: Sequence[Answer], after: Sequence[Answer]) -> None:
    """Print one small table per question, with the answer before on the left and after on the right."""
    for question, old, new in zip(questions, before, after, strict=False):
        table = Table(title=Text(question, style="bold"), box=box.ROUNDED, width=min(console.width, 120))
        table.add_column("before", ratio=1)
        table.add_column("after", ratio=1)
        table.add_row(*(Text(answer.text + " [...]" * answer.cut) for answer in (old, new)))
        console.print(table)


def show_summary(before: Sequence[Answer], after: Sequence[Answer], seconds: float) -> None:
    """Print the numbers before and after, the model's folder and what to try next."""
    losses = heldout_losses()
    table = Table("", "before", "after", box=box.SIMPLE)
    table.add_row("held-out loss (nats per token)", f"{losses[0]:.3f}", f"{losses[-1]:.3f}")
    table.add_row(
        "answers in the style", *(f"{_num_in_style(answers)}/{len(answers)}" for answers in (before, after))
    )
    console.print(table)
    console.print(f"The demo took {seconds:.0f} seconds. The model is in {RUN_DIR / 'model'}.\n")
    console.print(
        "A model this small learns the form of an answer in minutes; to be right as well, it would have to be larger.\n"
        'Next: your own chats in a .jsonl file, one {"messages": [...]} a line:\n'
        f"  accelerate launch -m lowmem_ft train recipe=demo model={RUN_DIR / 'model'} data=my.jsonl "
        "data.eval_size=0.1 training.output_dir=runs/mine",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _model_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"--model needs a folder with a config.json, got {folder}. Leave it out to download the model."
        )
    return folder.absolute()


def _num_in_style(answers: Sequence[Answer]) -> int:
    return sum(follows_style(answer.text) for answer in answers)


def _heading(number: int, title: str) -> None:
    console.rule(f"[bold]{number} of 4: {title}", align="left")


if __name__ == "__main__":
    sys.exit(main())

"""Supervised fine-tuning by TRL's SFTTrainer, with the model, data, techniques and optimizer of a recipe.

python scripts/trl/sft.py --recipe demo data.path=chats.jsonl training.max_steps=100
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from lowmem_ft import hf, load_recipe  # first: it silences a needless message of bitsandbytes
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.models.tokenizer import load_tokenizer

# isort: split
from trl import SFTTrainer


def main(arguments: Sequence[str] | None = None) -> SFTTrainer:
    """Train, and save the model in ``training.output_dir``.

    Args:
        arguments: arguments of the command line; None: this process's.

    Returns:
        The trainer, as training left it.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", required=True, help="name of a recipe, or a .yaml file")
    parser.add_argument("--stock", action="store_true", help="without the recipe's techniques, to compare")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the recipe")
    given = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    recipe = load_recipe(given.recipe, given.overrides)
    rows = hf.load_rows(recipe, preferences=False)
    trainer = SFTTrainer(
        model=hf.prepare_model(recipe.model.name_or_path or "", recipe),
        args=hf.sft_config(recipe),
        train_dataset=rows.train,
        eval_dataset=rows.evaluation,
        processing_class=load_tokenizer(recipe.model),
        callbacks=[hf.MemoryCallback(None if given.stock else recipe, budget=recipe.budget)],
    )
    if not given.stock:
        hf.attach(trainer, recipe)
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    raise SystemExit(explains_user_errors(lambda argv: 0 if main(argv) else 1)())

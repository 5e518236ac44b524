"""Learning from rewards by TRL's GRPOTrainer, with the model, prompts, techniques and optimizer of a recipe.

python scripts/trl/grpo.py --recipe demo loss.chunk_tokens=null training.per_device_train_batch_size=8
"""

from __future__ import annotations

import argparse
import logging
import pkgutil
from collections.abc import Sequence

from lowmem_ft import hf, load_recipe  # first: it silences a needless message of bitsandbytes
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.models.tokenizer import load_tokenizer

# isort: split
from trl import GRPOTrainer


def main(arguments: Sequence[str] | None = None) -> GRPOTrainer:
    """Train on prompts, or on chats without their last turn; save in ``training.output_dir``; return the trainer.

    Args:
        arguments: arguments of the command line; None: this process's.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", required=True, help="name of a recipe, or a .yaml file")
    parser.add_argument("--reward", default="trl.rewards:think_format_reward", help="MODULE:FUNCTION")
    parser.add_argument("--generations", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="of the longest answer")
    parser.add_argument("--stock", action="store_true", help="without the recipe's techniques, to compare")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the recipe")
    given = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    not_evaluated = ["training.eval_steps=null", "training.eval_on_start=false"]  # the log has rewards
    recipe = load_recipe(given.recipe, [*given.overrides, *not_evaluated])
    prompts = hf.load_rows(recipe).train
    if "messages" in prompts.column_names:
        prompts = prompts.map(lambda row: {"prompt": row["messages"][:-1]}, remove_columns="messages")
    trainer = GRPOTrainer(
        model=hf.prepare_model(recipe.model.name_or_path or "", recipe),
        reward_funcs=pkgutil.resolve_name(given.reward),
        args=hf.grpo_config(recipe, num_generations=given.generations, max_completion_length=given.tokens),
        train_dataset=prompts,
        processing_class=load_tokenizer(recipe.model),
        callbacks=[hf.MemoryCallback()],
    )
    if not given.stock:
        hf.attach(trainer, recipe)
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    raise SystemExit(explains_user_errors(lambda argv: 0 if main(argv) else 1)())

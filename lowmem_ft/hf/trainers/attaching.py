"""``hf.attach``: one call between a trainer's constructor and its ``train()`` that adds a recipe's techniques."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from accelerate.utils import AutocastKwargs

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.devices import of_tensors
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.handle import Handle
from lowmem_ft.hf.trainers.agreement import Agreement, Difference, agree
from lowmem_ft.hf.trainers.attached_step import AttachedOptimizer, AttachedStep
from lowmem_ft.hf.trainers.overridden_methods import overridden, problems_with_callback
from lowmem_ft.hf.trainers.prepared_model import full_precision_weights
from lowmem_ft.hf.trainers.refusals import already_attached, problems_with_trainer
from lowmem_ft.hf.trainers.sft_loss import leave_loss_to_model
from lowmem_ft.hf.trainers.sharded_refusals import problems_of_plan
from lowmem_ft.hf.trainers.sharded_trainer import enabled_before_sharding, shard_as_training_begins
from lowmem_ft.hf.trainers.trainer_files import change_files
from lowmem_ft.hf.trainers.trainer_flags import flags_off, liger_flag_off, take_switch
from lowmem_ft.planning.script_recipes.script_plan import plan_for
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.named_recipe import RecipeLike, as_budget, as_recipe
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.trainers.trainer_kinds import ROWS, Kind, Refused, Works, kind_of
from lowmem_ft.techniques.modules.model_parts import base_model
from lowmem_ft.techniques.modules.patching import call_around, set_attribute
from lowmem_ft.techniques.modules.supported_models import problems_with_model
from lowmem_ft.techniques.technique import Techniques
from lowmem_ft.training.processes.error_propagation import ending_together
from lowmem_ft.training.processes.launch import processes_here
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.runtimes.accelerate_runtime import AccelerateRanks
from lowmem_ft.training.step.budget_cap import apply_budget, lift_cap
from lowmem_ft.training.step.enabled_techniques import Build, EnabledTechniques, enable_techniques
from lowmem_ft.training.step.loss_scaling import LossScale
from lowmem_ft.training.step.machine import Machine

logger = logging.getLogger(__name__)

_MARK = "lowmem_ft"
"""The attribute under which a trainer and its model keep the recipe attached to them."""


class Attached(Handle):
    """A recipe inside a trainer; ``remove()`` leaves the plain trainer and model, with the weights as trained.

    Attributes:
        recipe: the recipe in effect: with the trainer's own values where it has them.
        techniques: the techniques that are on.
        applied: the same in words, as they were logged.
        differences: the settings for which recipe and trainer have different values, and whose the run uses.
    """

    def __init__(
        self, recipe: Recipe, applied: tuple[str, ...], differences: tuple[Difference, ...] = ()
    ) -> None:
        super().__init__()
        self.recipe = recipe
        self.techniques = Techniques()
        self.applied = applied
        self.differences = differences

    def __repr__(self) -> str:
        """Return the recipe's name with what is applied, and whether it still is."""
        what = "; ".join(words.partition(" (")[0] for words in self.applied) or "nothing"
        apart = f", {len(self.differences)} settings as the trainer has them" if self.differences else ""
        return f"<{self.recipe.name}{'' if self.active else ', removed'}: {what}{apart}>"


def attach(
    trainer: Any,
    recipe: RecipeLike | None = None,
    *,
    plan: Literal["auto"] | None = None,
    budget: Budget | str | None = None,
) -> Attached:
    """Let ``transformers.Trainer``, or one of TRL's stable trainers, train as a recipe says.

    Call it between the constructor and ``train()``. The trainer keeps its data, batches, schedule, precision, logs and
    files; the recipe brings its techniques, its optimizer, an exact norm of the gradients in float32 and clipping to
    it, and steps that change nothing if they are not finite. Settings for which both have a value, and not the same,
    are listed once in the log, with both. Checkpoints are the trainer's own, are saved and loaded
    with every weight at its place, and resume bit for bit.

    Frees, costs: as each technique says. Under bf16 or fp16 the trainer's autocast runs without its cache.
    Equals: the trainer's own losses, for techniques that are exact; see ``docs/trainers.md`` for what each trainer
    allows.
    Limits: one process, or several by DDP or FSDP 2 where a technique works with them. Weights that are streamed or
    quantised need :func:`lowmem_ft.hf.prepare_model` before the constructor. Under FSDP 2 Accelerate shards the model
    as training begins, and ``remove()`` leaves it sharded.

    Args:
        trainer: a trainer that has not trained yet.
        recipe: the recipe to switch on, or its name or path. It sets what was written as it was loaded, and what is not
            at its default; what it does not set follows the trainer.
            Of settings that both have, the recipe's clipping and hyperparameters of the optimizer are used, unless they
            were overridden by name as the arguments were made (:func:`lowmem_ft.hf.training_arguments`), and of all
            others the trainer's.
        plan: in place of a recipe, ``auto``: the memory knobs with which the trainer's own step is fastest inside the
            budget, see :func:`lowmem_ft.planning.script_recipes.script_plan.plan_for`. The trainer's checkpointing flag
            is one of them.
        budget: for the plan: a budget, or the device's part such as ``24GiB``; None: all there is.

    Returns:
        A handle that says what is on; ``remove()`` undoes it all.

    Raises:
        UserError: for everything that the trainer, its arguments or its model exclude, all at once.
        DoesNotFitError: if no plan fits.
    """
    if (recipe is None) == (plan is None) or (plan is None and budget is not None):
        raise UserError(
            "hf.attach() takes a recipe, or plan='auto' and a budget, but not both. Write hf.attach(trainer, recipe) "
            "or hf.attach(trainer, plan='auto', budget='24GiB'); a recipe has its own budget.device."
        )
    recipe = None if recipe is None else as_recipe(recipe)
    kind = kind_of(trainer)
    if is_attached(trainer):
        raise UserError(
            "hf.attach() takes a trainer and its model once, but a recipe is already attached to one of them. Call "
            "remove() on its handle first."
        )
    flags = Handle()
    if recipe is None:
        problems = [*problems_with_model(trainer.model), *already_attached(trainer)]
        if problems := [*problems, *problems_of_plan(trainer)]:
            raise UserError(*problems)
        recipe = plan_for(trainer, as_budget(budget) or Budget()).recipe
        flags.undo_first(*flags_off(trainer.args))
    try:
        agreement = settled_with(trainer, recipe, kind)
        if plan is not None:
            agreement.differences.clear()  # the plan's recipe was read from the trainer
        elif trainer.is_world_process_zero():
            _log_differences(agreement)
        return _attach(trainer, agreement, kind, flags)
    except BaseException:
        flags.remove()
        raise


def is_attached(trainer: Any) -> bool:
    """Return whether a recipe is attached to a trainer, or to its model."""
    return bool(getattr(trainer, _MARK, None) or getattr(base_model(trainer.model), _MARK, None))


def settled_with(trainer: Any, recipe: Recipe, kind: Kind) -> Agreement:
    """Return what a trainer would train with if a recipe were attached to it; nothing is changed.

    Args:
        trainer: a trainer that has not trained yet.
        recipe: the recipe to attach.
        kind: the kind of the trainer.

    Returns:
        The recipe with the trainer's values, and the differences.

    Raises:
        UserError: for all problems with it.
    """
    if problems := list(problems_with_model(trainer.model)):
        raise UserError(*problems)  # no other check works on such a model
    agreement = agree(trainer, recipe, kind)
    problems = [*already_attached(trainer), *agreement.problems]
    problems += problems_with_trainer(trainer, agreement.recipe, kind)
    if problems:
        raise UserError(*dict.fromkeys(problems))  # a strategy's rules are also rules across parts
    return agreement


def _log_differences(agreement: Agreement) -> None:
    if agreement.differences:
        overridden_by_name = all(one.is_override for one in agreement.differences)
        logger.log(
            logging.INFO if overridden_by_name else logging.WARNING,
            "Recipe and trainer differ, and the run uses:\n%s",
            "\n".join(f"  {one}" for one in agreement.differences),
        )
    if agreement.unread:
        logger.info("Neither the trainer nor hf.attach acts on: %s.", ", ".join(agreement.unread))


def _attach(trainer: Any, agreement: Agreement, kind: Kind, flags: Handle) -> Attached:
    recipe = agreement.recipe
    model, accelerator = trainer.model, trainer.accelerator
    machine = Machine(
        of_tensors(accelerator.device), num_processes_here=processes_here(accelerator.num_processes)
    )
    machine.loss_scale = LossScale(accelerator.scaler)  # autocast is left to the accelerator
    ranks = AccelerateRanks(accelerator, machine.device)
    attached = Attached(recipe, tuple(_applied(recipe, kind, model)), tuple(agreement.differences))
    attached.undo_first(flags.remove)  # undone last of all
    try:
        apply_budget(
            recipe.budget,
            machine.device,
            uses_bitsandbytes=recipe.uses_bitsandbytes,
            num_processes=ranks.num_processes,
        )
        attached.undo_first(functools.partial(lift_cap, recipe.budget))
        if kind == "SFTTrainer" and recipe.loss.chunk_tokens is not None:
            for undo in leave_loss_to_model(trainer):
                attached.undo_first(undo)
        stock_forward = base_model(model).forward
        build = Build(
            model=model,
            recipe=recipe,
            host_memory=machine.host_memory(recipe.budget, recipe.offload.folder),
            has_adapters=True,
            rows_per_micro_batch=recipe.training.per_device_train_batch_size,
            sums=recipe.training.gradient_accumulation_steps > 1,
            full_precision_weights=functools.partial(full_precision_weights, model),
            computes_loss=kind != "Trainer",
        )
        shards_later = recipe.distributed.plan().shards_rows
        if shards_later:
            enabled = enabled_before_sharding(build)
            attached.undo_first(build.in_forward.remove)
        else:
            enabled = enable_techniques(build)
            # State that waits on the host would otherwise return to a device too small for it.
            attached.undo_first(enabled.techniques.remove, enabled.optimizer.state.clear)
        attached.techniques = enabled.techniques
        for undo in _changes(trainer, recipe, kind, enabled, machine, ranks, stock_forward):
            attached.undo_first(undo)
        if shards_later:
            for undo in shard_as_training_begins(trainer, build, enabled, attached):
                attached.undo_first(undo)
        for owner in (trainer, base_model(model)):
            attached.undo_first(set_attribute(owner, _MARK, attached))
        if not shards_later:
            attached.undo_first(enabled.techniques.flush)
    except BaseException:
        attached.remove()
        raise
    logger.info("Attached to %s: %s.", type(trainer).__name__, "; ".join(attached.applied))
    return attached


def _changes(
    trainer: Any,
    recipe: Recipe,
    kind: Kind,
    enabled: EnabledTechniques,
    machine: Machine,
    ranks: Ranks,
    stock_forward: Callable[..., Any],
) -> Iterator[Callable[[], object]]:
    """Make all changes to the trainer and its accelerator, and yield the calls that undo them."""
    step = AttachedStep(
        enabled,
        machine,
        ranks,
        max_grad_norm=recipe.training.max_grad_norm,
        max_skipped_steps=recipe.training.max_skipped_steps,
    )
    yield set_attribute(trainer, "optimizer", AttachedOptimizer(enabled.optimizer, step))
    yield from liger_flag_off(trainer.args)
    yield from _changes_of_accelerator(trainer, recipe, step, ranks)
    yield from change_files(trainer, enabled, ranks, in_parts=recipe.distributed.plan().shards_rows)
    if recipe.checkpointing.mode != "none":
        yield take_switch(trainer.model, trainer.args).remove
    if recipe.loss.chunk_tokens is not None:
        yield from _changes_of_loss(trainer, kind, stock_forward)
    if ranks.plan.several:
        yield call_around(trainer, "train", _train_together)
    yield call_around(trainer, "log", functools.partial(_log_with_metrics, enabled.techniques))
    yield call_around(trainer.callback_handler, "add_callback", functools.partial(_add_callback, recipe))


def _changes_of_accelerator(
    trainer: Any, recipe: Recipe, step: AttachedStep, ranks: Ranks
) -> Iterator[Callable[[], object]]:
    accelerator = trainer.accelerator
    yield set_attribute(accelerator, "clip_grad_norm_", step.clip_grad_norm)
    yield set_attribute(accelerator, "autocast_handler", AutocastKwargs(cache_enabled=False))
    if recipe.checkpointing.mode != "none" and trainer.args.ddp_find_unused_parameters is None:
        # Trainer makes this choice where it recomputes activations itself.
        handler = dataclasses.replace(accelerator.ddp_handler, find_unused_parameters=False)
        yield set_attribute(accelerator, "ddp_handler", handler)

    def note(backward: Callable[..., Any], loss: torch.Tensor, **kwargs: Any) -> Any:
        step.add(loss)
        with step.backward(is_last=accelerator.sync_gradients):
            return backward(loss, **kwargs)

    yield call_around(accelerator, "backward", note)
    model, own_forward = trainer.model, vars(trainer.model).get("forward")

    def prepare_in_place(
        prepare: Callable[..., Any],
        one: Any,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        if one is not model:
            return prepare(one, device_placement=device_placement, evaluation_mode=evaluation_mode)
        without_ddp = not evaluation_mode and ranks.goes_without_ddp(model, takes_mean=True)
        return prepare(one, device_placement=False, evaluation_mode=evaluation_mode or without_ddp)

    def forget() -> None:
        """Remove what Accelerate has added to the model since, so that the next training prepares it again."""
        accelerator.free_memory()
        trainer.model_wrapped = model
        vars(model).pop("_original_forward", None)
        vars(model).pop("_is_accelerate_prepared", None)
        vars(model).pop("forward", None)
        if own_forward is not None:
            model.forward = own_forward

    yield call_around(accelerator, "prepare_model", prepare_in_place)
    yield forget


def _changes_of_loss(
    trainer: Any, kind: Kind, stock_forward: Callable[..., Any]
) -> Iterator[Callable[[], object]]:
    """Give an evaluation logits if it wants them."""
    wants_logits, asks_itself = False, "prediction_step" in overridden(trainer, kind)

    def logits_if_wanted(chunked_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return (stock_forward if wants_logits else chunked_forward)(*args, **kwargs)

    def wanting(
        prediction_step: Callable[..., Any],
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        nonlocal wants_logits
        wants_logits = asks_itself or not prediction_loss_only
        try:
            return prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)
        finally:
            wants_logits = False

    yield call_around(base_model(trainer.model), "forward", logits_if_wanted)
    yield call_around(trainer, "prediction_step", wanting)


def _train_together(train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let an error in one process end the training of all, with its reason."""
    with ending_together(resumed_by="trainer.train(resume_from_checkpoint=True)"):
        return train(*args, **kwargs)


def _add_callback(recipe: Recipe, add: Callable[..., Any], callback: Any) -> Any:
    """Hold callbacks that are added later to the same rules."""
    if problems := list(problems_with_callback(callback, recipe)):
        raise UserError(*problems)
    return add(callback)


def _log_with_metrics(
    techniques: Techniques, log: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any
) -> Any:
    if "loss" in logs:
        logs.update(techniques.metrics())
    return log(logs, *args, **kwargs)


def _applied(recipe: Recipe, kind: Kind, model: Any) -> Iterator[str]:
    adapters = {str(one.peft_type.value) for one in getattr(model, "peft_config", {}).values()}
    for row in ROWS:
        key, verdict = recipe_keys()[row.key], row.verdict(kind)
        value = key.value_in(recipe)
        if row.by_default and isinstance(verdict, Refused):
            yield f"{key.path} off ({verdict.because})"
            continue
        if value == row.off and row.key != "optimizer.name":
            continue
        if row.key == "adapter.name" and adapters and "LORA" not in adapters:
            yield f"PEFT's {', '.join(sorted(adapters))}, as it is"
            continue
        costs = f" ({verdict.note}: {verdict.costs})" if isinstance(verdict, Works) and verdict.costs else ""
        yield key.setting(value) + costs
    norm = recipe.training.max_grad_norm
    yield "gradient norm in float32, " + ("never clipped" if norm is None else f"clipped to {norm:g}")
    yield "steps that are not finite are skipped"

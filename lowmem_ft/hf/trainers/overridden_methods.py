"""Upstream methods that a subclass of a trainer or a callback overrides: followed as in the trainer alone, or refused.

The loop stays the trainer's, so most overrides work by themselves. Refused are those that would make their own
optimizer or loop, and those that would change gradients that are already spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lowmem_ft.hf.trainers.trainer_kinds import Kind
from lowmem_ft.recipe import Recipe

_OWN_OPTIMIZER = (
    "creates an optimizer, but the recipe has one. Remove the method, or train without hf.attach()"
)
_OWN_LOOP = (
    "is a part of the training loop that hf.attach() relies on. Remove the method; callbacks, compute_loss and "
    "training_step are followed"
)
_OWN_CLIPPING = (
    "replaces clipping, but the recipe computes the norm and clips. Set max_grad_norm, or change gradients in a "
    "callback's on_pre_optimizer_step"
)
_NO_GRADIENTS = (
    "may change or read gradients, which optimizer.in_backward=true has already freed. Set it to false"
)
_NO_LOGITS = (
    "is not the method of {kind}, and may need logits, which loss.chunk_tokens={chunk_tokens} never has. Set "
    "loss.chunk_tokens=null"
)


def _names(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


def _always(recipe: Recipe) -> bool:
    return True


def _in_backward(recipe: Recipe) -> bool:
    return recipe.optimizer.in_backward


def _chunked(recipe: Recipe) -> bool:
    return recipe.loss.chunk_tokens is not None


REFUSED: Mapping[str, tuple[Callable[[Recipe], bool], str]] = {
    "create_optimizer": (_always, _OWN_OPTIMIZER),
    "create_optimizer_and_scheduler": (_always, _OWN_OPTIMIZER),
    "get_optimizer_cls_and_kwargs": (_always, _OWN_OPTIMIZER),
    "_clip_grad_norm": (_always, _OWN_CLIPPING),
    "_inner_training_loop": (_always, _OWN_LOOP),
    "_prepare_for_training": (_always, _OWN_LOOP),
    "_run_epoch": (_always, _OWN_LOOP),
    "_wrap_model": (_always, _OWN_LOOP),
    "training_step": (_in_backward, _NO_GRADIENTS),
    "_get_grad_norm": (_in_backward, _NO_GRADIENTS),
    "compute_loss": (_chunked, _NO_LOGITS),
}
"""Methods of trainers, the condition under which an override of each is refused, and the words after its name."""

FOLLOWED = _names(
    # As the trainer is made, before hf.attach.
    "__init__ _build_accelerator_args _move_model_to_device _prepare_dataset _reject_skip_prepare_without_labels",
    "_send_telemetry _validate_args create_accelerator_and_postprocess init_hf_repo",
    # Data, and how many tokens a step learns.
    "_get_collator_with_removed_columns _get_dataloader _get_eval_sampler _get_num_items_in_batch _get_train_sampler",
    "_prepare_input _prepare_inputs _remove_unused_columns _set_signature_columns_if_needed _track_num_input_tokens",
    "get_batch_samples get_eval_dataloader get_test_dataloader get_total_train_batch_size get_train_dataloader",
    "num_examples set_initial_training_values",
    # Around the loop, the loss and the schedule; refusals.py compares by name which parameters decay.
    "_finalize_training _get_learning_rate _init_training_state autocast_smart_context_manager",
    "compute_loss_context_manager create_scheduler floating_point_ops get_decay_parameter_names get_learning_rates",
    "get_num_trainable_parameters get_optimizer_group store_flos train",
    # Evaluations: waiting updates are made before each.
    "_determine_best_metric _evaluate evaluate evaluation_loop predict prediction_step",
    # Files: code that reads or writes weights finds them at their place.
    "_get_output_dir _issue_warnings_after_load _load_best_model _load_callback_state _load_from_checkpoint",
    "_load_optimizer_and_scheduler _load_rng_state _load_scaler _save _save_checkpoint _save_optimizer_and_scheduler",
    "_save_rng_state _save_scaler save_model save_state",
    # Words.
    "_finish_current_push _maybe_log_save_evaluate _push_from_checkpoint add_callback create_model_card end",
    "is_local_process_zero is_world_process_zero log log_metrics metrics_format pop_callback push_to_hub",
    "remove_callback save_metrics",
    # TRL's: rewards, log-probabilities and completions, with gradients or without.
    "_calculate_rewards _compute_loss _generate _generate_and_score_completions _generate_single_turn",
    "_get_per_token_logps_and_entropies _get_tool_suffix_ids _log_completion_extra _log_metric _precompute_ref_logps",
    "_tokenize_prompts _tool_call_loop compute_ref_log_probs get_gamma_weights get_high_entropy_mask",
    "get_off_policy_mask",
)
"""Methods of trainers that attached training calls when, and with what, the trainer alone would."""

UNREACHED = _names(
    # FSDP, tensor and context parallelism, expert parallelism: refused.
    "_defer_fsdp_gradient_reduction _has_mixed_mesh_grads _mixed_mesh_grad_norm _prepare_context_parallel_inputs",
    "_sync_replicated_trainable_parameters get_cp_size get_sp_size get_tp_size",
    # A hyperparameter search makes models by model_init, and auto_find_batch_size starts over: refused.
    "_hp_search_setup _report_to_hp_search _tune_save_checkpoint _update_auto_batch_size call_model_init",
    "hyperparameter_search",
)
"""Methods of trainers that run only under arguments and launches that are refused themselves."""

REFUSED_MOMENTS: Mapping[str, tuple[Callable[[Recipe], bool], str]] = {
    "on_pre_optimizer_step": (_in_backward, _NO_GRADIENTS)
}
"""Moments of callbacks, likewise."""

FOLLOWED_MOMENTS = _names(
    "on_epoch_begin on_epoch_end on_evaluate on_init_end on_log on_optimizer_step on_predict",
    "on_prediction_step on_push_begin on_save on_step_begin on_step_end on_substep_end on_train_begin",
    "on_train_end",
)
"""Moments of callbacks that get the model, the optimizer and the control that the trainer alone would give them."""


_LIBRARIES = ("transformers", "trl")


def overridden(trainer: Any, kind: Kind) -> dict[str, str]:
    """Return a trainer's methods that are not upstream's, with their owner: a subclass, or the object they were set on.

    Args:
        trainer: a trainer of ``kind``'s class, or of one derived from it.
        kind: the class upstream.
    """
    ancestors: list[type] = list(type(trainer).__mro__)
    upstream = next(one for one in ancestors if one.__name__ == kind and _library(one) in _LIBRARIES)
    names = [
        name for name in dir(upstream) if callable(getattr(upstream, name)) and not name.startswith("__")
    ]
    owners = {name: kind for name in names if _library(getattr(upstream, name)) not in _LIBRARIES}
    for one in reversed(ancestors[: ancestors.index(upstream)]):
        owners |= {name: one.__name__ for name in names if name in vars(one)}
    return owners | {name: type(trainer).__name__ for name in names if name in vars(trainer)}


def _library(one: Any) -> str:
    """Return the package that a class or a function comes from."""
    return str(getattr(one, "__module__", "")).partition(".")[0]


def problems_with_overrides(trainer: Any, recipe: Recipe, kind: Kind) -> Iterator[str]:
    """Yield a problem for each override, by a subclass or a callback, that does not work with a recipe.

    Args:
        trainer: the trainer whose class, own methods and callbacks are inspected.
        recipe: the recipe with the trainer's values.
        kind: the kind of the trainer.
    """
    for name, owner in overridden(trainer, kind).items():
        applies, why = REFUSED.get(name, (None, ""))
        if applies is not None and applies(recipe):
            words = why.format(kind=kind, chunk_tokens=recipe.loss.chunk_tokens)
            yield f"{owner}.{name} {words}."
    for callback in trainer.callback_handler.callbacks:
        yield from problems_with_callback(callback, recipe)


def problems_with_callback(callback: Any, recipe: Recipe) -> Iterator[str]:
    """Yield a problem for each moment of a callback or its class that does not work with a recipe; upstream's do."""
    kind = callback if isinstance(callback, type) else type(callback)
    for name, (applies, why) in REFUSED_MOMENTS.items():
        owner = callback if name in vars(callback) else next(one for one in kind.__mro__ if name in vars(one))
        if _library(owner) not in _LIBRARIES and applies(recipe):
            yield f"{kind.__name__}.{name} {why}."

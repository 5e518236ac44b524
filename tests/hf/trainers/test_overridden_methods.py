"""What people override of a trainer, and what their callbacks do: as without ``hf.attach``, or refused by name."""

from __future__ import annotations

import inspect

import pytest
import torch
from attached_trainers import IN_ONE_BATCH, attached_trainer, problems_of, trainer_of, weights_of
from transformers import Trainer, TrainerCallback

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.upstream.tested import is_before
from lowmem_ft.hf.trainers.overridden_methods import REFUSED, REFUSED_MOMENTS
from lowmem_ft.recipe.trainers.trainer_kinds import KINDS


def _names(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


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
    "_calculate_rewards _compute_kl_logps _compute_loss _generate _generate_and_score_completions",
    "_generate_single_turn _get_last_hidden_state _get_per_token_logps_and_entropies _get_tool_suffix_ids",
    "_log_completion_extra _log_metric _precompute_ref_logps",
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

FORMER = _names("_chunked_logps _compute_ref_log_probs _full_logits_logps")
"""Methods of TRL before 1.15 for log-probabilities, followed as those of later versions."""
LATER = _names("_defer_fsdp_gradient_reduction")
"""Those of the lists that transformers has from 5.23 on."""

FOLLOWED_MOMENTS = _names(
    "on_epoch_begin on_epoch_end on_evaluate on_init_end on_log on_optimizer_step on_predict",
    "on_prediction_step on_push_begin on_save on_step_begin on_step_end on_substep_end on_train_begin",
    "on_train_end",
)
"""Moments of callbacks that get the model, the optimizer and the control that the trainer alone would give them."""

IN_BACKWARD = ("accumulation.order=vertical", "checkpointing.mode=full", "optimizer.in_backward=true")


def methods_of(kind):
    """Those that its own file defines."""
    return {
        name
        for name, value in vars(kind).items()
        if (callable(value) or isinstance(value, (staticmethod, classmethod)))
        and name not in inspect.__dict__
        if name == "__init__" or not name.startswith("__")
    }


def upstream_classes():
    import trl

    named = [Trainer, *(getattr(trl, name) for name in KINDS if name != "Trainer")]
    return {one for kind in named for one in kind.__mro__ if one is not object}


def test_every_method_upstream_has_is_followed_or_refused():
    """A new version that adds one fails here: somebody has to read what it does."""
    theirs = set().union(*map(methods_of, upstream_classes()))
    assert len(theirs) > 100
    lists = [REFUSED.keys(), FOLLOWED, UNREACHED]
    known = set().union(*lists)
    assert sum(map(len, lists)) == len(known)
    if is_before("trl", (1, 15)):
        known |= FORMER
    if is_before("transformers", (5, 23)):
        known -= LATER
    assert theirs - known == set()
    assert known - theirs == set()


def test_so_is_every_moment_of_a_callback():
    theirs = {name for name in vars(TrainerCallback) if name.startswith("on_")}
    assert theirs == REFUSED_MOMENTS.keys() | FOLLOWED_MOMENTS
    assert not REFUSED_MOMENTS.keys() & FOLLOWED_MOMENTS


def subclass(name):
    def method(self, *args, **kwargs):
        return getattr(Trainer, name)(self, *args, **kwargs)

    return type("Theirs", (Trainer,), {name: method})


ALWAYS = [name for name, (applies, _) in REFUSED.items() if applies.__name__ == "_always"]


@pytest.mark.parametrize("name", ALWAYS)
def test_an_optimizer_or_a_loop_of_ones_own_is_refused(name, tmp_path):
    trainer, _ = trainer_of(tmp_path, kind=subclass(name))
    (problem,) = problems_of(trainer)
    assert problem.startswith(f"Theirs.{name} ")
    assert problem.endswith(".")


@pytest.mark.parametrize("name", ["training_step", "_get_grad_norm"])
def test_gradients_that_are_spent_in_backward_are_nobodys_to_change(name, tmp_path):
    trainer, _ = trainer_of(tmp_path, kind=subclass(name), fields=IN_ONE_BATCH)
    (problem,) = problems_of(trainer, *IN_BACKWARD)
    assert problem.startswith(f"Theirs.{name} may change or read gradients, which optimizer.in_backward=true")
    alone, _ = trainer_of(tmp_path, fields=IN_ONE_BATCH)
    setattr(alone, name, getattr(alone, name))  # put on the object, which many do
    assert f"Trainer.{name} may change" in problems_of(alone, *IN_BACKWARD)[0]


def test_a_method_that_is_put_into_the_class_is_seen(tmp_path, monkeypatch):
    def training_step(self, *args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(Trainer, "training_step", training_step)
    trainer, _ = trainer_of(tmp_path, fields=IN_ONE_BATCH)
    assert "Trainer.training_step may change" in problems_of(trainer, *IN_BACKWARD)[0]


class ZeroesGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        zero_gradients(model)


class StepZeroes(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        zero_gradients(model)
        return loss


def zero_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


@pytest.mark.parametrize(
    "settings", [(), IN_BACKWARD[:2], ("offload.optimizer=host", "optimizer.state=bf16")], ids=str
)
@pytest.mark.parametrize("who", ["callback", "training_step"])
def test_gradients_that_are_changed_before_the_step_are_what_it_takes(settings, who, tmp_path):
    kind = StepZeroes if who == "training_step" else Trainer
    trainer, _, _ = attached_trainer(tmp_path, *settings, dtype=torch.bfloat16, kind=kind)
    if who == "callback":
        trainer.add_callback(ZeroesGradients())
    before = weights_of(trainer.model)
    trainer.train()
    assert all(weight.equal(before[name]) for name, weight in weights_of(trainer.model).items())


def test_a_callback_that_changes_gradients_is_refused_with_updates_in_backward(tmp_path):
    trainer, _ = trainer_of(tmp_path, fields=IN_ONE_BATCH)
    trainer.add_callback(ZeroesGradients)
    (problem,) = problems_of(trainer, *IN_BACKWARD)
    assert problem.startswith("ZeroesGradients.on_pre_optimizer_step may change")
    later, _, handle = attached_trainer(tmp_path, *IN_BACKWARD)
    for callback in (ZeroesGradients, ZeroesGradients()):
        with pytest.raises(UserError, match=r"ZeroesGradients\.on_pre_optimizer_step"):
            later.add_callback(callback)
    handle.remove()
    later.add_callback(ZeroesGradients())


class AsksForLogits(Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            outputs = model(**inputs)
        assert outputs.logits is not None
        return outputs.loss, None, None


def test_an_evaluation_of_ones_own_has_its_logits(tmp_path):
    trainer, meter, _ = attached_trainer(tmp_path, kind=AsksForLogits, fields={"max_steps": 1})
    trainer.train()
    alone, stock = trainer_of(tmp_path, fields={"max_steps": 1})
    alone.train()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(alone.evaluate()["eval_loss"], abs=2e-5)
    assert meter.losses == pytest.approx(stock.losses, abs=2e-5)


WEIGHT = "model.layers.0.mlp.up_proj.weight"


class ZeroesAWeight(TrainerCallback):
    """Once, behind the first step: what comes after are small steps from there."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            model.get_parameter(WEIGHT).data.zero_()  # torch keeps no count of this


@pytest.mark.parametrize("master", ["fp32", "split16", "split24"])
@pytest.mark.parametrize("settings", [(), IN_BACKWARD, ("offload.optimizer=host",)], ids=str)
def test_a_weight_that_a_callback_writes_stays_written(master, settings, tmp_path):
    """Its master follows: it must not bring the old value back, nor make no number of a 0 and old lower bits."""
    trainer, _, _ = attached_trainer(
        tmp_path,
        f"optimizer.master={master}",
        *settings,
        dtype=torch.bfloat16,
        fields={"learning_rate": 1e-5},
    )
    assert trainer.model.get_parameter(WEIGHT).abs().max() > 1e-2
    trainer.add_callback(ZeroesAWeight())
    trainer.train()
    assert trainer.model.get_parameter(WEIGHT).abs().max() <= 3 * 1.1e-5  # three steps of the learning rate

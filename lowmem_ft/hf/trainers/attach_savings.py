"""The savings of ``hf.attach`` in a user's script: it runs once more, with every exact technique attached."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import traceback
from dataclasses import dataclass
from typing import Any

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.hf.trainers.attaching import attach, is_attached, settled_with
from lowmem_ft.planning.script_recipes.loss_probe import LossProbe
from lowmem_ft.planning.script_recipes.script_model import weights_type
from lowmem_ft.planning.script_recipes.script_optimizer import optimizer_config
from lowmem_ft.planning.script_recipes.untranslated import Reading
from lowmem_ft.planning.script_runs import ScriptEstimate
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.space.remediations import Remediation, remediations_for
from lowmem_ft.recipe.space.search_space import with_settings
from lowmem_ft.recipe.trainers.trainer_kinds import DECIDED_BY_A_TRAINER, Kind, kind_of, refused_defaults
from lowmem_ft.techniques.modules.model_parts import ModelParts

_CHUNKS = "loss.chunk_tokens"

_OF_THE_OPTIMIZER = ("optimizer.name", "optimizer.master", "optimizer.state")

_NOT_SWITCHED = (*DECIDED_BY_A_TRAINER, *_OF_THE_OPTIMIZER, "tiling", "checkpointing.mlp_activation")
"""Keys and groups that stay as the script has them.

Activations of MLPs are excluded, as all layers are checkpointed already. So are tiles: on top of the others they freed
at most 3% of the peak of an 8B LoRA and of SmolLM2, for steps 4 and 13% longer and traces two thirds longer.
"""


@dataclass(frozen=True, kw_only=True)
class Savings:
    """A script unchanged, and with every exact technique that can be attached to its trainer.

    Args:
        settings: settings of the attached recipe, as a user types them.
        before: the estimate of the script.
        after: the estimate of the script with the recipe attached.
    """

    settings: tuple[str, ...]
    before: ScriptEstimate
    after: ScriptEstimate

    @property
    def is_one(self) -> bool:
        """True if the script takes less memory with the recipe."""
        return self.after.estimate.process_peak_bytes < self.before.estimate.process_peak_bytes

    def __str__(self) -> str:
        """Return both peaks, both times, and the settings."""
        before, after = self.before.estimate, self.after.estimate
        words = (
            f"{format_bytes(after.process_peak_bytes)} in place of {format_bytes(before.process_peak_bytes)}"
        )
        if before.step is not None and after.step is not None:
            words += f", and {after.step.seconds:.3g} s a step in place of {before.step.seconds:.3g}"
        return f"{words}, with {shlex.join(self.settings)}; measured by running this script again with them"

    def to_json(self) -> dict[str, Any]:
        """Return the settings, and both peaks and times."""
        both = (self.before.estimate, self.after.estimate)
        return {
            "settings": list(self.settings),
            "process_peak_bytes": [each.process_peak_bytes for each in both],
            "step_seconds": [each.step and each.step.seconds for each in both],
        }


class TrainerSeen:
    """Finds out what could be attached to the last trainer that was about to train, or why nothing can.

    Attributes:
        problems: why nothing can be attached.
        is_there: whether there was a trainer.
        failure: the traceback of an error in the search, which is a bug of ours and not the script's.
    """

    def __init__(self) -> None:
        self.is_there = False
        self.problems: tuple[str, ...] = ()
        self.failure = ""
        self._found: _Found | None = None

    def __call__(self, trainer: Any) -> None:
        """Inspect a trainer before it trains."""
        self.is_there, self.problems, self.failure, self._found = True, (), "", None
        try:
            self._found = _found_in(trainer, kind_of(trainer))
        except UserError as error:
            self.problems = error.problems
        except Exception:  # words alone, as its frames would keep tensors alive
            self.failure = traceback.format_exc()

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of a recipe with every exact technique that can be attached to the trainer, as a user types them.

        The optimizer stays that of the trainer's arguments, with masters and state in the types that it has there.
        Empty: the trainer has all that is exact, or nothing can be attached. No virtual GPU may be running: a loss has
        no values on it to compare.
        """
        settings = {} if self._found is None else self._found.settings
        return Remediation(settings=settings, why="").overrides if settings else ()

    def attach_to(self, trainer: Any) -> None:
        """Attach a recipe with the settings to the same trainer, in another run of its script."""
        assert self._found is not None
        attach(trainer, with_settings(Recipe(), self._found.settings))


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The techniques that a trainer has, and those that it allows.

    Args:
        own: settings that describe what it has.
        attached: settings of every exact technique that it lacks; still open is whether its loss is the one that
            ``loss.chunk_tokens`` computes.
        unsaid: keys to leave out of the settings, as the trainer refuses the recipe's default.
        loss: the probe that answers the open question.
    """

    own: dict[str, Any]
    attached: dict[str, Any]
    unsaid: frozenset[str]
    loss: LossProbe

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """All settings; empty if nothing is left to attach."""
        attached = dict(self.attached)
        if attached.get(_CHUNKS) is not None and not self.loss.can_be_chunked():
            del attached[_CHUNKS]
        if not attached:
            return {}
        return {key: value for key, value in {**self.own, **attached}.items() if key not in self.unsaid}


def _found_in(trainer: Any, kind: Kind) -> _Found:
    if is_attached(trainer):
        raise UserError("The script attaches a recipe itself.")
    own = _as_it_is(trainer)
    recipe = settled_with(trainer, with_settings(Recipe(), own), kind).recipe
    own |= _changed(recipe, "checkpointing.")  # a flag of the trainer may have asked for it
    length = getattr(trainer.args, "max_length", None)
    recipe = with_settings(recipe, {"data.max_length": length})
    attached: dict[str, Any] = {}
    for way in remediations_for(recipe):
        if way.is_exact_for(recipe) and not any(key.startswith(_NOT_SWITCHED) for key in way.settings):
            more = {**attached, **way.settings}
            if _is_possible(trainer, {**own, **more}, kind):
                attached = more
    # Defaults of a recipe that a trainer refuses are switched off without being mentioned.
    unsaid = frozenset(row.key for row in refused_defaults(Recipe(), kind))
    return _Found(own=own, attached=attached, unsaid=unsaid, loss=LossProbe(trainer.model))


def _as_it_is(trainer: Any) -> dict[str, Any]:
    """Return settings for the trainer's own optimizer and loss, where they differ from a recipe's defaults."""
    reading, is_adapted = Reading(), hasattr(trainer.model, "get_base_model")
    keeps_no_masters = weights_type(trainer.model) == "bfloat16" and not is_adapted
    optimizer = optimizer_config(
        trainer.args, trainer.model, trainer.optimizer, keeps_no_masters=keeps_no_masters, reading=reading
    )
    if reading.problems:
        raise UserError(*reading.problems)
    own = dataclasses.replace(Recipe(), optimizer=optimizer)
    needed = {"model.dtype": "bfloat16"} if keeps_no_masters else {}
    return {_CHUNKS: None, **needed, **_changed(own, *_OF_THE_OPTIMIZER)}


def _changed(recipe: Recipe, *paths: str) -> dict[str, Any]:
    """Return values other than the defaults, for keys with one of these prefixes."""
    keys = (key for path, key in recipe_keys().items() if path.startswith(paths))
    return {key.path: key.value_in(recipe) for key in keys if key.value_in(recipe) != key.default}


def _is_possible(trainer: Any, settings: dict[str, Any], kind: Kind) -> bool:
    try:
        recipe = settled_with(trainer, with_settings(Recipe(), settings), kind).recipe
        if recipe.checkpointing.mode != "none":
            ModelParts(trainer.model).text_layers()
    except UserError:
        return False
    return True

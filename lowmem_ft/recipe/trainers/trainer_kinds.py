"""The table of trainers that a recipe can be attached to, and of the techniques that each of them allows.

The errors of :func:`lowmem_ft.hf.attach` and ``docs/trainers.md`` read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import recipe_keys

Kind = Literal[
    "Trainer",
    "SFTTrainer",
    "DPOTrainer",
    "KTOTrainer",
    "GRPOTrainer",
    "RLOOTrainer",
    "DistillationTrainer",
    "RewardTrainer",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

COMPUTES_ITS_LOSS: Mapping[Kind, str] = {
    **dict.fromkeys(
        ("DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer"),
        "it computes log-probabilities by TRL's own head, which never has all logits at once either",
    ),
    "DistillationTrainer": "it compares two models' logits by TRL's own head, which never has all of them at once",
    "RewardTrainer": "it compares the scores of two answers, and its model has no logits of tokens",
}
"""The trainers whose loss is not that of the model's labels, and what it is: a chunked loss cannot take its place."""


@dataclass(frozen=True)
class Works:
    """A technique that a trainer allows.

    Args:
        note: what it requires; empty: nothing.
        costs: what the trainer loses by it, which is logged; empty: nothing.
    """

    note: str = ""
    costs: str = ""


@dataclass(frozen=True)
class Refused:
    """A technique that a trainer does not allow.

    Args:
        because: a clause about that trainer.
    """

    because: str


Verdict = Works | Refused


@dataclass(frozen=True, kw_only=True)
class Row:
    """A recipe key whose values switch a technique on, and its verdict under each trainer.

    Args:
        key: its dotted path.
        note: what it requires under every trainer that is not in ``under``; empty: nothing.
        under: the verdicts of trainers that differ.
        by_default: whether the key's default switches it on. A trainer that refuses it then trains without it, unless
            the recipe sets another value.
        details: keys that say more about it.
        in_place: whether it can be switched on once a trainer exists: it takes the model and its batches as they are.
    """

    key: str
    note: str = ""
    under: Mapping[Kind, Verdict] = field(default_factory=dict)
    by_default: bool = False
    details: tuple[str, ...] = ()
    in_place: bool = True

    def verdict(self, kind: Kind) -> Verdict:
        """Return the verdict under a trainer."""
        return self.under.get(kind, Works(self.note))

    def problem(self, recipe: Recipe, kind: Kind) -> str | None:
        """Return why this recipe cannot be attached to a trainer; None if this key is not the reason."""
        key, verdict = recipe_keys()[self.key], self.verdict(kind)
        value = key.value_in(recipe)
        if isinstance(verdict, Works) or value in (key.default, self.off):
            return None
        return f"{key.setting(value)} does not work under {kind}: {verdict.because}. Set {key.setting(self.off)}."

    @property
    def off(self) -> Any:
        """The value that switches it off."""
        return None if self.by_default else recipe_keys()[self.key].default


_NO_LABELS: Mapping[Kind, Verdict] = {kind: Refused(why) for kind, why in COMPUTES_ITS_LOSS.items()}
_OWN_BATCHES = Refused("its loss is over the rows of each micro-batch as the trainer made it")
_READS_HEAD = Refused("TRL's head reads the weights of lm_head itself, but they would be on the host")
_UNSCALED = Refused(
    "a trainer may scale the loss before backward, and the head's gradient is summed before that"
)
_WHOLE_ROWS = Refused("a trainer gives whole rows to the model; `lowmem-ft train` spreads them")
_IN_TURN = "one batch of all rows, `gradient_accumulation_steps=1`"
_PREPARED = "`hf.prepare_model` before the constructor"

ROWS: tuple[Row, ...] = (
    Row(
        key="loss.chunk_tokens",
        under={
            "Trainer": Works("an evaluation that wants logits gets them from the model's own forward"),
            "SFTTrainer": Works(
                "in place of TRL's head", costs="`entropy` and `mean_token_accuracy` are not logged"
            ),
            **_NO_LABELS,
        },
        by_default=True,
    ),
    Row(key="tiling.head", note="with `loss.chunk_tokens`", under=_NO_LABELS),
    Row(key="model.kernels"),
    Row(key="checkpointing.mode"),
    Row(key="checkpointing.mlp_activation"),
    Row(key="tiling.mlp"),
    Row(key="offload.activations"),
    Row(
        key="accumulation.order",
        note=_IN_TURN,
        under={
            "SFTTrainer": Works(f"{_IN_TURN}; no padding-free rows"),
            **dict.fromkeys(COMPUTES_ITS_LOSS, _OWN_BATCHES),
        },
        in_place=False,
    ),
    Row(key="accumulation.dtype"),
    Row(key="accumulation.fusion", under=dict.fromkeys(KINDS, _UNSCALED), in_place=False),
    Row(key="optimizer.name"),
    Row(key="optimizer.state"),
    Row(key="optimizer.master"),
    Row(key="optimizer.in_backward", note="`gradient_accumulation_steps=1`"),
    Row(key="offload.optimizer"),
    Row(
        key="offload.parameters",
        note=_PREPARED,
        under={
            "SFTTrainer": Works(f"{_PREPARED}, with `loss.chunk_tokens`"),
            **{
                kind: _READS_HEAD for kind in COMPUTES_ITS_LOSS if kind != "RewardTrainer"
            },  # whose model has none
        },
        details=("offload.resident_layers",),
        in_place=False,
    ),
    Row(key="adapter.name", note="a PEFT model"),
    Row(key="adapter.kernel", by_default=True),
    Row(key="model.quantization", note="`hf.prepare_model`"),
    Row(key="distributed.context", under=dict.fromkeys(KINDS, _WHOLE_ROWS), in_place=False),
)

DECIDED_BY_A_TRAINER = (
    "model",
    "adapter",
    "data",
    "training",
    *(key for row in ROWS if not row.in_place for key in (row.key, *row.details)),
)
"""Keys and groups that a trainer has settled once it exists: its model, data and precision, and what they depend on."""


def kind_of(trainer: Any) -> Kind:
    """Return which of the trainers it is, or is derived from.

    Raises:
        UserError: if it is not one of them.
    """
    for ancestor in type(trainer).__mro__:
        library, name = ancestor.__module__.partition(".")[0], ancestor.__name__
        if library in ("trl", "transformers") and name in KINDS:
            return name
        if library == "trl" and name.endswith("Trainer") and not name.startswith("_"):
            break
    raise UserError(
        f"hf.attach() takes {', '.join(KINDS[:-1])} or {KINDS[-1]}, got {type(trainer).__name__}. For others, enable "
        "techniques one by one with their enable_* functions."
    )


def problems_of_kind(recipe: Recipe, kind: Kind) -> Iterator[str]:
    """Yield a problem for every requested technique that a trainer refuses: rule, value and way out."""
    for row in ROWS:
        if problem := row.problem(recipe, kind):
            yield problem


def refused_defaults(recipe: Recipe, kind: Kind) -> list[Row]:
    """Return the rows that a recipe has on by default and a trainer refuses: no user asked for them; they stay off."""
    rows = (row for row in ROWS if row.by_default and isinstance(row.verdict(kind), Refused))
    return [row for row in rows if recipe_keys()[row.key].value_in(recipe) != row.off]

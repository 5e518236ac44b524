"""Real runs of the memory ladder on a CPU, for comparison with one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from ground_truth.ladder_matrix import CHANGES_THE_ORDER_OF_SUMS, plain
from measuring.cpu_matrix import Levels
from measuring.families import VOCABULARY
from torch import Tensor

from lowmem_ft.data.batches.batch import Batch
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.recipe import Recipe
from lowmem_ft.training.runtimes.accelerate_runtime import launched_runtime
from lowmem_ft.training.runtimes.build import build_session, plan_session
from lowmem_ft.training.step.step import evaluation_loss, train_step

NUM_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a run.

    Args:
        seed: seed of their tokens.
        vocabulary: number of tokens in the vocabulary.
        any_length: whether each micro-batch has a length of its own; packed rows are full.
        labels: labels in the second step's window: as in the others; none in one micro-batch; one alone; none at all.
    """

    seed: int = 0
    vocabulary: int = VOCABULARY
    any_length: bool = False
    labels: Literal["most", "none in one micro-batch", "one", "none"] = "most"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of a run.

    Args:
        losses: loss of each step, and then of the trained model on other rows.
        weights: the floating-point weights of the trained model, by name.
    """

    losses: list[float]
    weights: Mapping[str, Tensor]


def outcome_of(
    recipe: Recipe, folder: Path, rows: Rows | None = None, *, num_steps: int = NUM_STEPS
) -> Outcome:
    """Train a few steps, evaluate, and remove every technique again.

    Args:
        recipe: a recipe on the CPU, with random weights.
        folder: for the run's files.
        rows: the rows to train on.
        num_steps: steps before the evaluation.
    """
    rows = rows or Rows()
    runtime = launched_runtime(recipe.training, folder)
    plan = plan_session(recipe, runtime, load_model_config(recipe.model))
    torch.manual_seed(0)
    session = build_session(recipe, runtime, plan, num_training_steps=num_steps)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(rows.seed)
    losses = []
    for step in range(num_steps):
        result = train_step(session, _window(recipe, rows, generator, step))
        assert result.applied
        losses.append(result.loss)
    session.techniques.flush()
    session.model.eval()
    loss_sum, num_label_tokens = evaluation_loss(session, [_batch(recipe, rows, generator)])
    session.close()
    weights = session.unwrapped_model.state_dict().items()
    return Outcome(
        losses=[*losses, float(loss_sum / num_label_tokens)],
        weights={name: weight.clone() for name, weight in weights if weight.is_floating_point()},
    )


def tolerance(levels: Levels) -> float:
    """Return the relative tolerance of a loss: 0 if no number changes, else a few roundings of the computing type."""
    same = plain(levels)
    changed = {factor for factor in levels if levels[factor] != same[factor]}
    # Squares of gradients are summed in another order, so the clip's coefficient may differ in its last bit.
    clips_in_backward = levels["update"] == "in_backward" and levels["clipping"] == "clipped"
    if changed.isdisjoint(CHANGES_THE_ORDER_OF_SUMS) and not clips_in_backward:
        return 0.0
    return 2e-5 if levels["weights"] == "fp32" and levels["state"] == "fp32" else 5e-3


def _window(recipe: Recipe, rows: Rows, generator: torch.Generator, step: int) -> list[Batch]:
    window = [_batch(recipe, rows, generator) for _ in range(recipe.training.gradient_accumulation_steps)]
    if step != 1 or rows.labels == "most":
        return window
    first, *others = window
    if rows.labels == "none in one micro-batch":
        return [_with_labels(first, 0), *others]
    return [_with_labels(first, int(rows.labels == "one")), *(_with_labels(batch, 0) for batch in others)]


def _batch(recipe: Recipe, rows: Rows, generator: torch.Generator) -> Batch:
    """Return rows of which some begin with tokens without a label or, packed, hold several documents."""
    num_rows, length = recipe.training.per_device_train_batch_size, recipe.data.max_length
    assert length is not None, "the matrix sets it"
    if rows.any_length and not recipe.data.packing:
        length = _below(length, generator, least=4)
    input_ids_BT = torch.randint(3, rows.vocabulary, (num_rows, length), generator=generator)
    labels_BT = input_ids_BT.clone()
    labels_BT[:, : _below(length // 2, generator)] = -100
    position_ids_BT = None
    if recipe.data.packing:
        cut = _below(length, generator)
        position_ids_BT = torch.cat([torch.arange(cut), torch.arange(length - cut)]).repeat(num_rows, 1)
        labels_BT[:, cut] = -100
    return Batch(
        input_ids_BT=input_ids_BT,
        labels_BT=labels_BT,
        position_ids_BT=position_ids_BT,
        sample_ids=tuple(range(num_rows)),
        num_label_tokens=int((labels_BT != -100).sum()),
        num_tokens=num_rows * length,
    )


def _below(limit: int, generator: torch.Generator, least: int = 1) -> int:
    return int(torch.randint(least, limit, (1,), generator=generator))


def _with_labels(batch: Batch, num_label_tokens: int) -> Batch:
    """Return the batch with that many labels, at the end of its last row."""
    labels_BT = torch.full_like(batch.labels_BT, -100)
    labels_BT[-1, labels_BT.shape[1] - num_label_tokens :] = 7
    return Batch(
        input_ids_BT=batch.input_ids_BT,
        labels_BT=labels_BT,
        position_ids_BT=batch.position_ids_BT,
        sample_ids=batch.sample_ids,
        num_label_tokens=num_label_tokens,
        num_tokens=batch.num_tokens,
    )

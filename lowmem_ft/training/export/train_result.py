"""The result of a finished run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lowmem_ft.training.evaluation.held_out_loss import EvaluationResult


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Result of a finished run.

    Args:
        model_folder: the trained model; ``from_pretrained`` loads it.
        output_dir: the run folder.
        steps: optimizer steps taken in all, resumed ones included.
        loss: training loss of the last step, in nats per label token.
        evaluation: result of the finished model on the held-out data, if the recipe has any.
        best_step: the step whose weights the finished model has, with ``training.load_best_model_at_end``; else None.
        stopped: in the main process, why early stopping or another callback ended the run; None: it took all steps.
    """

    model_folder: Path
    output_dir: Path
    steps: int
    loss: float
    evaluation: EvaluationResult | None
    best_step: int | None = None
    stopped: str | None = None

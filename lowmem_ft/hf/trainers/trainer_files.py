"""A trainer's own saving and loading, with every weight and all state where it belongs and waiting updates made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lowmem_ft.hf.trainers.sharded_checkpoints import load_parts, save_in_parts
from lowmem_ft.hf.trainers.whole_checkpoints import save_whole
from lowmem_ft.optimizers import ChunkedOptimizer
from lowmem_ft.techniques.modules.patching import call_around
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.step.enabled_techniques import EnabledTechniques


def change_files(
    trainer: Any, enabled: EnabledTechniques, ranks: Ranks, *, in_parts: bool
) -> Iterator[Callable[[], object]]:
    """Let a trainer read and write weights and state at their place; yield the calls that undo it.

    Args:
        trainer: a trainer of any kind; with several processes, call it in each.
        enabled: the techniques that are on, and the optimizer.
        ranks: the trainer's processes.
        in_parts: whether they share the model, and each writes its own rows.
    """

    def at_rest(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with enabled.techniques.at_rest():
            return method(*args, **kwargs)

    def load_at_rest(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with enabled.techniques.at_rest():
            result = method(*args, **kwargs)
            if isinstance(enabled.optimizer, ChunkedOptimizer):
                enabled.optimizer.adopt_weights()
            return result

    def flushed(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        enabled.techniques.flush()
        return method(*args, **kwargs)

    if in_parts:
        yield from save_in_parts(trainer, enabled, ranks)
    yield from load_parts(trainer, enabled)
    yield from save_whole(trainer)
    for names, around in (
        (("_save_checkpoint", "save_model", "_load_optimizer_and_scheduler"), at_rest),
        (("_load_from_checkpoint", "_load_best_model"), load_at_rest),
        (("evaluate", "predict", "evaluation_loop"), flushed),
    ):
        for name in names:
            yield call_around(trainer, name, around)

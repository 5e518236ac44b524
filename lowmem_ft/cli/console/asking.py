"""The start of a command: check the request, then import the slow libraries."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from lowmem_ft.cli.console.spinner import libraries_loading

if TYPE_CHECKING:
    from lowmem_ft.data.config import DataConfig
    from lowmem_ft.recipe import Recipe
    from lowmem_ft.recipe.request.request import Purpose, Request
    from lowmem_ft.training.export.model_source import ModelSource

_ANSWERS = {
    "data": "lowmem_ft.training.run.data_inspection",
    "estimate": "lowmem_ft.planning.estimator",
    "plan": "lowmem_ft.planning.planner",
    "rehearse": "lowmem_ft.planning.rehearsal",
}
"""For each command, what answers it, and imports the libraries."""

_READ_DATA = ("data", "rehearse")
"""Commands that read data. Small local data is checked before torch is imported."""


def settled(
    purpose: Purpose,
    words: Sequence[str],
    gpu: str | None = None,
    *,
    problems: Iterable[str] = (),
    further: Callable[[Request], None] | None = None,
) -> Request:
    """Return the request of a command, after every check that needs no torch.

    Args:
        purpose: the name of the command.
        words: as typed, without options.
        gpu: the value of ``--gpu``.
        problems: what is wrong with other options.
        further: a check of the command's own.

    Raises:
        UserError: lists all problems.
    """
    from lowmem_ft.cli.console.logs import set_up_logging, take_over_library_logs
    from lowmem_ft.recipe.request.request import Request

    set_up_logging()
    if purpose in ("estimate", "rehearse"):  # whose reports say what was chosen and why
        logging.getLogger("lowmem_ft").setLevel(logging.WARNING)
    request = Request.of(purpose, words, gpu, problems)
    request.check(*([lambda: further(request)] if further else []))
    if purpose in _READ_DATA:
        check_data(request.recipe.data)
    with libraries_loading():
        importlib.import_module(_ANSWERS[purpose])
    take_over_library_logs()
    return request


def source_and_recipe(
    model: str, settings: Sequence[str], *, base: str | None, reads_data: bool = True
) -> tuple[ModelSource, Recipe]:
    """Return a trained model, or a plain one, and the recipe of its forward passes, with its files checked.

    Args:
        model: as typed, see ``find_model``.
        settings: as typed.
        base: the base of an adapter; None: its own.
        reads_data: whether the command reads data, which is then looked at.

    Raises:
        UserError: lists all problems.
    """
    from lowmem_ft.cli.console.logs import set_up_logging
    from lowmem_ft.recipe.checks.path_checks import check_paths_of_evaluation
    from lowmem_ft.training.export.model_source import find_model, forward_recipe

    set_up_logging()
    source = find_model(model, base=base)
    recipe = forward_recipe(source, settings)
    check_paths_of_evaluation(recipe, reads_data=reads_data)
    if reads_data:
        check_data(recipe.data)
    return source, recipe


def check_data(config: DataConfig) -> None:
    """Look at small local data; imports datasets, which takes a second or two, but neither torch nor transformers.

    Raises:
        UserError: if no run can read it.
    """
    from lowmem_ft.cli.console.logs import take_over_library_logs
    from lowmem_ft.data.early_checks import check_small_local_data

    take_over_library_logs()
    check_small_local_data(config)

"""The start of a command: check the request, then import the slow libraries.

Its own imports stand within functions, as the help of a command waits for none of them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from lowmem_ft.cli.console.spinner import progress_line
from lowmem_ft.foundation.system.garbage_collector import libraries_imported

if TYPE_CHECKING:
    from lowmem_ft.data.config import DataConfig
    from lowmem_ft.recipe import Recipe
    from lowmem_ft.recipe.request.request import Purpose, Request
    from lowmem_ft.training.export.model_source import ModelSource

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
    from lowmem_ft.recipe.request.request import Request

    start_logging(is_quiet=purpose in ("estimate", "rehearse"))
    request = Request.of(purpose, words, gpu, problems)
    request.check(*([lambda: further(request)] if further else []))
    if purpose in _READ_DATA:
        check_data(request.recipe.data)
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
    from lowmem_ft.recipe.checks.path_checks import check_paths_of_evaluation
    from lowmem_ft.training.export.model_source import find_model, forward_recipe

    start_logging()
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
    from lowmem_ft.data.early_checks import check_small_local_data

    take_over_library_logs()
    check_small_local_data(config)


def start_logging(*, is_quiet: bool = False) -> None:
    """Send log lines to stderr.

    Args:
        is_quiet: leaves out ours that are no warnings, for commands whose reports say what was chosen and why.
    """
    from lowmem_ft.cli.console.logs import set_up_logging

    set_up_logging()
    if is_quiet:
        logging.getLogger("lowmem_ft").setLevel(logging.WARNING)


@contextlib.contextmanager
def libraries_loading() -> Iterator[None]:
    """Say that torch and transformers are being loaded while the block does it, and let it do nothing needless."""
    with progress_line("loading torch and transformers"), libraries_imported():
        yield
    take_over_library_logs()


def take_over_library_logs() -> None:
    """Log each line of the libraries once, in our form; call this after they are imported.

    On import, huggingface_hub and datasets add handlers to their loggers, in addition to ours at the root. The readers
    of datasets log an error and then raise it, and we report what is raised in our own words.
    """
    for library in ("huggingface_hub", "datasets"):
        logging.getLogger(library).handlers.clear()
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)

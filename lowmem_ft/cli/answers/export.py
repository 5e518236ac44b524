"""A trained model as a plain folder, in 4 bits or as a GGUF file: for ``lowmem-ft merge`` and ``export``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import rich
from rich.progress import track

from lowmem_ft.cli.console.asking import start_logging, take_over_library_logs
from lowmem_ft.cli.console.output import Output
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.packages import require_package
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.recipe.checks.path_checks import check_merge, check_new_folder, check_plain_model
from lowmem_ft.recipe.command_lines import command_line, quoted
from lowmem_ft.reports.text.document import Command, Document, Pairs
from lowmem_ft.training.export.llama_cpp import check_converter
from lowmem_ft.training.export.model_source import find_model, trained_folder


def merge(options: argparse.Namespace) -> int:
    """Merge an adapter into its base.

    Args:
        options: the command's.

    Returns:
        The exit code, 0.

    Raises:
        UserError: if the adapter or the target is unfit.
    """
    start_logging()
    adapter, target = trained_folder(expand_user(options.adapter)), expand_user(options.target)
    check_merge(adapter, target, base=options.base)

    from lowmem_ft.training.export.merging import merge_into_base  # torch: after the checks

    take_over_library_logs()
    merge_into_base(adapter, target, base=options.base, dtype=options.dtype, track=_with_bar)
    return 0


def export(options: argparse.Namespace) -> int:
    """Export a model.

    Args:
        options: the command's.

    Returns:
        The exit code, 0.

    Raises:
        UserError: if the options do not go together, or the source or the target is unfit.
    """
    start_logging()
    target = expand_user(options.target)
    converter = _checked_converter(options)
    if options.quantized:
        require_package("--quantized", "bitsandbytes", "bitsandbytes")
    check_new_folder(target)
    source = find_model(options.source, base=options.base)
    if source.adapter is None:
        check_plain_model(source.model.name_or_path or "")
    if options.merged and source.adapter is None:
        raise UserError(
            f"--merged adds an adapter to its base, and {options.source} is a plain model already, which "
            "from_pretrained loads. Use it as it is, or export it with --quantized or --gguf."
        )

    # Torch: after the checks.
    from lowmem_ft.training.export.exporting import MODELFILE, export_gguf, export_quantized
    from lowmem_ft.training.export.merging import merge_into_base

    take_over_library_logs()
    if options.merged:
        assert source.adapter is not None, "refused above"
        merge_into_base(source.adapter, target, base=options.base, dtype=options.dtype, track=_with_bar)
        return 0
    output = Output()
    if options.quantized:
        comparison = export_quantized(source, target, dtype=options.dtype, track=_with_bar)
        losses = f"{_evaluation(options.source)}, without and with model.quantization={options.quantized}"
        output.add(Pairs(comparison.rows(losses), indent=0))
        return 0
    assert converter is not None, "one of the three forms is required"
    file, of_file = export_gguf(source, target, gguf_type=options.gguf, converter=converter, track=_with_bar)
    output.add(
        None
        if of_file is None
        else Pairs(of_file.rows(f"{_evaluation(options.source)} and {_evaluation(str(file))}"), indent=0),
        Document(
            "llama.cpp:",
            Command("llama-cli", "-m", str(file)),
            Command("llama-server", "-m", str(file)),
            gap=0,
        ),
        Document(
            "Ollama, which takes a chat template that it recognises from the file:",
            Command("ollama", "create", target.name.lower(), "-f", str(target / MODELFILE)),
            Command("ollama", "run", target.name.lower()),
            gap=0,
        ),
    )
    return 0


def _with_bar(layers: list[Any]) -> Iterable[Any]:
    """Show a bar while layers are merged."""
    return track(layers, description="Merging", console=rich.get_console(), transient=True)


def _evaluation(model: str) -> str:
    return quoted(command_line("evaluate", model, "data=FILE"))


def _checked_converter(options: argparse.Namespace) -> Path | None:
    """Return llama.cpp's converter for ``--gguf``; None without.

    Raises:
        UserError: if the options do not go together, or the converter or its package is not there.
    """
    if options.gguf:
        converter = check_converter(None if options.llama_cpp is None else expand_user(options.llama_cpp))
        require_package("--gguf", "gguf", "export")
        if options.dtype != "auto":
            raise UserError(
                f"--dtype is for --merged and --quantized, got {options.dtype} with --gguf {options.gguf}, which names "
                "the type. Leave it out."
            )
        return converter
    if options.llama_cpp is not None:
        raise UserError(f"--llama-cpp is for --gguf, got {options.llama_cpp} without it. Leave it out.")
    return None

"""``lowmem-ft export``: a trained model in the form that another program loads."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from lowmem_ft.cli.commands.merge import DTYPES, with_bar
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.output import Output
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.packages import require_package
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.training.export.llama_cpp import GGUF_TYPES, check_converter

_EXAMPLES = """\
examples:
  lowmem-ft export runs/7b-lora merged --merged
  lowmem-ft export runs/7b-lora small --quantized nf4
  lowmem-ft export runs/7b-lora/checkpoint-500 mine --gguf q8_0 --llama-cpp ../llama.cpp

A run stands for its model/, or else for its newest complete checkpoint. An adapter is merged into its base first, as
`lowmem-ft merge` does: --merged is that command. The model is loaded into host memory; nothing runs on a GPU. 4 bits
and GGUF files are read again by transformers, and a greedy answer is compared with the source's. An export that fails
or is interrupted leaves no OUT_DIR."""


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Export a model.

    Args:
        arguments: the source, the new folder and the form.

    Returns:
        The exit code, 0.

    Raises:
        UserError: if the options do not go together, or the source or the target is unfit.
    """
    options = _parser().parse_args(arguments)

    from lowmem_ft.cli.console.logs import set_up_logging, take_over_library_logs
    from lowmem_ft.recipe.checks.path_checks import check_new_folder, check_plain_model
    from lowmem_ft.training.export.model_source import find_model

    set_up_logging()
    target = expand_user(options.target)
    converter = _checked_converter(options)  # all checks come before the imports below, which take seconds
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

    take_over_library_logs()
    if options.merged:
        from lowmem_ft.training.export.merging import merge_into_base

        assert source.adapter is not None, "refused above"
        merge_into_base(source.adapter, target, base=options.base, dtype=options.dtype, track=with_bar)
        return 0
    from lowmem_ft.reports.text.document import Command, Document, Pairs
    from lowmem_ft.training.export.exporting import MODELFILE, export_gguf, export_quantized

    output = Output()
    if options.quantized:
        comparison = export_quantized(source, target, dtype=options.dtype, track=with_bar)
        losses = f"{_evaluation(options.source)}, without and with model.quantization={options.quantized}"
        output.add(Pairs(comparison.rows(losses), indent=0))
        return 0
    assert converter is not None, "one of the three forms is required"
    file, of_file = export_gguf(source, target, gguf_type=options.gguf, converter=converter, track=with_bar)
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


def _evaluation(model: str) -> str:
    from lowmem_ft.recipe.command_lines import command_line, quoted

    return quoted(command_line("evaluate", model, "data=FILE"))


def _checked_converter(options: Namespace) -> Path | None:
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


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft export",
        description="Write a trained model in the form that another program loads: a plain folder, a folder in 4 bits, "
        "or a GGUF file for llama.cpp and Ollama.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "source",
        metavar="RUN|MODEL|ADAPTER",
        help="a run's folder, a model's folder or hub id, or an adapter's folder",
    )
    parser.add_argument("target", metavar="OUT_DIR", type=Path, help="the new folder")
    form: Any = parser.add_mutually_exclusive_group(required=True)
    form.add_argument(
        "--merged", action="store_true", help="the adapter merged into its base, as a plain model"
    )
    form.add_argument(
        "--quantized",
        metavar="FORMAT",
        choices=("nf4",),
        help="nf4: linear layers in 4 bits, by bitsandbytes, which works on CPUs",
    )
    form.add_argument(
        "--gguf",
        metavar="TYPE",
        choices=tuple(GGUF_TYPES),
        help=f"a GGUF file of this type ({', '.join(GGUF_TYPES)}), by llama.cpp's converter, with a Modelfile for "
        "Ollama",
    )
    parser.add_argument("--llama-cpp", metavar="DIR", type=Path, help="the folder of convert_hf_to_gguf.py")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="type of unpacked weights; auto: the model's own"
    )
    parser.add_argument(
        "--base", metavar="NAME", help="hub id or folder of an adapter's base model, if it has moved"
    )
    return parser

"""``lowmem-ft export``: a trained model in the form that another program loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowmem_ft.cli.commands.merge import DTYPES
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.training.export.llama_cpp import GGUF_TYPES

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

    from lowmem_ft.cli.answers.export import export

    return export(options)


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

"""``lowmem-ft merge``: a LoRA adapter added to its base model, as a plain model folder."""

from __future__ import annotations

from pathlib import Path

from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.parser import Parser

_EXAMPLES = """\
examples:
  lowmem-ft merge runs/7b-lora merged
  lowmem-ft merge runs/7b-qlora/checkpoint-500 merged --dtype bfloat16 --base models/Qwen2.5-7B

A run stands for its model/, or else for its newest complete checkpoint. The base model is loaded into host memory in
its own type; nothing runs on a GPU. `lowmem-ft export` does the same with --merged, and also writes 4 bits or GGUF."""

DTYPES = ("auto", "float32", "bfloat16", "float16")


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Merge an adapter into its base.

    Args:
        arguments: the folder of the adapter or of its run, the new folder and options.

    Returns:
        The exit code, 0.
    """
    options = _parser().parse_args(arguments)

    from lowmem_ft.cli.answers.export import merge

    return merge(options)


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft merge",
        description="Add a LoRA adapter to the weights of its base model, computing each matrix in float32 and "
        "rounding it once, and write a model folder that from_pretrained loads.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "adapter",
        metavar="RUN|ADAPTER",
        type=Path,
        help="a run's folder, or an adapter's, with adapter_config.json",
    )
    parser.add_argument("target", metavar="OUT_DIR", type=Path, help="the new model folder")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="type of the merged weights; auto: the base's own",
    )
    parser.add_argument("--base", metavar="NAME", help="hub id or folder of the base model, if it has moved")
    return parser

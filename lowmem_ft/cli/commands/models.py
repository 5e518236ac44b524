"""``lowmem-ft models``: the model architectures that can be estimated without a network."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from lowmem_ft.catalog import Architecture, find_architecture, load_architectures
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.cli.console.tables import print_filled, print_row, print_table
from lowmem_ft.foundation.errors import ModelError, did_you_mean

COLUMNS = ("model", "parameters", "layers", "hidden", "vocabulary", "gated", "licence", "hub id")
SPARE = ("licence", "vocabulary", "hidden", "layers", "gated", "parameters")


@explains_user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Print the catalogue's models, or one of them.

    Args:
        argv: nothing, or a model's name or hub id, and ``--json``; None: those of this process.

    Returns:
        The exit code, 0.
    """
    arguments = _parser().parse_args(sys.argv[1:] if argv is None else list(argv))
    found = [_find(arguments.model)] if arguments.model else list(load_architectures().values())
    if arguments.json:
        print(json.dumps({"schema": 1, "models": [_as_json(model) for model in found]}, indent=2))
        return 0
    if arguments.model:
        _print_details(found[0])
    else:
        print_table(COLUMNS, map(_row, found), left=("model", "gated", "licence", "hub id"), spare=SPARE)
    return 0


def _find(name: str) -> Architecture:
    found = find_architecture(name)
    if found is None:
        known = load_architectures()
        raise ModelError(
            f"There is no model {name!r} in the catalogue.{did_you_mean(name.lower(), known)} `lowmem-ft models` "
            f"lists all {len(known)}; any other hub id or local folder works too, by its config.json."
        )
    return found


def _row(model: Architecture) -> tuple[str, ...]:
    text = model.text_config
    return (
        model.name,
        _billions(model.num_parameters),
        str(text.get("num_hidden_layers", text.get("n_layer"))),
        str(text.get("hidden_size", text.get("n_embd"))),
        str(text["vocab_size"]),
        "gated" if model.gated else "",
        model.license,
        model.hub_id,
    )


def _billions(num_parameters: int) -> str:
    billions = num_parameters / 1e9
    return (
        f"{billions:.3f}B" if billions < 1 else f"{billions:.2f}B" if billions < 100 else f"{billions:.0f}B"
    )


def _print_details(model: Architecture) -> None:
    print_row(COLUMNS, _row(model))
    print(f"\n{model.num_parameters:,} parameters. The same architecture on the hub:")
    for hub_id, differences in model.variants.items():
        different = ", ".join(f"{field}={value}" for field, value in differences.items())
        print_filled(f"{hub_id}{f' ({different})' if different else ''}", indent="  ")
    if not model.variants:
        print("  none in the catalogue")
    print("Sources:")
    for field, source in model.sources.items():
        print_filled(f"{field}: {source}", indent="  ")


def _as_json(model: Architecture) -> dict[str, Any]:
    return {
        "name": model.name,
        "hub_id": model.hub_id,
        "variants": dict(model.variants),
        "license": model.license,
        "gated": model.gated,
        "num_parameters": model.num_parameters,
        "sources": dict(model.sources),
        "config": dict(model.config),
    }


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft models",
        description="List the models whose architecture ships with lowmem_ft: `model=NAME` estimates them offline, "
        "gated ones too, and trains the weights of their hub id.",
        epilog="Any other hub id or local folder works too; an estimate reads only its config.json.",
    )
    parser.add_argument("model", nargs="?", metavar="NAME", help="a model's name or hub id")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser

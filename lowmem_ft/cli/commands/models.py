"""``lowmem-ft models``: the model architectures that can be estimated without a network."""

from __future__ import annotations

from typing import Any

from lowmem_ft.cli.console.catalogue import Catalogue, show
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.foundation.catalog.model_architectures import (
    Architecture,
    find_architecture,
    load_architectures,
)
from lowmem_ft.foundation.errors import ModelError, did_you_mean


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Print the catalogue's models, or one of them.

    Args:
        arguments: nothing, or a model's name or hub id, and ``--json``.

    Returns:
        The exit code, 0.
    """
    return show(_CATALOGUE, arguments)


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


def _details(model: Architecture) -> tuple[str, list[tuple[str, str]]]:
    variants = [
        (
            hub_id,
            f"({', '.join(f'{field}={value}' for field, value in differences.items())})"
            if differences
            else "",
        )
        for hub_id, differences in model.variants.items()
    ]
    sentence = f"{model.num_parameters:,} parameters. The same architecture on the hub:"
    return sentence, variants or [("none in the catalogue", "")]


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


_CATALOGUE = Catalogue(
    key="models",
    name_help="a model's name or hub id",
    description="List the models whose architecture ships with lowmem_ft: `model=NAME` estimates them offline, "
    "gated ones too, and trains the weights of their hub id.",
    epilog="Any other hub id or local folder works too; an estimate reads only its config.json.",
    load=load_architectures,
    find=_find,
    as_json=_as_json,
    row=_row,
    columns=("model", "parameters", "layers", "hidden", "vocabulary", "gated", "licence", "hub id"),
    left=("model", "gated", "licence", "hub id"),
    spare=("licence", "vocabulary", "hidden", "layers", "gated", "parameters"),
    details=_details,
)

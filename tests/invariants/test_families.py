"""One tiny model of each structure under each technique, beside what the sweep over all causal LMs has kept."""

from __future__ import annotations

import json

import pytest
from family_sweep.tries import TOLERANCE, packed_difference, try_technique
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from try_families import DATA, PAGE, is_wrong, techniques_for, with_table

KEPT: dict[str, dict[str, str]] = json.loads(DATA.read_text(encoding="utf-8"))

STRUCTURES = {
    "dense": "llama",
    "experts": "mixtral",
    "shared experts": "qwen2_moe",
    "routers that are linear layers by class": "llama4_text",
    "linear attention": "qwen3_next",
    "Mamba": "mamba",
    "sizes from a list of layers": "nemotron_h",
    "sliding windows": "gemma3_text",
    "head sizes by layer": "gemma4_text",
    "sinks": "gpt_oss",
    "latent attention": "deepseek_v3",
    "states of 4 axes": "deepseek_v4",
    "tied heads": "gpt2",
    "scaled logits": "granite",
}
TRIED = [
    *(
        (model_type, technique)
        for model_type in STRUCTURES.values()
        for technique in ("plain", "lowest rung", "LoRA")
    ),
    *((model_type, "packing") for model_type in ("llama", "mamba", "gpt_oss", "lfm2", "bloom", "opt")),
    ("deepseek_v4", "tiles"),
    *((model_type, "estimate") for model_type in ("gemma4_text", "gpt2", "llama4_text")),
    pytest.param("deepseek_v4", "estimate", marks=pytest.mark.slow),
    ("phimoe", "lowest rung"),
    ("doge", "packing"),
    ("rwkv", "LoRA"),
    ("gemma3n_text", "QLoRA"),
    pytest.param("mixtral", "FSDP2", marks=pytest.mark.slow),
]


def kind(cell: str) -> str:
    return cell.partition(":")[0] if ":" in cell else "equal"


@pytest.mark.parametrize("model_type, technique", TRIED)
def test_a_structure_trains_as_the_sweep_has_kept_it(model_type, technique):
    cell = try_technique(model_type, technique)
    assert kind(cell) == kind(KEPT[model_type][technique]), cell
    if technique == "plain":
        assert cell == "ok"


@pytest.mark.parametrize("technique", ["lowest rung", "LoRA"])
@pytest.mark.parametrize("model_type", ["gpt_oss", "falcon", "afmoe", "xglm"])
def test_documents_are_apart_under_techniques_in_models_that_do_not_say_where_they_begin(
    model_type, technique
):
    assert packed_difference(model_type, technique) <= TOLERANCE


def test_every_causal_lm_has_been_tried():
    assert set(KEPT) >= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for model_type, row in KEPT.items():
        assert list(row) == techniques_for(model_type), model_type


def test_no_family_ends_in_an_error_of_another_library_or_a_wrong_number():
    assert not [
        (name, technique) for name, row in KEPT.items() for technique, cell in row.items() if is_wrong(cell)
    ]


def test_the_page_has_the_kept_results():
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page, KEPT), "run `python scripts/try_families.py --write`"

"""The proof page is what its data say, and the rules of others give the numbers that their sources give."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from accelerate.commands.estimate import estimate_training_usage
from proof.formulas import (
    FITCHECK_CONTEXT,
    FITCHECK_OTHER_CONTEXT,
    FORMULAS,
    Settings,
    accelerate_estimate,
    deepspeed_zero2,
    deepspeed_zero3,
    fitcheck,
    unsloth_table,
)
from proof.rows import load_proof_rows
from proof_page import PAGE, PICTURE, README, page_of, picture_of, readme_with_summary

from lowmem_ft.foundation.catalog.model_architectures import find_architecture
from lowmem_ft.foundation.units import GIB, MIB

LORA = Settings(
    gpu="t4",
    method="lora",
    bits=4,
    rank=32,
    targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    rows=2,
    length=512,
    checkpointing=True,
    eager=True,
    adam_bytes=8,
    double_quant=False,
)
FULL = dataclasses.replace(
    LORA,
    gpu="l40s",
    method="full",
    bits=16,
    rank=0,
    targets=(),
    rows=4,
    length=641,
    checkpointing=False,
    eager=False,
)


@pytest.fixture(scope="module")
def rows():
    return load_proof_rows()


def test_page_and_picture_are_those_of_the_kept_results(rows):
    way_out = "run `python scripts/proof_page.py`"
    assert PAGE.read_text("utf-8") == page_of(rows), way_out
    assert PICTURE.read_text("utf-8") == picture_of(rows), way_out
    readme = README.read_text("utf-8")
    assert readme_with_summary(readme, rows) == readme, way_out


@pytest.mark.parametrize(
    "model, settings, mebibytes",
    [
        ("tinyllama-1.1b", LORA, 2220.2388625),
        ("llama-3.2-3b", FULL, 64745.2712890625),
    ],
)
def test_fitchecks_rule_is_what_fitcheck_0_3_1_computes(model, settings, mebibytes):
    """Totals of ``fitcheck.estimate`` for the same settings, which count its context."""
    context = FITCHECK_CONTEXT.get(settings.gpu, FITCHECK_OTHER_CONTEXT)
    assert (fitcheck(find_architecture(model), settings) + context) / MIB == pytest.approx(
        mebibytes, rel=1e-6
    )


def test_accelerates_rule_is_what_the_installed_accelerate_computes():
    parameters = find_architecture("llama-3.1-8b").num_parameters
    assert accelerate_estimate(parameters) == max(estimate_training_usage(4 * parameters, "float16").values())


def test_rules_that_count_all_parameters_as_trained_are_asked_of_full_fine_tuning_alone(rows):
    of_full = {"accelerate", "ZeRO-2", "ZeRO-3"}
    model = find_architecture("llama-3.1-8b")
    for settings, answer in ((FULL, of_full), (LORA, set()), (dataclasses.replace(LORA, bits=16), set())):
        found = {rule.title for rule in FORMULAS if rule.num_bytes(model, settings) is not None}
        assert found & of_full == answer
    asked = {row.name.split()[1] for row in rows if row.formulas.keys() >= of_full}
    assert asked == {"full-finetuning", "1b-bf16", "8b-bf16"}  # 8b-24gb keeps weights on the host


def test_zeros_rules_are_the_example_of_deepspeeds_page():
    assert deepspeed_zero2(2_851_000_000, 8) / GIB == pytest.approx(15.93, abs=0.005)
    assert deepspeed_zero3(2_851_000_000, 32_000_000, 8) / GIB == pytest.approx(6.09, abs=0.01)


def test_unsloths_table_knows_adapters_of_the_sizes_it_lists():
    assert unsloth_table(find_architecture("qwen2.5-7b"), LORA) == 5e9
    assert unsloth_table(find_architecture("qwen2.5-7b"), dataclasses.replace(LORA, bits=16)) == 19e9
    assert unsloth_table(find_architecture("qwen2.5-7b"), FULL) is None
    assert unsloth_table(find_architecture("tinyllama-1.1b"), LORA) is None

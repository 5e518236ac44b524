"""Claims over every shipped recipe; the folder is walked, so that a new file cannot escape them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu, split_count
from lowmem_ft.foundation.memory.uncertainty import TIGHT_SHARE
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.recipe import load_recipe, shipped_recipes
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.shipped.needs import CPU, needs_of_shipped_recipes

FOLDER = Path(__file__).resolve().parent.parent / "recipes"
FILES = sorted(FOLDER.rglob("*.yaml"))
FULL = {"8b-fsdp2", "70b-fsdp2", "1b-bf16", "3b-bf16", "7b-bf16", "8b-bf16", "8b-24gb", "8b-16gb", "8b-8gb"}
ADAPTERS = {"70b-qlora-fsdp2", "7b-lora", "7b-qlora", "70b-qlora-24gb", "14b-lora-2x24gb", "32b-qlora-2x24gb"}
ADAPTERS |= {"70b-qlora-4x24gb", "qwen3-30b-a3b-qlora-2x24gb"}
WITHOUT_BFLOAT16 = {"1b-fp16-t4", "7b-qlora-t4"}
ON_SEVERAL_CARDS = {"8b-fsdp2", "70b-fsdp2", "70b-qlora-fsdp2"}
NAMES = {*ON_SEVERAL_CARDS, *WITHOUT_BFLOAT16, "demo", "demo-8bit", "tiny", *FULL, *ADAPTERS}


def test_the_folder_holds_the_recipes_that_the_package_lists():
    assert {path.stem for path in FILES} >= NAMES
    assert sorted(shipped_recipes().values()) == FILES
    assert len(shipped_recipes()) == len(FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_loads_by_name_and_by_path(path):
    recipe = load_recipe(path.stem)
    assert recipe == load_recipe(path)
    assert recipe.name == path.stem
    assert recipe.description
    assert recipe.data.path is not None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_opens_with_its_launch_line(path):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first == f"# accelerate launch -m lowmem_ft train recipe={path.stem}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_leaves_room_on_the_card_it_names(path):
    """The numbers are kept; `tests/planning/estimator/test_recipe_needs.py` estimates them again."""
    needs = needs_of_shipped_recipes()[path.stem]
    if needs.gpu == CPU:
        return
    assert needs.memory_bytes == find_gpu(split_count(needs.gpu)[1]).memory_bytes
    assert needs.spare_share >= TIGHT_SHARE


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_header_says_what_the_recipe_needs(path):
    needs = needs_of_shipped_recipes()[path.stem]
    text = path.read_text(encoding="utf-8")
    header = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    said = re.findall(r"`lowmem-ft estimate recipe=(\S+) --gpu (\S+)`: process (.+?/s)\.", header)
    assert said == ([] if needs.gpu == CPU else [(path.stem, needs.gpu, needs.header_words)])


def test_the_tables_of_pages_say_what_recipes_need():
    root, of_recipes = Path(__file__).parent.parent, needs_of_shipped_recipes()
    on_pages = {}
    for page in ("README.md", "docs/which_gpu.md"):
        text = (root / page).read_text(encoding="utf-8")
        on_pages[page] = re.findall(
            r"^\| [\dx ]+ GB[^|]*\| `(?:[^`]*recipe=)?([\w.-]+)` \|", text, re.MULTILINE
        )
        for name in on_pages[page]:
            needs = of_recipes[name]
            memory = f"{format_bytes(needs.process_peak_bytes)} | {format_bytes(needs.host_peak_bytes)}"
            assert f" | {memory} | {needs.tokens_per_second:,.0f} | " in text
    assert sorted(on_pages["docs/which_gpu.md"]) == sorted(
        name for name, needs in of_recipes.items() if needs.gpu != CPU
    )
    assert len(on_pages["README.md"]) >= 8


def test_needs_are_kept_of_shipped_recipes_alone():
    assert needs_of_shipped_recipes().keys() == shipped_recipes().keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_memory_knob_that_a_recipe_sets_has_a_comment(path):
    memory_knobs = {key.name for key in recipe_keys().values() if key.frees} - {"name"}
    lines = path.read_text(encoding="utf-8").splitlines()
    setting = [
        line for line in lines if re.match(r"\s+(\w+):", line) and line.split(":")[0].strip() in memory_knobs
    ]
    assert [line for line in setting if " # " not in line] == []


@pytest.mark.parametrize("name", sorted(FULL))
def test_the_large_recipes_keep_the_mathematics(name):
    recipe = load_recipe(name)
    assert recipe.model.dtype == "bfloat16"
    assert recipe.optimizer.master in ("fp32", "split16", "split24")
    assert recipe.accumulation.dtype == "float32"
    assert recipe.training.max_grad_norm == 1.0
    rows = recipe.training.per_device_train_batch_size * recipe.training.gradient_accumulation_steps
    assert rows == (2 if name in ON_SEVERAL_CARDS else 16)


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_adapters_are_trained_without_float32_copies_of_their_inputs(name):
    recipe = load_recipe(name)
    assert recipe.adapter.name == "lora"
    assert (recipe.model.dtype, recipe.training.mixed_precision) == ("bfloat16", "bf16")
    assert recipe.model.quantization == ("nf4" if "qlora" in name else "none")


@pytest.mark.parametrize("name", sorted(WITHOUT_BFLOAT16))
def test_recipes_for_cards_without_bfloat16_scale_the_loss(name):
    recipe = load_recipe(name)
    assert recipe.training.mixed_precision == "fp16"
    trains_all = recipe.adapter.name == "none"
    assert recipe.model.dtype == ("float32" if trains_all else "float16")
    assert recipe.training.max_grad_norm == 1.0


@pytest.mark.parametrize("name", sorted(WITHOUT_BFLOAT16))
def test_a_t4_refuses_nothing_in_the_recipes_made_for_it(name):
    tiny = [f"model={FOLDER / 'tiny'}", "model.weights=random", "data.max_length=128"]
    short = ["training.gradient_accumulation_steps=2", "checkpointing.skip_last_layers=0"]
    estimate = estimate_memory(load_recipe(name, [*tiny, *short]), "t4")
    assert estimate.fits
    assert any("mixed precision fp16" in choice for choice in estimate.choices)


def test_local_data_of_a_recipe_ships_with_it():
    local = [load_recipe(path) for path in FILES]
    paths = [Path(path) for recipe in local for path in (recipe.data.path, recipe.data.eval_path) if path]
    inside = [path for path in paths if path.is_absolute()]
    assert len(inside) >= 3
    assert [path for path in inside if not path.is_file()] == []


def test_the_tiny_model_is_tiny_and_marks_its_answers():
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER / "tiny"))
    assert 30_000 < sum(parameter.numel() for parameter in model.parameters()) < 60_000
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "tiny")
    assert len(tokenizer) == model.config.vocab_size
    lines = (FOLDER / "tiny" / "data.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(set(lines)) == 64
    for line in lines:
        messages = json.loads(line)["messages"]
        encoded = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        marked = [
            token
            for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
            if mask
        ]
        answers = [
            message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant"
        ]
        assert tokenizer.decode(marked) == "".join(answers)

"""What a Python program passes to the functions that it calls first: a recipe by name too, and no traceback."""

from __future__ import annotations

import re

import pytest
import torch

import lowmem_ft
from lowmem_ft import (
    Budget,
    UserError,
    VirtualGPU,
    estimate_memory,
    estimate_script,
    load_recipe,
    plan,
    rehearse,
    train,
)
from lowmem_ft.hf import MemoryCallback, attach, prepare_model, sft_config, training_arguments


def test_a_recipe_may_be_named():
    named = estimate_memory("tiny", "rtx-4090", budget="24GiB")
    loaded = estimate_memory(load_recipe("tiny"), "rtx-4090", budget=Budget(device="24GiB"))
    assert named.process_peak_bytes == loaded.process_peak_bytes
    assert named.budget == loaded.budget
    assert training_arguments("tiny").max_steps == load_recipe("tiny").training.max_steps


@pytest.mark.parametrize(
    "call",
    [
        lambda recipe: estimate_memory(recipe, "rtx-4090"),
        lambda recipe: plan(recipe, gpu="rtx-4090"),
        lambda recipe: lowmem_ft.plan_checkpointing(recipe, gpu="rtx-4090"),
        lambda recipe: rehearse(recipe, "rtx-4090"),
        train,
        training_arguments,
        sft_config,
        MemoryCallback,
        lambda recipe: prepare_model("model", recipe),
        lambda recipe: attach(object(), recipe),
    ],
)
def test_what_names_no_recipe_is_told(call):
    with pytest.raises(UserError, match=r"There is no recipe 'tini'\. Did you mean"):
        call("tini")
    with pytest.raises(UserError, match=r"A recipe is the result of load_recipe\('tiny'\), or .*, got 3\."):
        call(3)


@pytest.mark.parametrize(
    "call, said",
    [
        (
            lambda: estimate_memory("tiny", "rtx-4090", budget=24),
            "A budget is Budget(device='24GiB', host='64GiB'), or",
        ),
        (
            lambda: estimate_memory("tiny", "rtx-4090", budget=Budget(device=24)),
            "such as 24GiB, 24GB or 512MiB; got 24.",
        ),
        (
            lambda: estimate_memory("tiny", torch.device("cuda")),
            "such as 'rtx-4090', got device(type='cuda')",
        ),
        (lambda: VirtualGPU(None), "such as 'rtx-4090', got None"),
        (lambda: estimate_script(None), "A script is the path of a Python file that trains, got None."),
        (lambda: plan("tiny", allow=["nope"]), "plan.allow takes shorter_rows, lora, "),
        (lambda: plan("tiny", allow=["lorra"]), "got lorra. Did you mean `lora`"),
        (lambda: plan("tiny", allow="lora"), "allow is a list, got 'lora'. Write allow=['lora']."),
        (lambda: plan("tiny", keep="distributed"), "keep is a list, got 'distributed'."),
    ],
)
def test_an_argument_of_another_type_is_told(call, said):
    with pytest.raises(UserError, match=re.escape(said)):
        call()

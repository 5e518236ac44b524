"""The fields of the page: what is refused, and what goes into an address."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.ui.form import FROM_RECIPE, Form
from lowmem_ft.ui.kept_files import KeptFiles


@pytest.fixture
def files(tmp_path):
    return KeptFiles(tmp_path / "kept")


def test_the_form_of_an_address_is_the_form_that_made_it():
    form = Form(model="qwen3-8b", method="qlora", length="4096", gpu="", budget="16", more="adapter.r=32")
    assert Form.of_query(form.query) == form
    assert Form().query == ""
    assert Form.of_query("length=7&" * 2000) == Form.of_query("&".join("a=1" for _ in range(99))) == Form()
    assert "kept" not in Form.of({"kept": "x", "model": "gpt2"}).query


def test_settings_are_those_of_a_command(files):
    form = Form(length="4096", rows="2", budget="16", host="64", more="adapter.r=32 checkpointing.mode=full")
    form.check(files)
    assert form.settings(files) == (
        "model=llama-3.1-8b",
        "data.max_length=4096",
        "training.per_device_train_batch_size=2",
        "budget.device=16GiB",
        "budget.host=64GiB",
        "adapter.r=32",
        "checkpointing.mode=full",
    )
    assert (form.devices, replace(form, gpus="8").devices, replace(form, gpu="").devices) == (
        "rtx-4090",
        "8xrtx-4090",
        None,
    )


@pytest.mark.parametrize(
    "change, part",
    [
        ({"model": "meta-llama/Llama-3.1-8B-Instruct-of-nobody"}, "looks nothing up"),
        ({"model": "../../etc"}, "The model must be one of"),
        ({"model": "config-0123456789abcdef"}, "not on this machine any more"),
        ({"model": "config-../../../etc/pa"}, "The model must be one of"),
        ({"model": FROM_RECIPE}, "needs a model"),
        ({"method": "recipe", "recipe": "/tmp/mine.yaml"}, "The recipe must be one of"),
        ({"method": "eval"}, "The method must be one of"),
        ({"gpu": "rtx-4091"}, "Did you mean"),
        ({"gpus": "3"}, "number of GPUs must be one of"),
        ({"gpu": ""}, "got neither"),
        ({"gpu": "", "budget": "24", "gpus": "8"}, "need a type"),
        ({"length": "1"}, "from 2 to"),
        ({"rows": "${oc.env:HOME}"}, "must be a whole number"),
        ({"budget": "1e9"}, "a number of GiB"),
        ({"more": "adapter.r=${oc.env:HOME}"}, "numbers, switches or names"),
        ({"more": "offload.folder=/etc"}, "numbers, switches or names"),
        ({"more": "model.trust_remote_code=true"}, "does not take"),
        ({"more": "checkpointing.mode=auto"}, "does not take"),
        ({"more": "model=gpt2"}, "has its own field"),
        ({"more": "rm -rf"}, "must be key=value"),
        ({"more": "adapter.r=8 " * 400}, "at most 2000 characters"),
    ],
)
def test_what_is_beyond_the_page_is_refused_with_a_way_out(files, change, part):
    with pytest.raises(UserError) as caught:
        replace(Form(), **change).check(files)
    assert part in str(caught.value)


def test_all_problems_are_told_at_once(files):
    with pytest.raises(UserError) as caught:
        Form(model="nobody", gpu="none", length="x").check(files)
    assert len(caught.value.problems) == 3


def test_a_dropped_config_is_a_model_by_its_name(files):
    name = files.keep_config(json.dumps({"model_type": "llama"}).encode())
    form = Form(model=name)
    form.check(files)
    (setting,) = form.settings(files)
    assert setting == f"model={files.model(name)}"

"""How a script was launched, and how its model was spread out: data-parallel works, the rest is refused by name."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
from attached_trainers import problems_of, recipe_of, sentence_of, trainer_of
from tiny_models import tiny_llama
from transformers import AutoModelForCausalLM

from lowmem_ft import hf

LEFT_OUT = "FSDP was asked for, but Accelerate shards on GPUs alone"
LAUNCHES = {
    "is_fsdp_enabled": LEFT_OUT,
    "is_deepspeed_enabled": "got DeepSpeed. Leave it out",
}


@pytest.mark.parametrize("flag", LAUNCHES)
def test_sharded_launches(flag, tmp_path):
    trainer, _ = trainer_of(tmp_path)
    setattr(trainer, flag, True)
    assert LAUNCHES[flag] in sentence_of(trainer)


@pytest.mark.parametrize(
    "variable, words",
    [
        ("FSDP", LEFT_OUT),
        ("DEEPSPEED", "got DeepSpeed. Leave it out"),
        ("MEGATRON_LM", "got Megatron-LM. Leave it out"),
    ],
)
def test_what_a_launcher_asked_for_and_accelerate_leaves_out(variable, words, tmp_path, monkeypatch):
    """On a CPU it trains by DDP, or alone, without a word."""
    trainer, _ = trainer_of(tmp_path)
    monkeypatch.setenv(f"ACCELERATE_USE_{variable}", "true")
    assert words in sentence_of(trainer)
    monkeypatch.setenv(f"ACCELERATE_USE_{variable}", "false")
    hf.attach(trainer, recipe_of()).remove()


SHARDED = f"""
import os, sys
sys.path[:0] = [{str(Path(__file__).parents[1])!r}]
how, folder = sys.argv[1:]
if how == "FSDP":
    os.environ["ACCELERATE_USE_FSDP"] = "true"
import torch
from attached_trainers import recipe_of, trainer_of
from lowmem_ft import hf
from lowmem_ft.foundation.errors import UserError
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

trainer, _ = trainer_of(folder + "/run", fields={{"ddp_backend": "gloo"}})
if how == "tensor parallelism":  # Accelerate has none on a CPU, and ends the constructor
    spread = DistributedConfig(tp_plan="auto")
    trainer.model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=spread)
    trainer.model_wrapped = trainer.model
print(trainer.accelerator.distributed_type.value)
try:
    hf.attach(trainer, recipe_of())
except UserError as error:
    print(*error.problems, sep="\\n")
"""


@pytest.mark.parametrize(
    "how, words",
    [
        ("FSDP", f"{LEFT_OUT}, and here leaves a whole model in each process (MULTI_CPU)"),
        ("tensor parallelism", "sharded as they are loaded (tp_plan, device_mesh"),
    ],
)
def test_two_processes_that_share_the_weights(how, words, forks, tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    done = forks.run_two(SHARDED, how, str(tmp_path))
    assert [process.returncode for process in done] == [0, 0], done[0].stderr + done[1].stderr
    for process in done:
        kind, problem = process.stdout.splitlines()[-2:]
        assert kind == "MULTI_CPU", "Accelerate says nothing of it"
        assert words in problem


def test_several_processes_do_what_our_own_loop_allows(tmp_path):
    """The accelerator of a launch of two, as far as it is asked."""
    trainer, _ = trainer_of(
        tmp_path, fields={"average_tokens_across_devices": False, "gradient_accumulation_steps": 1}
    )
    real = trainer.accelerator
    trainer.accelerator = types.SimpleNamespace(
        num_processes=2,
        mixed_precision="no",
        distributed_type=types.SimpleNamespace(value="MULTI_CPU"),
        scaler=None,
    )
    problems = problems_of(trainer, "optimizer.in_backward=true", "offload.optimizer=host")
    trainer.accelerator = real
    mean_of_means, in_backward = problems
    assert "a mean of the processes' means" in mean_of_means
    assert in_backward.startswith("optimizer.in_backward=true works in one process")


def test_a_model_over_several_devices_by_its_device_map(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    places = {"model": "cpu", "lm_head": "disk"}
    load = AutoModelForCausalLM.from_pretrained
    spread = load(tmp_path / "model", device_map=places, offload_folder=str(tmp_path / "disk"))
    assert spread.hf_device_map == places
    trainer, _ = trainer_of(tmp_path / "run", model=spread)
    assert any("got a device_map over 2" in problem for problem in problems_of(trainer))
    on_one = load(tmp_path / "model", device_map="auto")
    trainer, _ = trainer_of(tmp_path / "run", model=on_one)
    hf.attach(trainer, recipe_of())
    trainer.train()

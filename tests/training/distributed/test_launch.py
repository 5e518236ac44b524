"""What a launcher says and what a recipe says: filled in, or refused by name."""

from __future__ import annotations

import os
import re
from pathlib import Path

import accelerate.commands.launch as accelerate_launch
import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from datasets import Dataset

from lowmem_ft.cli.commands.train import main
from lowmem_ft.foundation.errors import RecipeError, UserError
from lowmem_ft.training.processes.launch import Launch, as_launched, processes_here, read_launch

CONFIGS = Path(__file__).parents[3] / "configs"

TWO = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
FSDP = {**TWO, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
DEEPSPEED = {**TWO, "ACCELERATE_USE_DEEPSPEED": "true"}


@pytest.mark.parametrize(
    "told,on_gpu,on_cpu",
    [
        ({}, 1, 1),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, 2, 2),
        ({"WORLD_SIZE": "2"}, 1, 2),  # as of a cluster whose jobs have no launcher in them
        ({"WORLD_SIZE": "", "LOCAL_RANK": ""}, 1, 1),
    ],
)
def test_processes_are_counted_as_accelerate_does(told, on_gpu, on_cpu):
    assert read_launch(use_cpu=False, environment=told).num_processes == on_gpu
    assert read_launch(use_cpu=True, environment=told).num_processes == on_cpu


@pytest.mark.parametrize(
    "told,said",
    [
        ({"WORLD_SIZE": "two"}, "must set WORLD_SIZE to a whole number, got 'two'"),
        ({**TWO, "LOCAL_RANK": "x"}, "must set LOCAL_RANK to a whole number, got 'x'"),
        ({**TWO, "LOCAL_WORLD_SIZE": "1.5"}, "must set LOCAL_WORLD_SIZE to a whole number, got '1.5'"),
        ({**TWO, "RANK": "2"}, "got RANK=2 with WORLD_SIZE=2"),
        ({**TWO, "LOCAL_RANK": "3", "RANK": "1"}, "got LOCAL_RANK=3 with LOCAL_WORLD_SIZE=2"),
        ({**TWO, "MASTER_PORT": "99999"}, "a port from 1 to 65535, got MASTER_PORT=99999"),
        ({**TWO, "MASTER_PORT": "tcp"}, "must set MASTER_PORT to a whole number, got 'tcp'"),
        ({"LOCAL_RANK": "1"}, "got LOCAL_RANK=1 with LOCAL_WORLD_SIZE=1"),
    ],
)
def test_variables_that_no_launcher_sets_are_named(told, said):
    with pytest.raises(UserError, match=re.escape(said)):
        read_launch(use_cpu=True, environment=told)


def test_a_variable_that_is_no_number_is_a_line_and_no_traceback(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert main(["recipe=tiny", "training.use_cpu=true"]) == 2
    assert capsys.readouterr().err.count("error: The launcher must set WORLD_SIZE to a whole number") == 1


def test_a_local_rank_alone_is_a_line_and_no_traceback(forks, tmp_path):
    source = """
import os, sys
from lowmem_ft.cli.commands.train import main
os.environ["LOCAL_RANK"] = "0"
sys.exit(main())
"""
    settings = ("recipe=tiny", f"training.output_dir={tmp_path}/run")
    ended = forks.run(source, *settings)
    assert ended.returncode == 2
    [error] = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "Unset LOCAL_RANK to train in one process" in error


def test_the_environment_is_read_after_datasets_has_replaced_it(monkeypatch):
    before = os.environ
    Dataset.from_dict({"text": ["a", "b"]}).map(lambda example: {"length": len(example["text"])}, num_proc=1)
    assert os.environ is not before
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert read_launch(use_cpu=True).num_processes == 4
    assert processes_here(4) == 2


@pytest.mark.parametrize(
    "told,launch",
    [
        (TWO, Launch(num_processes=2)),
        ({**TWO, "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, Launch(num_processes=16, num_machines=2)),
        (
            {**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false", "FSDP_OFFLOAD_PARAMS": "true"},
            Launch(
                num_processes=2,
                strategy="fsdp2",
                settings={"reshard_after_forward": False, "cpu_offload": True},
            ),
        ),
        (
            {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
            Launch(num_processes=2, strategy="zero2"),
        ),
        (
            {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            Launch(num_processes=2, strategy="zero3"),
        ),
    ],
    ids=["torchrun", "two machines", "fsdp2", "zero2", "zero3"],
)
def test_what_a_launcher_says_is_read_from_its_variables(told, launch):
    assert read_launch(use_cpu=False, environment=told) == launch


@pytest.mark.parametrize(
    "told,refused",
    [
        ({**FSDP, "FSDP_VERSION": "1"}, "FSDP 1, but only FSDP 2 is supported. Set fsdp_version: 2"),
        ({**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "set checkpointing.mode=full"),
        ({**FSDP, "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, "Set it to TRANSFORMER_BASED_WRAP"),
        ({**FSDP, "FSDP_IGNORED_MODULES": "lm_head"}, "fsdp_ignored_modules: lm_head"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, "ZeRO-1. Set zero_stage: 2 or 3"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}, "deepspeed_config_file: ds.json"),
        (
            {**DEEPSPEED, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"},
            "offload_optimizer_device: cpu",
        ),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme"}, "offload_param_device: nvme"),
        (
            {**DEEPSPEED, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"},
            "gradient_accumulation_steps: 8. The recipe decides that",
        ),
        ({**DEEPSPEED, "ACCELERATE_GRADIENT_CLIPPING": "1.0"}, "gradient_clipping: 1.0. The recipe decides"),
        ({**TWO, "ACCELERATE_USE_MEGATRON_LM": "true"}, "asks for Megatron-LM, which is not supported"),
        ({**TWO, "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "asks for a parallelism_config"),
    ],
    ids=lambda case: case if isinstance(case, str) else None,
)
def test_what_is_not_done_is_refused_by_name(told, refused, tiny):
    with pytest.raises(RecipeError) as error:
        as_launched(tiny(), read_launch(use_cpu=False, environment=told))
    assert len(error.value.problems) == 1
    assert refused in error.value.problems[0]


@pytest.mark.parametrize(
    "launch,filled",
    [
        (Launch(), ("none", 1, 1)),
        (Launch(num_processes=4), ("ddp", 4, 1)),
        (Launch(num_processes=16, num_machines=2, strategy="zero3"), ("zero3", 16, 2)),
    ],
)
def test_what_a_recipe_leaves_open_is_filled_from_the_launch(launch, filled, tiny):
    distributed = as_launched(tiny("training.save_steps=null"), launch).distributed
    assert (distributed.strategy, distributed.num_processes, distributed.num_machines) == filled


def test_settings_of_the_launch_are_filled_in_and_those_of_the_recipe_stay(tiny):
    launch = Launch(
        num_processes=2, strategy="fsdp2", settings={"reshard_after_forward": False, "cpu_offload": True}
    )
    distributed = as_launched(
        tiny("distributed.cpu_offload=true", "training.use_cpu=false"), launch
    ).distributed
    assert (distributed.reshard_after_forward, distributed.cpu_offload) == (False, True)


@pytest.mark.parametrize(
    "settings,launch,said",
    [
        (["num_processes=8"], Launch(num_processes=2), "num_processes=8, but 2 were started"),
        (["num_processes=8"], Launch(), "num_processes=8, but 1 was started"),
        (["strategy=fsdp2"], Launch(), "strategy=fsdp2 is for several processes, and one was started"),
        (["strategy=none"], Launch(num_processes=2), "strategy=none is one process, but 2 were started"),
        (
            ["num_processes=4", "num_machines=2"],
            Launch(num_processes=4),
            "num_machines=2, but the processes are on 1",
        ),
        (
            ["strategy=fsdp2"],
            Launch(num_processes=2, strategy="zero2"),
            "strategy=fsdp2, but the launch asks for zero2",
        ),
        (
            ["strategy=fsdp2", "cpu_offload=true"],
            Launch(num_processes=2, strategy="fsdp2", settings={"cpu_offload": False}),
            "cpu_offload=true, but the launch asks for false",
        ),
        (
            ["strategy=fsdp2", "reshard_after_forward=false"],
            Launch(num_processes=2, strategy="fsdp2", settings={"reshard_after_forward": True}),
            "reshard_after_forward=false, but the launch asks for true",
        ),
    ],
)
def test_where_the_two_disagree_both_values_are_named(settings, launch, said, tiny):
    recipe = tiny(*(f"distributed.{setting}" for setting in settings), "training.use_cpu=false")
    with pytest.raises(RecipeError) as error:
        as_launched(recipe, launch)
    [problem] = error.value.problems
    assert problem.startswith(f"distributed.{said}")


def test_what_the_launch_fills_in_is_held_against_the_rules(tiny):
    with pytest.raises(
        RecipeError, match=r"optimizer.name=adafactor works in one process, or with .*strategy=ddp"
    ):
        as_launched(tiny("optimizer.name=adafactor"), Launch(num_processes=2, strategy="fsdp2"))


@pytest.fixture
def launched_with(monkeypatch):
    """The environment of the first process of ``accelerate launch``, up to where it starts torch's launcher."""

    def environment_of(name: str, *options: str) -> dict[str, str]:
        found: list[dict[str, str]] = []

        def keep(environment, options):
            each = options.nproc_per_node
            found.append(
                {
                    **environment,
                    "WORLD_SIZE": str(int(each) * options.num_machines),
                    "LOCAL_WORLD_SIZE": each,
                    "LOCAL_RANK": "0",
                }
            )

        def by_torchrun(options):
            keep(prepare_multi_gpu_env(options), options)

        def by_deepspeed(options):
            keep(prepare_deepspeed_cmd_env(options)[1], options)

        monkeypatch.setattr(accelerate_launch, "multi_gpu_launcher", by_torchrun)
        monkeypatch.setattr(accelerate_launch, "deepspeed_launcher", by_deepspeed)
        arguments = ["--config_file", str(CONFIGS / f"{name}.yaml"), *options, "finetune.py", "recipe=tiny"]
        accelerate_launch.launch_command(accelerate_launch.launch_command_parser().parse_args(arguments))
        [environment] = found
        return environment

    return environment_of


@pytest.mark.parametrize("name", [path.stem for path in sorted(CONFIGS.glob("*.yaml"))])
def test_ready_config_files_say_what_their_name_says(name, launched_with, tiny):
    assert load_config_from_file(str(CONFIGS / f"{name}.yaml")).num_processes == 8
    launch = read_launch(use_cpu=False, environment=launched_with(name, "--num_processes", "4"))
    distributed = as_launched(tiny("training.save_steps=null"), launch).distributed
    assert (distributed.strategy, distributed.num_processes, distributed.num_machines) == (name, 4, 1)
    assert distributed.reshards
    assert not distributed.cpu_offload


@pytest.mark.parametrize("name", ["fsdp2", "zero3"])
def test_the_documented_line_for_two_machines_is_read_as_such(name, launched_with):
    options = ["--num_machines", "2", "--num_processes", "16", "--machine_rank", "1"]
    options += ["--main_process_ip", "10.0.0.1", "--main_process_port", "29500"]
    launch = read_launch(use_cpu=False, environment=launched_with(name, *options))
    assert (launch.strategy, launch.num_processes, launch.num_machines) == (name, 16, 2)

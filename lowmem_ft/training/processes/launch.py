"""The launch that ``accelerate launch`` or torchrun has started, and a recipe that agrees with it.

A recipe may leave the number of processes and their strategy to the launcher; if both name one, they have to agree. The
launch is read from the environment variables that launchers set, so that a disagreement is reported before torch is
imported.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lowmem_ft.foundation.errors import RecipeError, UserError, raise_problems
from lowmem_ft.foundation.parallel_plan import is_of_one_process, machines_of, plan_of
from lowmem_ft.foundation.system.launch_variables import LAST_PORT
from lowmem_ft.recipe import Recipe, check_recipe
from lowmem_ft.techniques.distributed.config import DistributedConfig, Strategy


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The settings of a launcher.

    Args:
        num_processes: processes on all machines together.
        num_machines: machines that run them.
        strategy: the strategy that the launcher asks for; None: it leaves that open.
        settings: its other settings of ``distributed``, by name.
        refused: messages about its settings that are not supported, each with a way out.
    """

    num_processes: int = 1
    num_machines: int = 1
    strategy: Strategy | None = None
    settings: Mapping[str, bool] = field(default_factory=dict)
    refused: tuple[str, ...] = ()


def processes_here(num_processes: int, environment: Mapping[str, str] | None = None) -> int:
    """Return the number of a run's processes on this machine, from the launcher; all of them if it does not say.

    Args:
        num_processes: processes on all machines together.
        environment: the variables; None: this process's.
    """
    if environment is None:  # the present os.environ: datasets replaces it when it maps in several processes
        environment = os.environ
    return max(1, min(num_processes, _number(environment, "LOCAL_WORLD_SIZE", num_processes)))


def read_launch(*, use_cpu: bool, environment: Mapping[str, str] | None = None) -> Launch:
    """Read the launcher's settings from this process's environment; without a launcher, there is one process.

    Args:
        use_cpu: whether it trains on the CPU. As in Accelerate, a process on a GPU without ``LOCAL_RANK`` trains by
            itself, whatever ``WORLD_SIZE`` a cluster has set.
        environment: the variables; None: this process's.

    Raises:
        UserError: if the variables are not numbers, or name a rank or a port that does not exist: the others would wait
            for it.
    """
    if environment is None:
        environment = os.environ
    if not use_cpu and _number(environment, "LOCAL_RANK", -1) == -1:
        return Launch()
    num_processes = _number(environment, "WORLD_SIZE", 1)
    _refuse_process_beyond(environment, num_processes)
    _refuse_port(environment)
    num_machines = machines_of(num_processes, processes_here(num_processes, environment))
    if _is_true(environment, "ACCELERATE_USE_FSDP"):
        return Launch(
            num_processes=num_processes,
            num_machines=num_machines,
            strategy="fsdp2",
            settings={
                "reshard_after_forward": _is_true(environment, "FSDP_RESHARD_AFTER_FORWARD", default="true"),
                "cpu_offload": _is_true(environment, "FSDP_OFFLOAD_PARAMS"),
            },
            refused=tuple(_refused_of_fsdp(environment)),
        )
    if _is_true(environment, "ACCELERATE_USE_DEEPSPEED"):
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        return Launch(
            num_processes=num_processes,
            num_machines=num_machines,
            strategy="zero3" if stage == "3" else "zero2",
            refused=tuple(_refused_of_deepspeed(environment, stage)),
        )
    others = {
        "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
    }
    refused = tuple(
        f"The launch asks for {name}, which is not supported. Choose FSDP, DeepSpeed or plain data parallelism with "
        "`accelerate config`."
        for variable, name in others.items()
        if _is_true(environment, variable)
    )
    return Launch(num_processes=num_processes, num_machines=num_machines, refused=refused)


def _refused_of_fsdp(environment: Mapping[str, str]) -> Iterator[str]:
    version = environment.get("FSDP_VERSION", "1")
    if version != "2":
        yield (
            f"The launch asks for FSDP {version}, but only FSDP 2 is supported. Set fsdp_version: 2 in its "
            "configuration."
        )
    if _is_true(environment, "FSDP_ACTIVATION_CHECKPOINTING"):
        yield (
            "The launch asks for fsdp_activation_checkpointing, but the recipe decides that. Remove it from the "
            "configuration, and set checkpointing.mode=full."
        )
    policy = environment.get("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    if policy != "TRANSFORMER_BASED_WRAP":
        yield (
            f"The launch asks for fsdp_auto_wrap_policy: {policy}; parameters are gathered by decoder layers. Set it "
            "to TRANSFORMER_BASED_WRAP."
        )
    if ignored := environment.get("FSDP_IGNORED_MODULES"):
        yield (
            f"The launch asks for fsdp_ignored_modules: {ignored}; all modules are sharded. Remove it from the "
            "configuration."
        )


def _refused_of_deepspeed(environment: Mapping[str, str], stage: str) -> Iterator[str]:
    if file := environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        yield (
            f"The launch asks for deepspeed_config_file: {file}; the engine's configuration comes from the recipe. "
            "Remove it, and set zero_stage: 2 or 3 instead."
        )
        return
    if stage not in ("2", "3"):
        yield f"The launch asks for DeepSpeed's ZeRO-{stage}. Set zero_stage: 2 or 3 in its configuration."
    for variable, (name, harmless, setting) in _DEEPSPEED_SETTINGS.items():
        value = environment.get(variable, harmless)
        if value != harmless:
            yield (
                f"The launch asks for {name}: {value}. The recipe decides that: set {setting}. Remove it from the "
                "configuration."
            )


_DEEPSPEED_SETTINGS = {
    f"ACCELERATE_{name.upper()}": (name.removeprefix("deepspeed_"), harmless, setting)
    for name, harmless, setting in (
        ("deepspeed_offload_optimizer_device", "none", "distributed.cpu_offload=true"),
        ("deepspeed_offload_param_device", "none", "distributed.cpu_offload=true"),
        ("gradient_accumulation_steps", "1", "training.gradient_accumulation_steps"),
        ("gradient_clipping", "none", "training.max_grad_norm"),
    )
}
"""Name in Accelerate's configuration, value without effect, and the recipe's setting for another, by variable."""


def as_launched(recipe: Recipe, launch: Launch) -> Recipe:
    """Return the recipe with all of ``distributed`` filled in: by its own values, else by the launch.

    Args:
        recipe: the recipe to train.
        launch: the launcher's settings.

    Returns:
        The recipe, with a strategy and a number of processes other than None.

    Raises:
        RecipeError: if the two disagree, or a setting does not work with the launch; lists all problems.
    """
    config = recipe.distributed
    raise_problems([*launch.refused, *_disagreements(config, launch)], RecipeError)
    settings = {name: value for name, value in launch.settings.items() if getattr(config, name) is None}
    filled = dataclasses.replace(
        config,
        strategy=plan_of(config.strategy or launch.strategy, launch.num_processes).strategy,
        num_processes=launch.num_processes,
        num_machines=launch.num_machines,
        **settings,
    )
    launched = dataclasses.replace(recipe, distributed=filled)
    check_recipe(launched)  # values filled in may break a rule
    return launched


def _disagreements(config: DistributedConfig, launch: Launch) -> Iterator[str]:
    strategy, processes = config.strategy, launch.num_processes
    if config.num_processes not in (None, processes):
        yield (
            f"distributed.num_processes={config.num_processes}, but {processes} {'was' if processes == 1 else 'were'} "
            f"started. Start that number: `accelerate launch --num_processes {config.num_processes} ...` or `torchrun "
            f"--nproc_per_node={config.num_processes} ...`; or leave it out."
        )
    elif config.named_engine is not None and processes == 1:
        yield (
            f"distributed.strategy={strategy} is for several processes, and one was started. Start it with "
            "`accelerate launch --num_processes N ...` or `torchrun --nproc_per_node=N ...`, or set "
            "distributed.strategy=none."
        )
    if is_of_one_process(strategy) and processes > 1:
        yield (
            f"distributed.strategy=none is one process, but {processes} were started. Set distributed.strategy=fsdp2 "
            "or ddp, or start one."
        )
    if config.num_machines not in (1, launch.num_machines):
        yield (
            f"distributed.num_machines={config.num_machines}, but the processes are on {launch.num_machines}. Correct "
            "one of the two."
        )
    if launch.strategy is not None and strategy not in (None, launch.strategy):
        yield (
            f"distributed.strategy={strategy}, but the launch asks for {launch.strategy}. Leave one of them out: the "
            "setting, or that part of the configuration given to `accelerate launch --config_file`."
        )
    for name, value in launch.settings.items():
        own = getattr(config, name)
        if own not in (None, value):
            yield (
                f"distributed.{name}={str(own).lower()}, but the launch asks for {str(value).lower()}. Leave the "
                "setting out, or correct the configuration given to `accelerate launch --config_file`."
            )


def _number(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    value = environment.get(name) or str(otherwise)
    try:
        return int(value)
    except ValueError:
        raise UserError(
            f"The launcher must set {name} to a whole number, got {value!r}. Unset it to train in one process, or "
            "start several with `accelerate launch` or torchrun."
        ) from None


def _refuse_process_beyond(environment: Mapping[str, str], num_processes: int) -> None:
    of_all = {
        "WORLD_SIZE": num_processes,
        "LOCAL_WORLD_SIZE": _number(environment, "LOCAL_WORLD_SIZE", num_processes),
    }
    for name, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        rank = _number(environment, name, 0)
        if not -1 <= rank < of_all[size]:
            raise UserError(
                f"Processes of a launch are numbered from 0 to {size} - 1, got {name}={rank} with "
                f"{size}={of_all[size]}. Unset {name} to train in one process, or start several with `accelerate "
                "launch` or torchrun, which set all these variables."
            )


def _refuse_port(environment: Mapping[str, str]) -> None:
    port = _number(environment, "MASTER_PORT", 0)
    if not 0 <= port <= LAST_PORT:
        raise UserError(
            f"Processes of a launch meet at a port from 1 to {LAST_PORT}, got MASTER_PORT={port}. Set one of these, "
            "such as MASTER_PORT=29500; or unset LOCAL_RANK, WORLD_SIZE and MASTER_PORT to train in one process."
        )


def _is_true(environment: Mapping[str, str], name: str, default: str = "false") -> bool:
    return environment.get(name, default).lower() in ("true", "1", "yes", "on")

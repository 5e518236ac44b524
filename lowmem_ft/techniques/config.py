"""The techniques' part of a recipe, apart from their verbs, so that reading a recipe does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.knob import NO_EFFECT, Checkpointed, Effect, Trait, knob
from lowmem_ft.foundation.packages import require_package
from lowmem_ft.memory.least_memory import (
    NOTHING,
    PARTS_BY_TOKENS,
    Held,
    StepFacts,
    as_it_is,
    gone_unless,
    on_host_at,
)

SMALLEST_OFFLOADED_BYTES = 64 * 1024
"""Activations smaller than this stay on the device with ``offload.activations=all``."""


def _inputs_of_checkpointed(held: Held, mode: str, step: StepFacts) -> Held:
    """Leave out what selective checkpointing keeps: nothing with dropout or without a fused attention kernel."""
    return held.scaled(step.share_checkpointed)


def _activations_of_others(held: Held, mode: str, step: StepFacts) -> Held:
    return held.scaled(1.0 - step.share_checkpointed)


def _inputs_on_host(held: Held, which: str, step: StepFacts) -> Held:
    if which == "all" and step.layer_input_bytes < SMALLEST_OFFLOADED_BYTES:
        return NOTHING
    return held if which == "none" else held.on_host()


def _waiting_gradients_on_host(held: Held, place: str, step: StepFacts) -> Held:
    return held.on_host() if place == "host" and step.steps_in_backward else held


def _resident_or_next(held: Held, num_resident: int, step: StepFacts) -> Held:
    """Leave the resident layers on the device, of those streamed, and two that are copied there in turn."""
    num_streamed, whole = max(0, step.num_layers - num_resident), held.host
    share, next_two = (number / max(1, step.num_layers) for number in (num_streamed, min(2, num_streamed)))
    return Held(whole * (1 - share + next_two), whole * share, link=whole * share) if whole else held


def _outer_streamed(held: Held, place: str, step: StepFacts) -> Held:
    """Leave embedding and head on the host if they are trained; frozen ones count nowhere."""
    if place == "device":
        return held
    return held.on_host() if step.trains_all else NOTHING


def _on_disk(held: Held, folder: str | None, step: StepFacts) -> Held:
    return held if folder is None else held._replace(host=0.0, disk=held.host)


def _of_all_micro_batches(held: Held, order: str, step: StepFacts) -> Held:
    return held.scaled(step.num_micro_batches) if order == "vertical" else held


def _summed_in_weights_type(held: Held, dtype: str, step: StepFacts) -> Held:
    return held.scaled(step.weight_itemsize / 4) if dtype == "weights" else held


def _share_of_rank(held: Held, strategy: str | None, step: StepFacts) -> Held:
    return held.scaled(1 / step.num_processes) if strategy == "fsdp2" else held


def _gathered(held: Held, reshards: bool | None, step: StepFacts) -> Held:
    return held if step.strategy == "fsdp2" and reshards is False else NOTHING


@dataclass(frozen=True, kw_only=True)
class CheckpointingConfig:
    """The decoder layers that keep only their input between forward and backward."""

    mode: Literal["none", "full", "selective", "auto"] = knob(
        "none",
        "full: a checkpointed layer keeps only its input and runs forward again in backward; selective: it also "
        "keeps the attention's output instead of computing it again; auto: before a run, choose the fastest of these "
        "modes, and of the numbers of layers to exclude, that fits the budget.",
        frees=(
            "a layer's activations except for its input: about 47 bytes * tokens * hidden in bf16 (Llama 3's shape, "
            "sdpa)"
        ),
        costs="one more forward of each checkpointed layer: about a third more time with all of them; selective: less, "
        "for 2 bytes * tokens * hidden a layer in bf16",
        effects={mode: Effect(cost="time") for mode in ("full", "selective", "auto")},
        tries=("none", "selective", "full"),
        leaves={"inputs": _inputs_of_checkpointed, "activations": _activations_of_others},
    )
    every_n_layers: int = knob(
        1,
        "Checkpoint layers 0, n, 2n, ...; 1 checkpoints every layer.",
        frees="1: the activations of the layers in between",
        costs="1: one more forward of these layers",
        effects={1: Effect(cost="time")},
        counts_layers="period",
        leaves={"inputs": as_it_is, "activations": as_it_is},
        tries=(1,),
    )
    skip_last_layers: int = knob(
        0,
        "Exclude the last n layers: backward reaches them first, so their activations live shortest.",
        frees="0: the activations of n layers",
        costs="0: one more forward of these layers",
        effects={0: Effect(cost="time")},
        counts_layers="last",
        tries=(48, 32, 24, 16, 8, 4, 0),
        leaves={"inputs": as_it_is, "activations": as_it_is},
    )

    @property
    def checkpointed(self) -> Checkpointed:
        """The layers that are checkpointed; with ``auto`` as many as have to be."""
        if self.mode == "none":
            return "no layer"
        return "every layer" if self.takes_every_layer else "some layers"

    def share_of(self, num_layers: int) -> float:
        """Return the share of so many layers that are checkpointed."""
        if self.mode == "none" or not num_layers:
            return 0.0
        return len(range(0, num_layers - self.skip_last_layers, self.every_n_layers)) / num_layers

    @property
    def takes_every_layer(self) -> bool:
        """True if no layer is left out, provided that any is checkpointed at all."""
        return (self.every_n_layers, self.skip_last_layers) == (1, 0)

    def refuse_unchosen(self) -> None:
        """Reject ``mode="auto"``, which only a planner can resolve.

        Raises:
            UserError: if ``mode`` is auto.
        """
        if self.mode == "auto":
            raise UserError(
                "checkpointing.mode=auto must be resolved for a budget before a model is built or estimated, got a "
                "recipe that still has it. Use lowmem_ft.plan_checkpointing(recipe, budget, gpu).recipe, or set "
                "checkpointing.mode=full."
            )

    def problems(self) -> Iterator[str]:
        """Yield the rules that these values break for any model; layer numbers are checked once a model is there."""
        if self.every_n_layers < 1:
            yield (
                f"checkpointing.every_n_layers must be at least 1, got {self.every_n_layers}. "
                "Set it to 1 to checkpoint every layer."
            )
        if self.skip_last_layers < 0:
            yield (
                f"checkpointing.skip_last_layers must be at least 0, got {self.skip_last_layers}. Set it to 0 to "
                "exclude no layer."
            )
        if self.mode == "auto" and not self.takes_every_layer:
            yield (
                "checkpointing.mode=auto chooses the layers itself, got "
                f"every_n_layers={self.every_n_layers} and skip_last_layers={self.skip_last_layers}. "
                "Leave these out, or set checkpointing.mode=full."
            )

    def problems_with(self, num_layers: int) -> Iterator[str]:
        """Yield the rules that these values break for a model with ``num_layers`` layers."""
        if self.mode != "none" and self.skip_last_layers >= num_layers:
            yield (
                f"checkpointing.skip_last_layers must be from 0 to {num_layers - 1} with a model of {num_layers} "
                f"layers, got {self.skip_last_layers}. To checkpoint no layer set checkpointing.mode=none."
            )


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The way the loss is computed from the last hidden states."""

    chunk_tokens: int | None = knob(
        1024,
        "Label tokens whose logits exist at the same time; null: the model's own loss, over all logits at once.",
        frees="12 bytes * tokens * vocabulary at the peak become 6 (float32: 4) bytes * chunk_tokens * vocabulary",
        costs="with a half-precision head, 2 bytes * label tokens * vocabulary, at most 4 * hidden * vocabulary",
        effects=NO_EFFECT,
        tries=(None, 1024),
        leaves={"logits": gone_unless(None)},
    )
    label_smoothing_factor: float = knob(
        0.0,
        "Share of each label that is spread over the whole vocabulary in training, not in evaluation.",
    )

    def problems(self) -> Iterator[str]:
        """Yield the rules that these values break by themselves."""
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            yield (
                f"loss.chunk_tokens must be at least 1, got {self.chunk_tokens}. "
                "Set it to 1024, or to null for the model's own loss."
            )
        if not 0 <= self.label_smoothing_factor < 1:
            yield (
                f"loss.label_smoothing_factor is from 0 to below 1, got {self.label_smoothing_factor}. Try 0.1, or 0 "
                "to switch smoothing off."
            )
        if self.label_smoothing_factor and self.chunk_tokens is None:
            yield (
                f"loss.label_smoothing_factor={self.label_smoothing_factor} needs loss.chunk_tokens, got null: the "
                "model's own loss does not smooth. Set loss.chunk_tokens=1024 or loss.label_smoothing_factor=0."
            )


_ACTIVATIONS_ON_HOST: tuple[Trait, ...] = ("activations on host", "layers fetched ahead")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Data kept in host memory instead of device memory."""

    activations: Literal["none", "inputs", "all"] = knob(
        "none",
        "inputs: the inputs of checkpointed layers; all: every activation that backward needs.",
        frees="inputs: 2 bytes * tokens * hidden a checkpointed layer in 16 bits",
        costs="two copies over PCIe; overlapped with compute for inputs, rarely for all",
        effects={
            "inputs": Effect(cost="host link", needs_checkpointed="some layers", traits=_ACTIVATIONS_ON_HOST),
            "all": Effect(cost="host link", engines=("ddp", "fsdp2"), traits=_ACTIVATIONS_ON_HOST),
        },
        tries=("none", "inputs"),  # copying all activations takes longer than recomputing them
        leaves={"inputs": _inputs_on_host, "activations": gone_unless("none", "inputs")},
    )
    optimizer: Literal["device", "host"] = knob(
        "device",
        "host: optimizer state and master weights are kept in host memory; the step runs on the device, chunk by "
        "chunk.",
        frees="the optimizer's state and the low halves of master weights, except for a few chunks",
        costs="the state crosses PCIe twice a step",
        effects={"host": Effect(cost="host link", engines=("ddp", "fsdp2"), traits=("state on host",))},
        tries=("device", "host"),
        leaves={"state": on_host_at("host", crosses=True), "gradients": _waiting_gradients_on_host},
    )
    parameters: Literal["device", "stream"] = knob(
        "device",
        "stream: weights are kept in host memory and copied to the device layer by layer.",
        frees="all weights except for two layers and resident_layers",
        costs="the weights cross PCIe twice a step, and once more with their updates",
        effects={
            "stream": Effect(
                cost="host link",
                engines=(),
                traits=("weights on host", "layers fetched ahead", "no loss scale"),
            )
        },
        tries=("device", "stream"),
        leaves={
            "layers": on_host_at("stream", crosses=True),
            "outer": _outer_streamed,
            "rest": gone_unless("device"),
        },
    )
    resident_layers: int = knob(
        0,
        "With parameters=stream, the number of last decoder layers that stay on the device.",
        frees="0: the weights of n layers",
        costs="0: these weights cross PCIe twice a step",
        effects={0: Effect(cost="host link")},
        counts_layers="last",
        tries=(32, 16, 8, 4, 0),
        leaves={"layers": _resident_or_next},
    )
    folder: str | None = knob(
        None,
        "Storage of the weights, optimizer state and gradients that are offloaded to the host. null: RAM; a folder "
        "on a fast local disk: memory-mapped files there, which may be larger than RAM.",
        frees="host memory: everything offloaded, except for what the kernel has room to cache",
        costs="what RAM cannot hold is read from disk and written back in each step; copies are not pinned",
        effects=Effect(cost="disk"),
        tries=(None,),
        leaves=dict.fromkeys(("layers", "outer", "state", "gradients"), _on_disk),
    )

    def problems(self) -> Iterator[str]:
        """Yield the rules that these values break by themselves."""
        if self.folder is not None and self.optimizer == self.parameters == "device":
            yield (
                f"offload.folder={self.folder} needs something offloaded to the host, got offload.optimizer=device "
                "and offload.parameters=device. Set offload.optimizer=host or offload.parameters=stream, or leave "
                "offload.folder out."
            )
        if self.resident_layers < 0:
            yield (
                f"offload.resident_layers must be at least 0, got {self.resident_layers}. Set it to 0 to stream all."
            )
        if self.resident_layers > 0 and self.parameters == "device":
            yield (
                f"offload.resident_layers={self.resident_layers} needs offload.parameters=stream, got device. "
                "Set offload.parameters=stream or leave offload.resident_layers out."
            )


@dataclass(frozen=True, kw_only=True)
class AccumulationConfig:
    """The order in which the micro-batches of one optimizer step pass through the model."""

    order: Literal["horizontal", "vertical"] = knob(
        "horizontal",
        "horizontal: one micro-batch after the other through all layers; vertical: all micro-batches through one "
        "layer after the other.",
        frees="vertical: gradients are finished layer by layer, so that the optimizer can step inside backward",
        costs="vertical: the layers' inputs of all micro-batches live at once",
        effects={
            "vertical": Effect(
                needs_checkpointed="every layer", saves=False, traits=("whole window at once",)
            )
        },
        tries=("horizontal", "vertical"),
        leaves={**dict.fromkeys(PARTS_BY_TOKENS, _of_all_micro_batches), "sums": gone_unless("horizontal")},
    )
    dtype: Literal["float32", "weights"] = knob(
        "float32",
        "Type in which the gradients of several micro-batches are summed; weights: the weights' own.",
        frees="weights: 2 bytes a parameter with bfloat16 weights and horizontal order",
        costs="weights: each micro-batch's share is rounded to the sum's 8 bits",
        effects={"weights": Effect(fidelity="other mathematics", consent="bf16_sums")},
        tries=("float32", "weights"),
        leaves={"sums": _summed_in_weights_type},
    )


@dataclass(frozen=True, kw_only=True)
class TilingConfig:
    """Parts of a layer that are computed tile by tile."""

    mlp: int = knob(
        1,
        "Pieces of the sequence that pass through each MLP one after the other; 1: the whole sequence at once.",
        frees="the MLP's inner activations except for those of one piece, while a layer is recomputed",
        costs="each piece is computed again in backward; smaller matrix products",
        effects=Effect(cost="time", engines=("ddp", "fsdp2", "zero2")),
        off=1,
        tries=(1, 4),
        leaves={"activations": gone_unless(1)},
    )
    head: int = knob(
        1,
        "Pieces of the vocabulary in which the head is computed; 1: the whole vocabulary at once.",
        frees="memory for the logits in addition to the head's weight and gradient, except for one piece",
        costs="the head's logits are computed twice",
        effects=Effect(cost="time"),
        off=1,
        tries=(1, 8),
        leaves={"logits": gone_unless(1)},
    )

    def problems(self) -> Iterator[str]:
        """Yield the rules that these values break by themselves."""
        for name in ("mlp", "head"):
            if getattr(self, name) < 1:
                yield f"tiling.{name} must be at least 1, got {getattr(self, name)}. Set it to 1 for no tiles."

    def refuse_vocabulary(self, rows: int) -> None:
        """Reject more vocabulary tiles than the vocabulary has rows.

        Raises:
            UserError: if there are more.
        """
        if self.head > rows:
            raise UserError(
                f"tiling.head must be at most the vocabulary's {rows} rows, got {self.head}. Set tiling.head=8."
            )


Strategy = Literal["none", "ddp", "fsdp2", "zero2", "zero3"]
"""Sharing strategies of a run's processes, by the names of torch and DeepSpeed."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """State shared among several processes, each with its own device; by Accelerate's names."""

    strategy: Strategy | None = knob(
        None,
        "none: one process; ddp: every process holds everything; fsdp2: weights, gradients and optimizer state are "
        "sharded by rows among the processes (torch's fully_shard); zero2, zero3: DeepSpeed shards gradients and "
        "state, and in zero3 weights; null: as launched.",
        frees=(
            "fsdp2, zero3: of N processes each holds 1/N of weights, gradients and state; zero2: also all weights"
        ),
        costs="each layer's weights cross the link before its forward and its backward, its gradients after",
        effects={
            "ddp": Effect(cost="time"),
            "fsdp2": Effect(cost="time", traits=("layers fetched ahead",)),
            "zero2": Effect(cost="time"),
            "zero3": Effect(cost="time"),
        },
        tries=("ddp", "fsdp2"),
        leaves={
            **dict.fromkeys(
                ("layers", "outer", "rest", "state", "gradients", "sums", "saved"), _share_of_rank
            ),
            "gathered": as_it_is,
        },
    )
    num_processes: int | None = knob(
        None, "Number of processes on all machines together, one per device; null: as launched."
    )
    num_machines: int = knob(1, "Number of machines, each with the same number of processes.")
    reshard_after_forward: bool | None = knob(
        None,
        "For fsdp2: free a layer's gathered weights after its forward pass, and gather them again for its backward "
        "pass; null: as launched, else true.",
        frees="true: all weights except for one or two layers between forward and backward",
        costs="true: the weights cross the link once more",
        effects={True: Effect(cost="time"), None: Effect(cost="time")},
        tries=(False, None),
        leaves={"gathered": _gathered},
    )
    cpu_offload: bool | None = knob(
        None,
        "For fsdp2 and zero3: keep this process's part of weights, gradients and state on the host, whose processor "
        "computes the updates; for zero2: the same except for the weights; null: as launched, else false.",
        frees="true: each process's part of weights, gradients and state on its device",
        costs="true: the part crosses PCIe for each gathering, and the host's processor computes the updates",
        effects={True: Effect(cost="host link")},
        leaves={
            **dict.fromkeys(("layers", "outer", "rest"), on_host_at(True, crosses=True)),
            **dict.fromkeys(("state", "gradients", "sums"), on_host_at(True)),
            "saved": gone_unless(None, False),
        },
    )
    sync_each_batch: bool = knob(
        True,
        "For fsdp2: shard the gradients of each micro-batch among the processes; false: only after the last one, so "
        "that each process keeps a whole sum until then.",
        frees="true: 4 bytes a parameter while several micro-batches are summed",
        costs="true: gradients cross the link once a micro-batch instead of once a step",
        effects={True: Effect(cost="time")},
        leaves={"sums": as_it_is},
    )

    @property
    def per_machine(self) -> int:
        """Processes on each machine; 1 if nothing says how many there are."""
        return (self.num_processes or 1) // self.num_machines or 1

    @property
    def reshards(self) -> bool:
        """True if gathered weights are freed after forward."""
        return self.reshard_after_forward is not False

    @property
    def has_engine(self) -> bool:
        """True if DeepSpeed runs the optimizer, and sums and clips the gradients."""
        return self.strategy in ("zero2", "zero3")

    def problems(self) -> Iterator[str]:
        """Yield the rules that these values break by themselves."""
        yield from self._problems_of_numbers()
        for name, other, strategies in (
            ("reshard_after_forward", False, ("fsdp2",)),
            ("cpu_offload", True, ("fsdp2", "zero2", "zero3")),
            ("sync_each_batch", False, ("fsdp2",)),
        ):
            if getattr(self, name) == other and self.strategy not in (None, *strategies):
                yield (
                    f"distributed.{name}={str(other).lower()} is for distributed.strategy={' or '.join(strategies)}, "
                    f"got {self.strategy}. Set distributed.strategy=fsdp2, or leave distributed.{name} out."
                )

    def _problems_of_numbers(self) -> Iterator[str]:
        processes, machines = self.num_processes, self.num_machines
        if processes is not None and processes < 1:
            yield (
                f"distributed.num_processes must be at least 1, got {processes}. Set it to the number of devices."
            )
        elif processes is not None and processes > MOST_PROCESSES:
            yield (
                f"distributed.num_processes is at most {MOST_PROCESSES}, got {processes}. Set it to the number of "
                "devices."
            )
        if machines < 1:
            yield f"distributed.num_machines must be at least 1, got {machines}. Set it to 1."
        elif processes is not None and processes >= 1 and processes % machines:
            yield (
                f"distributed.num_processes={processes} must be a multiple of distributed.num_machines={machines}, "
                "because each machine has the same number of processes. Correct one of the two."
            )
        if processes is not None and processes > 1 and self.strategy == "none":
            yield (
                f"distributed.strategy=none is one process, got distributed.num_processes={processes}. Set "
                "distributed.strategy=fsdp2 or ddp, or distributed.num_processes=1."
            )
        if processes == 1 and self.strategy not in (None, "none"):
            yield (
                f"distributed.strategy={self.strategy} is for several processes, got distributed.num_processes=1. "
                "Set distributed.strategy=none, or more processes."
            )


MOST_PROCESSES = 9999
"""The largest number of processes that ``--gpu 9999xNAME`` accepts."""

ONE_PROCESS = DistributedConfig(strategy="none", num_processes=1)


MOST_RANK = 32_768
"""Twice the width of the widest open model (Llama 3.1 405B); once the model is known, its own width is the limit."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Small trained matrices next to frozen weights, by PEFT's names (``peft.LoraConfig``)."""

    name: Literal["none", "lora"] = knob(
        "none",
        "lora: the model's own weights are frozen, and low-rank matrices are trained in addition.",
        frees=(
            "gradients and optimizer state of everything except the adapters (less than 1 % of the parameters)"
        ),
        costs="other mathematics: the update of each matrix has rank r, and needs a higher learning rate",
        effects={"lora": Effect(fidelity="other mathematics", consent="lora")},
        tries=("none", "lora"),
        leaves={
            **dict.fromkeys(("state", "gradients", "sums", "activations", "saved"), gone_unless("none")),
            "outer": as_it_is,
        },
    )
    r: int = knob(16, "Rank of the adapters.")
    lora_alpha: float = knob(32.0, "The adapters' product is scaled by lora_alpha / r (rsLoRA: / sqrt(r)).")
    lora_dropout: float = knob(0.0, "Dropout before the adapters.")
    target_modules: tuple[str, ...] = knob(
        ("all-linear",),
        ("Names of the layers that get adapters; all-linear: every linear layer except for the head."),
    )
    use_dora: bool = knob(False, "DoRA: adapters for the direction of each row, and a trained magnitude.")
    use_rslora: bool = knob(False, "rsLoRA: scale by sqrt(r), so that high ranks learn as fast as low ones.")

    def problems(self) -> Iterator[str]:
        """Yield the rules that these values break by themselves."""
        if self.name == "none" and self != AdapterConfig():
            yield "adapter settings need adapter.name=lora, got none. Set it, or leave them out."
        if not 1 <= self.r <= MOST_RANK:
            yield f"adapter.r is from 1 to {MOST_RANK}, got {self.r}. Try 16."
        if not self.lora_alpha > 0:
            yield f"adapter.lora_alpha must be above 0, got {self.lora_alpha}. Try 2 * adapter.r."
        if not 0 <= self.lora_dropout < 1:
            yield f"adapter.lora_dropout is from 0 to below 1, got {self.lora_dropout}. Try 0.05."
        if not self.target_modules or ("all-linear" in self.target_modules and len(self.target_modules) > 1):
            yield (
                "adapter.target_modules is [all-linear], or names of layers such as [q_proj, v_proj]; got "
                f"[{', '.join(self.target_modules)}]. Set it to [all-linear]."
            )

    def refuse_rank(self, hidden_size: int) -> None:
        """Reject a rank above that of any matrix of the model.

        Raises:
            UserError: if it is.
        """
        if self.name == "lora" and self.r > hidden_size:
            raise UserError(
                f"adapter.r is at most the model's hidden_size of {hidden_size}, which is the rank of its largest "
                f"matrix, got {self.r}. Try 16, or train all weights with adapter.name=none."
            )

    def require_packages(self) -> None:
        """Reject adapters if the package that creates them is not installed.

        Raises:
            MissingPackageError: if it is not installed.
        """
        if self.name == "lora":
            require_package("adapter.name=lora", "peft", "lora")

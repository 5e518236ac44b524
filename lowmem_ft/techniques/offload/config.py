"""The keys of what is kept in host memory; the verbs are here, and for weights in ``techniques/streaming``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lowmem_ft.foundation.knob import Effect, Trait, knob
from lowmem_ft.foundation.memory.least_memory import NOTHING, Held, StepFacts, gone_unless, on_host_at

SMALLEST_OFFLOADED_BYTES = 64 * 1024
"""Activations smaller than this stay on the device with ``offload.activations=all``."""


_ACTIVATIONS_ON_HOST: tuple[Trait, ...] = ("activations on host", "layers fetched ahead")


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
        search_values=("none", "inputs"),  # copying all activations takes longer than recomputing them
        remaining_bytes={"inputs": _inputs_on_host, "activations": gone_unless("none", "inputs")},
    )
    optimizer: Literal["device", "host"] = knob(
        "device",
        "host: optimizer state and master weights are kept in host memory; the step runs on the device, chunk by "
        "chunk.",
        frees="the optimizer's state and the low halves of master weights, except for a few chunks",
        costs="the state crosses PCIe twice a step",
        effects={"host": Effect(cost="host link", engines=("ddp", "fsdp2"), traits=("state on host",))},
        search_values=("device", "host"),
        remaining_bytes={"state": on_host_at("host", crosses=True), "gradients": _waiting_gradients_on_host},
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
        search_values=("device", "stream"),
        remaining_bytes={
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
        search_values=(32, 16, 8, 4, 0),
        remaining_bytes={"layers": _resident_or_next},
    )
    folder: str | None = knob(
        None,
        "Storage of the weights, optimizer state and gradients that are offloaded to the host. null: RAM; a folder "
        "on a fast local disk: memory-mapped files there, which may be larger than RAM.",
        frees="host memory: everything offloaded, except for what the kernel has room to cache",
        costs="what RAM cannot hold is read from disk and written back in each step; copies are not pinned",
        effects=Effect(cost="disk"),
        search_values=(None,),
        remaining_bytes=dict.fromkeys(("layers", "outer", "state", "gradients"), _on_disk),
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

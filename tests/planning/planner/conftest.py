from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable

import pytest
from tiny_models import save_llama

from lowmem_ft.foundation.memory.memory_estimate import (
    DeviceLimit,
    MemoryEstimate,
    Processes,
    ProcessRange,
    StepTime,
)
from lowmem_ft.foundation.memory.uncertainty import Uncertainty
from lowmem_ft.foundation.units import GIB
from lowmem_ft.planning.estimator.device_target import CPU, limits
from lowmem_ft.recipe import Recipe, load_recipe


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    return save_llama(
        path, layers=2, hidden=512, inner=1024, heads=8, vocab_size=4096, max_position_embeddings=1024
    )


@pytest.fixture
def make_recipe(folder) -> Callable[..., Recipe]:
    def make(*settings: str) -> Recipe:
        return load_recipe(
            None,
            [
                f"model={folder}",
                "model.weights=random",
                "data.max_length=512",
                "training.gradient_accumulation_steps=4",
                *settings,
            ],
        )

    return make


SMALL = ["plan.keep=[model.dtype,training.mixed_precision,optimizer,offload,tiling,loss.chunk_tokens]"]
"""Leaves micro-batches, checkpointing and order to choose."""


@pytest.fixture
def at_once(monkeypatch):
    """An estimator at once, by what a recipe says: bytes, seconds. Its rules are as strict as the real one's."""
    from lowmem_ft.planning.planner import plan_target

    asked: list[Recipe] = []

    def pretend(device_gib, host_gib=lambda recipe: 4.0, seconds=lambda recipe: 10.0) -> list[Recipe]:
        def estimate_memory(recipe: Recipe, gpu, *, budget, kept) -> MemoryEstimate:
            asked.append(recipe)
            recipe.model.require_packages()
            device, host = round(device_gib(recipe) * GIB), round(host_gib(recipe) * GIB)
            place = None if gpu == CPU else gpu
            allowed = limits(place, budget, recipe.distributed.plan().per_machine)
            limit, host_limit = allowed.device_bytes, allowed.host_bytes
            plain = plain_estimate()
            return dataclasses.replace(
                plain,
                gpu=DeviceLimit(name=CPU, memory_bytes=0)
                if place is None
                else dataclasses.replace(plain.gpu, name=place.name, memory_bytes=place.memory_bytes),
                process_peak_bytes=device,
                process_range=ProcessRange(
                    low_bytes=device,
                    high_bytes=device,
                    uncertainty=Uncertainty(reserved_share=0.0, outside_share=0.0),
                ),
                host_peak_bytes=host,
                step=place and StepTime(seconds=seconds(recipe), tokens=2048, bound_by="compute"),
                budget=allowed,
                processes=_processes(recipe),
                fits=(limit is None or device <= limit) and (host_limit is None or host <= host_limit),
            )

        monkeypatch.setattr(plan_target, "estimate_memory", estimate_memory)
        return asked

    return pretend


def _processes(recipe: Recipe) -> Processes | None:
    config = recipe.distributed
    if config.num_processes in (None, 1):
        return None
    return Processes(strategy=config.strategy or "", num_processes=config.num_processes)


def plain_estimate() -> MemoryEstimate:
    from lowmem_ft.foundation.memory.memory_estimate import BudgetVerdict, ModelSize

    return MemoryEstimate(
        model=ModelSize(name="tiny", parameters=10_000_000, trainable_parameters=10_000_000),
        gpu=DeviceLimit(name="l4", memory_bytes=22 * GIB),
        allocated_peak_bytes=GIB,
        reserved_peak_bytes=GIB,
        process_peak_bytes=GIB,
        host_peak_bytes=GIB,
        host_pinned_bytes=0,
        by_category_at_peak={},
        by_phase={"backward": GIB},
        peak_phase="backward",
        peak_module="",
        step=None,
        budget=BudgetVerdict(device_bytes=None, host_bytes=None),
        fits=True,
    )


def says(recipe: Recipe, key: str) -> object:
    return operator.attrgetter(key)(recipe)

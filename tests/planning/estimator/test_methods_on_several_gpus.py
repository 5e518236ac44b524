"""A model alone on several GPUs: every method by ddp and by fsdp2, with the rows of one GPU's step dealt out."""

from __future__ import annotations

import dataclasses

import pytest
from tiny_models import save_llama

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.units import MIB
from lowmem_ft.planning.estimator import estimate_memory, estimate_methods
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.recipe.gpu_count import dealt_rows

SETTINGS = ["data.max_length=64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    return save_llama(
        path, layers=1, hidden=64, inner=128, heads=2, vocab_size=256, max_position_embeddings=64
    )


@pytest.fixture(scope="module")
def kept() -> KeptTraces:
    return KeptTraces()


def on_several(folder, count, *settings, gpu="rtx-4090", kept=None):
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    return estimate_methods(folder, [gpu], settings=[*SETTINGS, *settings], count=count, kept=kept)


@pytest.fixture(scope="module")
def on_two(folder, kept):
    return on_several(folder, 2, kept=kept)


def test_each_method_is_estimated_by_each_engine(on_two):
    assert [(each.method.name, each.placement.engine) for each in on_two] == [
        (method, engine) for method in ("full", "lora", "qlora") for engine in ("ddp", "fsdp2")
    ]
    assert all(each.fits for each in on_two)
    for each in on_two:
        processes = each.estimate.processes
        assert (processes.strategy, processes.num_processes) == (each.placement.engine, 2)
        assert processes.link == "PCIe through host memory"


def test_a_step_has_the_rows_of_one_gpus(on_two):
    for each in on_two:
        training = each.recipe.training
        rows = training.per_device_train_batch_size * training.gradient_accumulation_steps
        assert 2 * rows == 16, each.command
        assert 2 * each.estimate.step.tokens == 16 * 64


def test_the_command_has_the_numbers_of_the_table(on_two, kept):
    lora = next(each for each in on_two if each.title == "LoRA, fsdp2")
    own = estimate_memory(lora.recipe, lora.gpu, kept=kept)
    assert own.step.tokens == lora.estimate.step.tokens
    assert own.process_peak_bytes == pytest.approx(lora.estimate.process_peak_bytes, rel=0.01)
    assert "distributed.strategy=fsdp2" in lora.command


def test_the_settings_may_name_the_engine_and_the_rows(folder, kept):
    typed = ["adapter.name=lora", "distributed.strategy=ddp", "training.per_device_train_batch_size=2"]
    (ddp,) = on_several(folder, 4, *typed, kept=kept)
    assert (ddp.placement.engine, ddp.placement.count) == ("ddp", 4)
    assert ddp.recipe.training.gradient_accumulation_steps == 2
    assert ddp.command.count("distributed.strategy=ddp") == 1


def test_weights_that_do_not_fit_in_each_process_are_refused_by_ddp_and_shared_by_fsdp2(folder, kept):
    small = dataclasses.replace(find_gpu("rtx-4090"), memory_bytes=1000 * MIB, context_bytes=999 * MIB)
    ddp, fsdp2 = on_several(folder, 2, "adapter.name=lora", gpu=small, kept=kept)
    assert ddp.estimate is None
    assert "Each process of ddp holds all weights" in ddp.problems[0]
    assert fsdp2.estimate is not None


def test_what_an_engine_does_not_do_is_refused_in_its_row(folder, kept):
    ddp, fsdp2 = on_several(folder, 2, "adapter.name=lora", "optimizer.name=adafactor", kept=kept)
    assert ddp.fits
    assert "optimizer.name=adafactor works in one process" in fsdp2.problems[0]


@pytest.mark.parametrize(
    "rows, micro_batches, count, expected",
    [
        (1, 16, 2, (1, 8)),
        (4, 4, 8, (2, 1)),
        (16, 1, 4, (4, 1)),
        (1, 16, 3, (1, 6)),  # 18 rows a step, as 16 cannot be dealt out among 3
        (16, 1, 3, (6, 1)),
        (1, 16, 32, (1, 1)),
    ],
)
def test_rows_are_dealt_out_by_micro_batches_first(rows, micro_batches, count, expected):
    assert dealt_rows(rows, micro_batches, count) == expected

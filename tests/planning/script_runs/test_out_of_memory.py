"""Estimates of scripts that continue after an error out of memory: they are of the batch that fits, as in a run."""

from __future__ import annotations

import dataclasses

import pytest

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.units import MIB
from lowmem_ft.planning.script_runs import ScriptEstimate, estimate_script, estimate_script_on_gpus

STEPS = """
    import sys
    import torch

    def made():
        layers = torch.nn.Linear(1024, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 1024)
        model = torch.nn.Sequential(*layers).cuda()
        return model, torch.optim.AdamW(model.parameters())

    def train(batch, model, optimizer):
        for _ in range(5):
            model(torch.randn(batch, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
"""

HALVES = """
    model, optimizer = made()
    batch = 65536
    while True:
        try:
            train(batch, model, optimizer)
            break
        except torch.cuda.OutOfMemoryError as error:
            assert "CUDA out of memory. Tried to allocate" in str(error)
            batch //= 2
            optimizer.zero_grad()
            torch.cuda.empty_cache()
"""

SEARCHES = """
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=12000)
    def search(batch_size):
        train(batch_size, *made())

    search()
"""

TRAINER = """
    import sys
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    rows = [{"input_ids": [1] * 64, "labels": [1] * 64}] * 4000
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=int(sys.argv[1]), auto_find_batch_size=True, max_steps=9
    )
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("model"))
    Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator).train()
"""


def gpu_with(room_mib: int) -> Gpu:
    """A GPU with this much memory for tensors, whatever its context takes."""
    t4 = find_gpu("t4")
    return dataclasses.replace(t4, name="small", memory_bytes=t4.context_bytes * 5 // 4 + room_mib * MIB)


def said(found: ScriptEstimate) -> str:
    return next((choice for choice in found.estimate.choices if choice.startswith("out of memory")), "")


def assert_searched(found: ScriptEstimate, first: int) -> int:
    """Check that a search has gone down from a batch in steps of a tenth, and return the last batch."""
    sizes = [*found.batches.failed, found.batches.batch_size]
    assert len(sizes) > 2
    assert sizes == [first, *(int(size * 0.9) for size in sizes[:-1] if size is not None)]
    *failed, last = sizes
    assert said(found) == f"out of memory: at batch sizes {', '.join(map(str, failed))}; answered for {last}"
    assert found.to_json()["script"]["out_of_memory"] == {"batch_sizes": failed, "batch_size": last}
    assert last is not None
    return last


def assert_alike(found: ScriptEstimate, alone: ScriptEstimate) -> None:
    """Compare with the estimate of a script that has had the surviving batch from the beginning."""
    one, other = found.estimate, alone.estimate
    assert one.fits
    assert (found.steps, found.tokens_per_step) == (alone.steps, alone.tokens_per_step)
    assert found.kept_bytes == alone.kept_bytes
    assert one.allocated_peak_bytes == pytest.approx(other.allocated_peak_bytes, rel=0.01)
    assert one.step is not None
    assert other.step is not None
    assert one.step.seconds == pytest.approx(other.step.seconds, rel=1e-6)
    assert found.host_waits_per_step == alone.host_waits_per_step
    assert found.peak.own is not None
    assert alone.peak.own is not None
    assert found.peak.own.line == alone.peak.own.line


def test_a_script_that_halves_its_batch_is_answered_for_the_one_that_fits(script):
    found = estimate_script(script(STEPS + HALVES), gpu=gpu_with(200))
    assert said(found) == "out of memory: 3 times, which the script handled; answered for what it did then"
    assert_alike(found, estimate_script(script(STEPS + HALVES.replace("65536", "8192")), gpu="t4"))


def test_a_search_of_accelerate_is_answered_for_the_batch_that_it_finds(script):
    found = estimate_script(script(STEPS + SEARCHES), gpu=gpu_with(200))
    last = assert_searched(found, first=12000)
    alone = script(STEPS + SEARCHES.replace("12000", str(last)))
    assert_alike(found, estimate_script(alone, gpu="t4"))


def test_a_trainer_that_finds_its_batch_is_answered_for_it(script):
    name = script(TRAINER)
    found = estimate_script(name, ["96"], gpu=gpu_with(100))
    last = assert_searched(found, first=96)
    assert found.tokens_per_step == 64 * last
    assert_alike(found, estimate_script(name, [str(last)], gpu="t4"))


@pytest.mark.parametrize("instead", ['sys.exit("give up")', "break", "raise", "pass"])
def test_a_script_that_ends_out_of_memory_is_told_what_it_would_need(script, instead):
    whole = estimate_script(script(STEPS + "\n    train(65536, *made())"), gpu=gpu_with(200))
    found = estimate_script(script(STEPS + HALVES.replace("batch //= 2", instead)), gpu=gpu_with(200))
    assert found.estimate.verdict == "does not fit"
    assert found.estimate.allocated_peak_bytes == whole.estimate.allocated_peak_bytes
    assert not said(found)
    assert found.to_json()["script"]["out_of_memory"] is None


def test_each_of_many_gpus_gets_the_batch_that_fits_there(script):
    gpus = [gpu_with(200), find_gpu("t4"), gpu_with(130)]
    found = estimate_script_on_gpus(script(STEPS + SEARCHES), [], gpus)
    medium, all_of_it, small = (
        each.batches.batch_size for each in found if isinstance(each, ScriptEstimate) and each.estimate.fits
    )
    assert all_of_it == 12000
    assert medium is not None
    assert small is not None
    assert small < medium < all_of_it

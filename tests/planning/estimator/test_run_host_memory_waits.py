"""How often a step makes the host wait for the device: once, for its loss and norm, before the update.

Every wait empties the device's queue of kernels: one a layer, and it idles between layers.
"""

import pytest
from ladder_rungs import RUNGS, settings_of
from sweeps import few_quick

from lowmem_ft.planning.estimator.traces.tracing import trace_recipe
from lowmem_ft.recipe import load_recipe
from lowmem_ft.virtual_gpu import VirtualGPU
from lowmem_ft.virtual_gpu.calls.work import STEP_END


def waits_of_a_step(*settings, gpu="rtx-4090"):
    machine = VirtualGPU(gpu)
    ends = []
    mark = machine.work.mark

    def noted(moment):
        if moment == STEP_END:
            ends.append(machine.work.num_host_waits)
        mark(moment)

    machine.work.mark = noted
    trace_recipe(load_recipe("tiny", list(settings)), lambda: machine, extend=False)
    *_, before, end = ends
    return end - before


@pytest.mark.parametrize(
    "rung, packing",
    few_quick(
        [(rung, packing) for rung in RUNGS[3::2] for packing in ("true", "false")],
        [(RUNGS[3], "false"), (RUNGS[5], "true"), (RUNGS[7], "false")],
    ),
    ids=str,
)
def test_a_step_waits_once_on_every_other_rung(rung, packing):
    """With streamed weights the host itself reads the embedding's rows, and takes the gradient of a tied one.

    It waits for the ids, for the rows that it sends, for the gradient at both its ends, and for its sum.
    """
    settings = settings_of(rung)
    of_embedding = 5 if "offload.parameters=stream" in settings else 0
    assert waits_of_a_step(*settings, f"data.packing={packing}") == 1 + of_embedding


@pytest.mark.parametrize(
    "settings",
    [
        ["model.dtype=float32", "training.mixed_precision=bf16", "data.packing=true"],
        ["checkpointing.mode=selective", "data.packing=true"],
        ["adapter.name=lora", "data.packing=true"],
        ["model.dtype=float32", "training.mixed_precision=no"],
    ],
    ids=["autocast", "selective", "lora", "float32"],
)
def test_a_step_waits_once(settings):
    assert waits_of_a_step("model.dtype=bfloat16", "training.mixed_precision=no", *settings) == 1


@pytest.mark.parametrize("packing", ["true", "false"])
def test_a_batch_too_large_to_go_with_the_command_is_not_waited_for(packing):
    """64 rows of 256 tokens of 8 bytes are 128 KiB, for which CUDA makes the host wait if they are not pinned."""
    settings = ["model.dtype=bfloat16", "training.mixed_precision=no", f"data.packing={packing}"]
    large = ["data.max_length=256", "training.per_device_train_batch_size=64"]
    assert waits_of_a_step(*settings, *large) == 1


def test_old_cards_wait_no_more_than_new_ones():
    half = ["model.dtype=float32", "training.mixed_precision=fp16"]
    assert waits_of_a_step(*half, gpu="t4") == 2  # the loss scaler asks besides whether gradients overflowed


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_other_kernels_wait_for_a_mask_once_a_micro_batch(attention):
    """Transformers asks the device whether rows are packed. With flash-attn's own borders, no layer asks again."""
    settings = ["model.dtype=bfloat16", "training.mixed_precision=no", "data.packing=true"]
    attention = f"model.attn_implementation={attention}"
    assert waits_of_a_step(*settings, attention, "training.gradient_accumulation_steps=2") == 1 + 2

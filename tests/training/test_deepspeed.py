"""DeepSpeed's ZeRO in two processes over gloo, against one process; `make test-deepspeed` installs it."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM

from lowmem_ft.errors import RecipeError
from lowmem_ft.training import train

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: make test-deepspeed"
)
TRAIN = "import sys; from lowmem_ft.cli.train import main; sys.exit(main())"
SHARED = ("training.max_steps=3", "training.save_steps=null", "training.eval_steps=null")


@needs_deepspeed
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_two_processes_of_deepspeed_equal_one(strategy, tiny, metrics, forks, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train(tiny(*SHARED, "training.per_device_train_batch_size=4", output_dir=one))
    processes = forks.run_two(
        TRAIN,
        "recipe=tiny",
        "training.use_cpu=true",
        "budget.preflight=false",
        *SHARED,
        "training.per_device_train_batch_size=2",
        f"distributed.strategy={strategy}",
        f"training.output_dir={two}",
    )
    assert [process.returncode for process in processes] == [0, 0], "".join(p.stderr for p in processes)
    assert metrics(two) == pytest.approx(metrics(one), rel=1e-6)
    assert metrics(two, "grad_norm") == pytest.approx(metrics(one, "grad_norm"), rel=2e-6)
    models = [AutoModelForCausalLM.from_pretrained(folder / "model") for folder in (one, two)]
    for (name, expected), (other, weight) in zip(
        *(model.named_parameters() for model in models), strict=True
    ):
        assert name == other
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "setting",
    [
        "training.save_steps=7",
        "model.dtype=bfloat16",
        "training.mixed_precision=bf16",
        "optimizer.name=lion",
        "optimizer.state=8bit",
        "offload.optimizer=host",
        "optimizer.in_backward=true",
        "accumulation.order=vertical",
        "tiling.mlp=2",
        "adapter.name=lora",
    ],
)
def test_what_was_not_shown_beside_deepspeed_is_refused_before_a_model_is_read(setting, tiny):
    with pytest.raises(
        RecipeError, match=f"(?m)^{setting.partition('=')[0]}=.* got distributed.strategy=zero2"
    ):
        tiny("training.save_steps=null", "distributed.strategy=zero2", setting)

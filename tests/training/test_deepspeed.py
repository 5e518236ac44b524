"""DeepSpeed's ZeRO in two processes over gloo, against one process; `make test-deepspeed` installs it."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from roundings import LOSS, SMOOTH_ADAMW, of_updates
from trained_by_processes import CASES as OF_ENGINES
from trained_by_processes import assert_alike, trained
from transformers import AutoModelForCausalLM

from lowmem_ft.foundation.errors import RecipeError
from lowmem_ft.training.run.loop import train

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: make test-deepspeed"
)
TRAIN = "import sys; from lowmem_ft.cli.commands.train import main; sys.exit(main())"
SHARED = ("training.max_steps=3", "training.save_steps=null", "training.eval_steps=null")
CASES = [(engine, name) for engine in ("zero2", "zero3") for name in OF_ENGINES[engine]]


@pytest.fixture(scope="module")
def results(forks, untied, tmp_path_factory, compiled_deepspeed):
    """By engine: of one process and of two, the losses and norms of every case."""

    def of(engine):
        if engine not in by_engine:
            folder = tmp_path_factory.mktemp(engine)
            by_engine[engine] = trained(forks, folder, untied, engine, (1, 2), OF_ENGINES[engine])
        return by_engine[engine]

    by_engine = {}
    return of


@needs_deepspeed
@pytest.mark.parametrize("engine, name", CASES)
def test_two_processes_of_deepspeed_train_what_one_does(engine, name, results):
    of = results(engine)
    assert_alike(of[1][name], of[2][name], OF_ENGINES[engine][name][1])


@needs_deepspeed
@pytest.mark.usefixtures("compiled_deepspeed")
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_the_finished_model_is_loaded_by_vanilla_libraries(
    strategy, adapter, tiny, untied, metrics, forks, tmp_path
):
    one, two = tmp_path / "one", tmp_path / "two"
    model = (f"model={untied}", "model.weights=pretrained", "model.tokenizer_name_or_path=null")
    shared = (*SHARED, *model, f"adapter.name={adapter}", SMOOTH_ADAMW)
    train(tiny(*shared, "training.per_device_train_batch_size=4", output_dir=one))
    processes = forks.run_two(
        TRAIN,
        "recipe=tiny",
        "training.use_cpu=true",
        "budget.preflight=false",
        *shared,
        "training.per_device_train_batch_size=2",
        f"distributed.strategy={strategy}",
        f"training.output_dir={two}",
    )
    assert [process.returncode for process in processes] == [0, 0], "".join(p.stderr for p in processes)
    assert metrics(two) == pytest.approx(metrics(one), rel=LOSS)
    vanilla = AutoModelForCausalLM if adapter == "none" else AutoPeftModelForCausalLM
    models = [vanilla.from_pretrained(folder / "model") for folder in (one, two)]
    for (name, expected), (other, weight) in zip(
        *(model.named_parameters() for model in models), strict=True
    ):
        assert name == other
        torch.testing.assert_close(weight, expected, rtol=0, atol=of_updates(3, 0.01))


@pytest.mark.parametrize(
    "setting",
    [
        "training.mixed_precision=bf16",
        "optimizer.name=lion",
        "optimizer.state=8bit",
        "offload.optimizer=host",
        "offload.activations=all",
        "optimizer.in_backward=true",
        "accumulation.dtype=weights",
        "tiling.mlp=2",
    ],
)
def test_what_was_not_shown_beside_deepspeed_is_refused_before_a_model_is_read(setting, tiny):
    with pytest.raises(
        RecipeError, match=f"(?m)^{setting.partition('=')[0]}=.* got distributed.strategy=zero3"
    ):
        tiny("distributed.strategy=zero3", "model.dtype=bfloat16", setting)

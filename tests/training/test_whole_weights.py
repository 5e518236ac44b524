"""Processes that share a model by FSDP2 keep no whole weight: with each technique, and with LoRA beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from measuring.families import FAMILIES
from technique_keys import BESIDE, KEYS, VALUES, other_values
from transformers import AutoConfig

from lowmem_ft.foundation.errors import RecipeError
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.reading.keys import recipe_keys

ALWAYS = (
    "training.use_cpu=true",
    "budget.preflight=false",
    "distributed.strategy=fsdp2",
    "model.tokenizer_name_or_path={tiny}",
    "training.output_dir={folder}/none",
    "training.per_device_train_batch_size=1",
    "training.gradient_accumulation_steps=2",
)
LORA = "adapter.name=lora"
FILES = ("model={untied}", "model.weights=pretrained")
"""Of which each process reads its rows; other weights are drawn as a whole, before they are cut."""

OTHERS = VALUES | {
    "model.dtype": ["bfloat16"],
    "model.quantization": ["nf4"],
    "training.mixed_precision": ["bf16"],
    "data.max_length": [64],
    "distributed.strategy": [],
    "distributed.reshard_after_forward": ["false"],
    "distributed.cpu_offload": [],
}
"""Values for which a GPU or another model is needed are left out."""

NEEDED = BESIDE | {"model.quantization": (LORA,), "optimizer.master": ("model.dtype=bfloat16",)}

QUICK = {
    "nothing": FILES,
    "lora": (*FILES, LORA),
    "qlora": (*FILES, LORA, "model.quantization=nf4"),
    "dora by PEFT, tied": (LORA, "adapter.use_dora=true", "adapter.kernel=peft"),
    "everything, tied": (
        *("checkpointing.mode=full", "offload.optimizer=host", "offload.activations=inputs", "tiling.mlp=2"),
        *("accumulation.order=vertical", "optimizer.in_backward=true", "tiling.head=2"),
    ),
}

TRAIN = """
import gc, json, sys, types, weakref
from torch.multiprocessing.reductions import StorageWeakRef
from lowmem_ft.recipe import load_recipe
from lowmem_ft.techniques.distributed import fully_sharded
from lowmem_ft.foundation.tensors.local_shards import is_sharded
from lowmem_ft.training.run.loop import TrainingRun
sys.path.append(sys.argv[2])
from transcribed_liger import transcribed_kernels

whole, shard = [], fully_sharded.fully_shard

def shard_watched(module, **policies):
    for name, parameter in module.named_parameters():
        if not is_sharded(parameter):
            storage = StorageWeakRef(parameter.untyped_storage())
            whole.append((f"{type(module).__name__}: {name}", weakref.ref(parameter), storage))
    shard(module, **policies)

fully_sharded.fully_shard = shard_watched

def wrong_after(settings):
    whole.clear()
    run = TrainingRun.build(load_recipe("tiny", settings))
    run.metrics = types.SimpleNamespace(write=lambda *args, **kwargs: None)  # there is no folder
    for _ in range(2):
        run.step()
    assert whole
    gc.collect()
    kept = [name for name, parameter, storage in whole if parameter() is not None or not storage.expired()]
    run.evaluations.evaluate()
    run.session.techniques.remove()
    left = {name: one for name, one in run.session.unwrapped_model.named_parameters() if one.is_floating_point()}
    return {
        "kept": kept,
        "gathered": [name for name, parameter in left.items() if not is_sharded(parameter)],
        "frozen": [name for name, parameter in left.items() if not parameter.requires_grad],
    }

with transcribed_kernels():
    for name, settings in json.loads(sys.argv[1]).items():
        print("WRONG", json.dumps([name, {key: names for key, names in wrong_after(settings).items() if names}]))
"""


def every_technique():
    """The settings of each value of each memory knob and technique that the rules allow, alone and with LoRA."""
    cases = {}
    for path, key in recipe_keys().items():
        if key.effects is None and path not in KEYS:
            continue
        for value in OTHERS[path] if path in OTHERS else other_values(path):
            for beside in ((), (LORA,)):
                settings = tuple(dict.fromkeys((*beside, *NEEDED.get(path, ()), f"{path}={value}")))
                if _is_allowed(settings):
                    cases[" ".join(settings)] = settings
    return cases


def _is_allowed(settings):
    try:
        load_recipe("tiny", ["training.use_cpu=true", "distributed.strategy=fsdp2", *settings])
    except RecipeError:
        return False
    return True


@pytest.fixture(scope="module")
def wrong_in(forks, untied, tmp_path_factory):
    """What is not as it should be after two steps, by case; empty where all is well."""
    folder, tiny = tmp_path_factory.mktemp("whole"), Path(str(load_recipe("tiny").model.name_or_path))
    vocab_size = AutoConfig.from_pretrained(tiny).vocab_size
    mixture = FAMILIES["mixtral"] | {"vocab_size": vocab_size}
    AutoConfig.for_model(model_type="mixtral", **mixture).save_pretrained(folder / "mixtral")

    def wrong(cases):
        filled = {
            name: [
                one.format(folder=folder, tiny=tiny, untied=untied) for one in dict.fromkeys((*ALWAYS, *own))
            ]
            for name, own in cases.items()
        }
        both = []
        for done in forks.run_two(TRAIN, json.dumps(filled), str(Path(__file__).parents[1])):
            assert done.returncode == 0, done.stderr
            lines = [line for line in done.stdout.splitlines() if line.startswith("WRONG")]
            both.append(dict(json.loads(line.removeprefix("WRONG")) for line in lines))
        assert [*map(len, both)] == [len(cases)] * 2
        return [{name: found for name, found in one.items() if found} for one in both]

    return wrong


def test_no_whole_weight_outlives_its_shard_and_removal_thaws_the_shards(wrong_in):
    assert wrong_in(QUICK) == [{}, {}]


@pytest.mark.slow
def test_no_technique_keeps_a_whole_weight(wrong_in):
    cases = every_technique()
    tried = {setting for settings in cases.values() for setting in settings}
    assert {
        LORA,
        "model.quantization=nf4",
        "adapter.kernel=peft",
        "model.kernels=liger",
        "tiling.mlp=2",
    } <= tried
    assert wrong_in(cases) == [{}, {}]

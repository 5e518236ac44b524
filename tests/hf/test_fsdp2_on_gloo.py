"""The stand-in for several GPUs: stock trainers shard by Accelerate's FSDP2, and train what one process does."""

from __future__ import annotations

import json

import pytest
from fsdp2_on_gloo import launch

TRAIN = """
import json, os
from datasets import Dataset
from fsdp2_on_gloo import FSDP2
from tiny_models import TINY, tiny_llama
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, Trainer, TrainingArguments

folder, kind, asks = sys.argv[1:]
world = int(os.environ["WORLD_SIZE"])
fields = dict(
    per_device_train_batch_size=12 // world, max_steps=3, logging_steps=1, logging_nan_inf_filter=False,
    report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-2, lr_scheduler_type="constant",
    max_grad_norm=0.5, train_sampling_strategy="sequential", **(FSDP2 if asks == "script" else {}),
)
model = tiny_llama(vocab_size=512, tie_word_embeddings=kind == "trainer")
ids = torch.randint(3, 512, (36, 16), generator=torch.Generator().manual_seed(1)).tolist()
labels = [[-100] * (number % 7) + row[number % 7:] for number, row in enumerate(ids)]
rows = Dataset.from_dict({"input_ids": ids, "labels": labels, "attention_mask": [[1] * 16] * 36})
if kind == "trainer":
    trainer = Trainer(model, TrainingArguments(folder, use_cpu=True, **fields), train_dataset=rows)
else:
    from trl import SFTConfig, SFTTrainer
    trainer = SFTTrainer(
        model, args=SFTConfig(folder, bf16=False, gradient_checkpointing=False, **fields), train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(TINY),
    )
trainer.train()
kinds = {type(weight) for weight in trainer.model_wrapped.parameters()}
assert kinds == {DTensor}, kinds
assert isinstance(trainer.model_wrapped, FSDPModule)
for weight in trainer.model_wrapped.parameters():
    assert weight.device_mesh.size() == world
logs = [log for log in trainer.state.log_history if "grad_norm" in log]
if trainer.is_world_process_zero():
    print(json.dumps({"loss": [log["loss"] for log in logs], "norm": [float(log["grad_norm"]) for log in logs]}))
"""


def trained(forks, folder, world, kind, asks):
    done = launch(forks, world, TRAIN, str(folder), kind, asks, by_launch=asks == "launch")
    assert [process.returncode for process in done] == [0] * world, done[-1].stderr
    (line,) = [line for line in done[0].stdout.splitlines() if line.startswith('{"loss"')]
    return json.loads(line)


@pytest.mark.parametrize("kind, asks", [("trainer", "launch"), ("sft", "script")])
def test_a_stock_trainer_shards_and_trains_what_one_process_does(kind, asks, forks, tmp_path):
    """Twelve rows a step, over one, two and three processes, asked for by the launch or by the script."""
    one, two, three = (trained(forks, tmp_path / f"{world}", world, kind, asks) for world in (1, 2, 3))
    assert len(one["loss"]) == 3
    for several in (two, three):
        assert several["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert several["norm"] == pytest.approx(one["norm"], rel=1e-5)

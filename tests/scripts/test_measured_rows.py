"""Runs that are compared get the same rows, in the same order, and rows that look like data to a GPU."""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np
import pytest
from measuring.constant_rows import OF_COMPARISONS
from measuring.measured_rows import (
    MeasuredRows,
    described,
    ordinary_tokens,
)
from transformers import AutoConfig, LlamaConfig

from lowmem_ft.data.row import IGNORED_LABEL
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.virtual_gpu.gpu import VirtualGPU


def test_no_token_is_drawn_that_the_config_names_for_a_purpose():
    special = {"bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": 6}
    tokens = set(ordinary_tokens(LlamaConfig(vocab_size=20, id2label={0: "no"}, **special)).tolist())
    assert tokens == set(range(20)) - {3, 4, 5, 6}


def test_nor_one_that_stands_for_an_image_or_a_sound():
    text = {"vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(
        "llava", text_config={"model_type": "llama", **text}, image_token_index=7, audio_token_id=8
    )
    drawn = set(ordinary_tokens(config).tolist())
    assert not drawn & {1, 2, 7, 8}
    assert drawn <= set(range(300))
    assert len(drawn) > 280


def test_a_row_is_full_of_different_tokens_each_learnt_but_the_first_of_a_document():
    rows = MeasuredRows.of(LlamaConfig(vocab_size=32000), (512,) * 4)
    row = rows.row(0)
    assert [len(example.input_ids_T) for example in row] == [512] * 4
    assert len(np.unique(np.concatenate([example.input_ids_T for example in row]))) == 2048
    for example in row:
        assert example.labels_T[0] == IGNORED_LABEL
        assert (example.labels_T[1:] == example.input_ids_T[1:]).all()
    columns = rows.columns(0)
    assert columns["position_ids"] == [*range(512)] * 4
    assert "position_ids" not in MeasuredRows.of(LlamaConfig(), (64,)).columns(0)


def test_a_row_is_the_same_whatever_is_drawn_before_it():
    one, other = (MeasuredRows.of(LlamaConfig(vocab_size=100), (8,)) for _ in range(2))
    assert one.columns(5) == [other.columns(number) for number in range(8)][5]
    assert one.columns(5) != one.columns(6)


COMPARED = """
import contextlib, json, sys
from unittest import mock
sys.path[:0] = json.loads(sys.argv[1])
import torch
import transcribed_liger
from transcribed_liger import TRANSCRIPTIONS, transcribed_kernels

from speed.peer_settings import setting_of
from speed.peers import PAGED, SFT, TRAINER, MicroBatches
from speed.this_gpu import ThisGPU
from measuring.measured_rows import documents_of
from measuring.real_run import run_for_real
from lowmem_ft.recipe import load_recipe
from transformers.models.qwen3 import modeling_qwen3

model, documents, runs = sys.argv[2], documents_of(sys.argv[3]), json.loads(sys.argv[4])
ROWS, MICRO_BATCHES, STEPS = 2, 2, 2

class Processor(ThisGPU):
    def __init__(self):
        super().__init__()
        self.device = torch.device("cpu")

    def end_step(self):
        self.step_ends.append(len(self.step_ends))

def note_inputs(module, given, named):
    if not torch.is_grad_enabled():  # ours first looks whether the model looks ahead
        return
    ids = named["input_ids"]
    positions = named.get("position_ids")
    if positions is None:
        positions = torch.arange(ids.shape[1]).expand_as(ids)
    seen.append([ids.tolist(), positions.tolist(), named["labels"].tolist()])

def note_rows(module, given):
    if not torch.is_grad_enabled():
        return
    rows = given[0].detach().flatten(0, -2)
    shares.append(len(torch.unique(rows, dim=0)) / len(rows))

def watched(build):
    def built(self, *arguments, **named):
        build(self, *arguments, **named)
        self.register_forward_pre_hook(note_inputs, with_kwargs=True)
        for layer in self.model.layers:
            layer.self_attn.o_proj.register_forward_pre_hook(note_rows)
            layer.mlp.down_proj.register_forward_pre_hook(note_rows)
    return built

transcribed = transcribed_liger.launch

def launch(kernel, *arguments, grid, **named):
    if kernel.fn.__name__ in TRANSCRIPTIONS:
        return transcribed(kernel, *arguments, grid=grid, **named)
    heads.append(kernel.fn.__name__)  # those of the loss, whose value nothing here depends on

modeling_qwen3.Qwen3ForCausalLM.__init__ = watched(modeling_qwen3.Qwen3ForCausalLM.__init__)
found = {}
for run in runs:
    seen, shares, heads, gpu = [], [], [], Processor()
    tool, _, setting = run.partition(" ")
    if tool == "ours":
        sizes = (ROWS, MICRO_BATCHES, sum(documents), str(len(documents) > 1).lower())
        keys = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps",
                "data.max_length", "data.packing")
        recipe = load_recipe(None, [f"model={model}", "model.weights=random", "data=any",
                                    "training.use_cpu=true", "model.dtype=bfloat16",
                                    *(f"{key}={size}" for key, size in zip(keys, sizes))])
        run_for_real(recipe, num_steps=STEPS, documents=documents)
    else:
        step = MicroBatches(setting=setting_of(setting), number=MICRO_BATCHES, documents=documents, steps=STEPS)
        with mock.patch.object(transcribed_liger, "launch", launch), transcribed_kernels():
            {"trainer": TRAINER, "sft": SFT, "paged": PAGED}[tool].run(gpu, step, model=model)
        assert len(gpu.step_ends) == STEPS
    found[run] = [seen, min(shares, default=None), heads.count("liger_cross_entropy_kernel")]
with open(sys.argv[5], "w") as file:
    json.dump(found, file)
"""


@pytest.fixture(scope="module")
def tiny_qwen3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    AutoConfig.for_model(
        "qwen3",
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        bos_token_id=7,
        eos_token_id=[8, 9],
        pad_token_id=10,
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def compared(forks, tiny_qwen3, tmp_path):
    """Runs tools on the same documents in one process, and returns of each what its forwards got, and more."""
    for package in ("bitsandbytes", "trl", "peft", "liger_kernel"):
        pytest.importorskip(package)

    def run(documents, *runs):
        out, paths = tmp_path / "found.json", json.dumps([path for path in sys.path if path])
        done = forks.run(
            COMPARED, paths, str(tiny_qwen3), documents, json.dumps(runs), str(out), folder=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return json.loads(out.read_text())

    return run


def digest(inputs):
    """Return a hash of ids, positions and labels of each forward, in their order."""
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


@pytest.mark.parametrize("documents", ["1x64", "4x16"])
def test_ours_and_each_other_tool_compute_the_same_rows_in_the_same_order(documents, compared):
    found = compared(documents, "ours", "paged 2:on", "trainer 2:off", "sft 2:off")
    ours, *others = (seen for seen, _, _ in found.values())
    assert len(ours) == 4
    assert len({json.dumps(ids) for ids, _, _ in ours}) == 4, "no micro-batch comes twice"
    assert {digest(theirs) for theirs in others} == {digest(ours)}
    for _, share, _ in found.values():
        assert share > 0.99


def test_each_head_of_a_peer_is_the_one_that_was_asked_for(compared):
    """Liger's cross entropy is launched once a chunk; what a head patches stays, so that each next one patches more."""
    found = compared(
        "1x64", "trainer 2:off:stock", "trainer 2:off", "trainer 2:on:wide", "trainer 2:off:whole"
    )
    stock, own, wide, whole = (launches for _, _, launches in found.values())
    assert stock == 0
    assert whole == 4, "one for each micro-batch"
    assert own == 16 * wide > 16 * whole
    assert len({digest(seen) for seen, _, _ in found.values()}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "run", ["trainer 2:off:stock:compiled", "sft 2:on:stock:compiled", "paged 2:on:compiled"]
)
def test_a_compiled_peer_runs_on_the_same_rows(run, compared):
    (compiled, *_), (plain, *_) = compared("1x64", run, run.removesuffix(":compiled")).values()
    assert digest(compiled) == digest(plain)


def test_what_a_virtual_gpu_does_not_see_is_refused_on_it():
    for package in ("bitsandbytes", "trl", "peft", "liger_kernel"):
        pytest.importorskip(package)
    from speed.peer_settings import setting_of
    from speed.peers import SFT, TRAINER, MicroBatches

    def run(peer, text):
        peer.run(VirtualGPU("h100-80gb"), MicroBatches(setting=setting_of(text), number=1))

    with pytest.raises(UserError, match=r"2:off:compiled: torch.compile does nothing on a virtual GPU"):
        run(TRAINER, "2:off:compiled")
    with pytest.raises(UserError, match=r"SFTTrainer.* has no setting 2:off:whole"):
        run(SFT, "2:off:whole")


def run_of(work, name, seconds, rows):
    measured = {"seconds": seconds, "process_bytes": 2**30, "hardware": "", "date": "", "libraries": ""}
    return {"work": work, "run": name, **measured, **rows}


def test_no_ratio_is_one_of_runs_on_different_rows():
    for package in ("bitsandbytes", "trl", "peft", "liger_kernel"):
        pytest.importorskip(package)
    from bench.speed import measured_lines

    short, long = described((512,) * 4), described((2048,))
    old = [run_of("8b", "theirs", 1, {}), run_of("8b", "ours", 2, {})]
    new = [run_of("8b", "theirs", 3, long), run_of("8b", "ours", 6, long), run_of("8b", "ours", 5, short)]
    *said, _ = "\n".join(measured_lines([*old, *new])).split("|", 1)
    assert OF_COMPARISONS.split(",")[0] in said[0]
    lines = [line for line in measured_lines([*old, *new]) if "theirs" in line or "ours" in line]
    ratios = [tuple(cell.strip() for cell in line.split("|")[-3:-1]) for line in lines[-5:]]
    assert ratios == [("", ""), ("", ""), ("", ""), ("0.50", "1.00"), ("", "")]
    assert measured_lines(new)[0].startswith("| work"), "with the last of the old rows the sentence goes"

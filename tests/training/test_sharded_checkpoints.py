"""Processes that share a model save it together, and as many, or fewer, or more, go on from it."""

from __future__ import annotations

import json
import shutil
import zlib

import pytest
import torch
from processes import train_in_processes
from roundings import LOSS, SMOOTH_ADAMW, of_updates
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lowmem_ft.foundation.errors import CheckpointError
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.folder.checkpoint_folders import find_checkpoint, read_manifest
from lowmem_ft.training.run.loop import train

TWELVE = (
    "training.max_steps=4",
    "training.save_steps=2",
    "training.eval_steps=null",
    "data.eval_size=null",
    "training.use_cpu=true",
    "budget.preflight=false",
    "training.full_determinism=true",
    SMOOTH_ADAMW,
)
"""Steps of 12 examples, which 1 to 4 processes divide evenly."""


def share(num_processes):
    return (
        f"training.per_device_train_batch_size={12 // num_processes}",
        "training.gradient_accumulation_steps=1",
    )


def train_in(forks, num_processes, folder, *options):
    settings = ("recipe=tiny", *TWELVE, *share(num_processes), *options, f"training.output_dir={folder}")
    return train_in_processes(forks, num_processes, "fsdp2", *settings)


def said(processes):
    return "".join(process.stderr for process in processes)


def without_its_end(run, copy):
    """A copy of a run of four steps that was stopped after two."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoint-4")
    shutil.rmtree(copy / "model")
    return copy


AUTO = "training.resume_from_checkpoint=auto"


@pytest.fixture(scope="module")
def of_two(forks, tmp_path_factory):
    """A run of two processes."""
    run = tmp_path_factory.mktemp("of-two") / "run"
    train_in(forks, 2, run)
    return run


@pytest.fixture(scope="module")
def of_one(tmp_path_factory):
    """The same run of one."""
    run = tmp_path_factory.mktemp("of-one") / "run"
    train(load_recipe("tiny", [*TWELVE, *share(1), f"training.output_dir={run}"]))
    return run


def assert_same_bits(one, other):
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def assert_close(one, other, metrics):
    assert metrics(one) == pytest.approx(metrics(other), rel=LOSS)
    first, second = (load_file(run / "model/model.safetensors") for run in (one, other))
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=of_updates(4, 0.01))


def test_the_finished_model_is_a_folder_as_any_other(of_two, of_one, metrics):
    assert_close(of_two, of_one, metrics)
    names = {file.name for file in (of_one / "model").iterdir()}
    assert {file.name for file in (of_two / "model").iterdir()} == names
    for name in ("config.json", "generation_config.json"):
        assert (of_two / "model" / name).read_text() == (of_one / "model" / name).read_text()
    model = AutoModelForCausalLM.from_pretrained(of_two / "model")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(parameter.numel() for parameter in model.parameters())


def test_a_checkpoint_holds_each_element_once_and_no_pickle(of_two, of_one):
    checkpoint = of_two / "checkpoint-2"
    kinds = {file.name.rpartition(".")[2] for file in checkpoint.iterdir()}
    assert kinds == {"safetensors", "json", "jinja"}

    def num_bytes(pattern, folder):
        return sum(tensor.nbytes for file in folder.glob(pattern) for tensor in load_file(file).values())

    whole = of_one / "checkpoint-2"
    assert num_bytes("shard-*-model-*", checkpoint) == num_bytes("model*", whole)
    assert num_bytes("shard-*-optimizer-*", checkpoint) == num_bytes("optimizer*", whole)
    halves = [num_bytes(f"shard-0000{rank}-*", checkpoint) for rank in (0, 1)]
    assert max(halves) <= 0.51 * sum(halves)


def test_as_many_processes_go_on_bit_for_bit(forks, of_two, metrics, tmp_path):
    stopped = without_its_end(of_two, tmp_path / "run")
    train_in(forks, 2, stopped, AUTO)
    assert metrics(stopped) == metrics(of_two)
    assert metrics(stopped, "grad_norm") == metrics(of_two, "grad_norm")
    assert_same_bits(stopped / "model", of_two / "model")


def test_one_process_goes_on_where_two_were(of_two, metrics, tmp_path):
    stopped = without_its_end(of_two, tmp_path / "run")
    train(load_recipe("tiny", [*TWELVE, *share(1), AUTO, f"training.output_dir={stopped}"]))
    assert_close(stopped, of_two, metrics)


def test_two_go_on_where_one_was(forks, of_one, metrics, tmp_path):
    stopped = without_its_end(of_one, tmp_path / "run")
    train_in(forks, 2, stopped, AUTO)
    assert_close(stopped, of_one, metrics)


def _delete(file):
    file.unlink()


def _cut_off(file):
    file.write_bytes(file.read_bytes()[:-4])


def _take_another(file):
    shutil.copy(file.parent.parent / "checkpoint-2" / file.name, file)


@pytest.mark.parametrize("what", ["model", "optimizer"])
@pytest.mark.parametrize(
    "damage,problem",
    [
        (_delete, "missing"),
        (_cut_off, "different in size"),
        (_take_another, "was written for another checkpoint"),
    ],
)
def test_a_part_that_is_not_of_the_checkpoint_is_named_and_the_older_one_taken(
    of_two, tmp_path, what, damage, problem, caplog
):
    run = tmp_path / "run"
    shutil.copytree(of_two, run)
    file = run / "checkpoint-4" / f"shard-00001-of-00002-{what}-00000.safetensors"
    damage(file)
    with pytest.raises(CheckpointError, match=rf"checkpoint-4 is damaged: {file.name}.*{problem}"):
        read_manifest(run / "checkpoint-4")
    assert find_checkpoint(run) == run / "checkpoint-2"
    assert file.name in caplog.text


def test_an_older_version_says_that_it_cannot_read_it(of_two, of_one):
    for run, known in ((of_one, 1), (of_two, 2)):
        assert json.loads((run / "checkpoint-2" / "checkpoint.json").read_text())["format"] == known


def test_torch_reads_the_parts_by_itself(of_two):
    """The header's words are those of torch.distributed.checkpoint."""
    from torch.distributed import checkpoint as dcp

    from lowmem_ft.models.files.checkpoint_files import lazy_weights

    folder = str(of_two / "checkpoint-4")
    ours = {name: values[...] for name, values in lazy_weights(folder).items()}
    theirs = {name: torch.zeros_like(tensor) for name, tensor in ours.items()}
    dcp.load(theirs, storage_reader=dcp.HuggingFaceStorageReader(folder), no_dist=True)
    trained = load_file(of_two / "model" / "model.safetensors")
    for name, tensor in trained.items():
        assert torch.equal(ours[name], tensor)
        assert torch.equal(theirs[name], tensor)


COULD_NOT_SAVE = """
import sys
from lowmem_ft.cli.commands.train import main
from lowmem_ft.models import gathering

def made_of_several(model, tensors, stock=gathering.revert_weight_conversion):
    # As if a file had two weights in one.
    pair = {name: tensors.pop(name) for name in list(tensors) if name.endswith(("gate_proj.weight", "up_proj.weight"))}
    together = {"gate_up": next(iter(pair.values()))} if len(pair) > 1 else {}
    return {**stock(model, tensors), **together}

gathering.revert_weight_conversion = made_of_several
sys.exit(main())
"""


def test_a_model_that_could_not_be_saved_is_refused_before_it_is_trained(forks, tmp_path):
    settings = (
        "recipe=tiny",
        "training.use_cpu=true",
        "budget.preflight=false",
        "distributed.strategy=fsdp2",
    )
    processes = forks.run_two(COULD_NOT_SAVE, *settings, f"training.output_dir={tmp_path / 'run'}")
    assert 2 in [process.returncode for process in processes]
    said = "".join(process.stderr for process in processes)
    assert "have some that combine several of them: gate_up" in said
    assert "step 1" not in said


def test_each_part_has_its_checksum(of_two):
    checkpoint = of_two / "checkpoint-4"
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    assert manifest["checksums"].keys() == manifest["files"].keys()
    assert manifest["checksums"] == {
        name: zlib.crc32((checkpoint / name).read_bytes()) for name in manifest["files"]
    }

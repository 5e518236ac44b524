"""Of cards of which one is not enough, the fewest that hold a recipe; all with bfloat16 share a trace."""

import dataclasses

import pytest
from rich.console import Console
from tiny_models import save_llama

from lowmem_ft.cli.commands.estimate import main
from lowmem_ft.cli.estimating import estimate_recipe
from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.units import GIB
from lowmem_ft.planning.estimator import estimate_memory, estimate_on_gpus, estimate_on_several
from lowmem_ft.planning.estimator.estimate import SharedTraces
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.gpu_count import on_gpus
from lowmem_ft.reports.gpu_table import several_table

GPUS = load_gpus()


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A model of 4 GiB in training and two thin layers, so that its trace is short."""
    folder = tmp_path_factory.mktemp("model")
    save_llama(
        folder,
        layers=2,
        hidden=1024,
        inner=512,
        heads=8,
        vocab_size=128_000,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return folder


def recipe_of(folder, *settings):
    short = ["data.max_length=64", "data.eval_size=null", "training.eval_steps=null"]
    return load_recipe("tiny", [f"model={folder}", *short, "training.use_cpu=false", *settings])


def card(name, gib):
    return dataclasses.replace(GPUS[name], memory_bytes=int(gib * GIB))


def in_all(recipe, number, gpu):
    """By itself, of the first and the last process, whichever needs more."""
    estimate = estimate_memory(on_gpus(recipe, f"{number}x{gpu.name}")[0], gpu)
    return max(estimate.process_peak_bytes, estimate.processes.last_peak_bytes)


def test_the_fewest_that_hold_it_are_found(large):
    recipe = recipe_of(large)
    needs = {1: estimate_memory(recipe, "l4").process_peak_bytes}
    needs |= {number: in_all(recipe, number, GPUS["l4"]) for number in (2, 4)}
    assert needs[1] > needs[2] > needs[4]
    room = {name: needs[number] / GIB + 0.3 for name, number in (("a10", 2), ("l4", 4))}
    gpus = [card(name, gib) for name, gib in {**room, "rtx-3080": 0.9}.items()]
    seen = []
    found = estimate_on_several(recipe, gpus, on_number=seen.append)
    assert seen == list(found.tried) == [2, 4, 8]
    assert {e.gpu.name: e.processes.num_processes for e in found.estimates} == {"a10": 2, "l4": 4}
    assert all(estimate.fits for estimate in found.estimates)
    assert found.estimates[0].process_peak_bytes == in_all(recipe, 2, gpus[0])


@pytest.mark.parametrize(
    "settings",
    [
        ["distributed.strategy=ddp", "distributed.num_processes=2"],
        ["distributed.num_processes=2"],
        ["distributed.strategy=none"],
    ],
)
def test_a_recipe_that_says_how_many_is_not_tried(large, settings):
    found = estimate_on_several(recipe_of(large, *settings), [card("l4", 1)])
    assert found.tried == found.estimates == found.problems == ()


def test_what_cannot_be_shared_says_why(large):
    found = estimate_on_several(recipe_of(large, "optimizer.name=adafactor"), [card("l4", 1)])
    (problem,) = found.problems
    assert problem.startswith("optimizer.name=adafactor works in one process")
    with (console := Console(width=500)).capture() as said:
        console.print(several_table(found, GPUS))
    assert problem in said.get()


def test_a_line_of_several_is_of_all_of_them(large):
    recipe = recipe_of(large, "distributed.strategy=fsdp2", "distributed.num_processes=3")
    (estimate,) = estimate_on_gpus(recipe, [GPUS["l4"]])
    assert estimate.processes.last_peak_bytes == estimate_memory(recipe, "l4").processes.last_peak_bytes > 0


def test_the_command_says_it_in_text_and_json(large, capsys, monkeypatch):
    monkeypatch.setattr(estimate_recipe, "load_gpus", lambda: {"l4": card("l4", 4.1), "a10": card("a10", 99)})
    command = ["estimate", "recipe=tiny", f"model={large}", "data.max_length=64", "training.use_cpu=false"]
    assert main([*command[1:], "--gpu", "all", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert "4xl4" in err
    assert '"several_cards": {' in out
    assert all(len(line) <= 80 for line in err.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [[], ["data.packing=true"], ["model.dtype=bfloat16", "training.mixed_precision=no"]]
)
def test_cards_with_bfloat16_share_a_trace(large, settings):
    """From Ampere to Blackwell: their own traces need the same bytes and, except for launches, the same seconds.

    Hopper and Blackwell take cuDNN's attention in fewer launches, which show where a fast GPU waits for the host.
    """
    recipe, _ = on_gpus(recipe_of(large, *settings), "2xl4")
    own, shared = SharedTraces(recipe), SharedTraces(recipe, kind=lambda gpu: gpu.has_bfloat16)
    for name in ("a100-80gb", "a40", "l40s", "h100-80gb", "b200", "rtx-5090"):
        one, other = own.estimate(GPUS[name]), shared.estimate(GPUS[name])
        assert one.process_peak_bytes == other.process_peak_bytes, name
        assert one.step.seconds == pytest.approx(other.step.seconds, rel=0.01), name

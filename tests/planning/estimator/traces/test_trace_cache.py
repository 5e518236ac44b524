"""Traces that are kept: the same estimates from them, and none where anything is another."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import lowmem_ft
from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.packages import LEFT_OUT_VARIABLE
from lowmem_ft.foundation.user_paths import KEPT_FOLDER_VARIABLE
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.traces import trace_cache, trace_key, tracing
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.planning.estimator.traces.trace_key import TraceKey
from lowmem_ft.planning.estimator.traces.traced_recipe import ShortTrace
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.techniques.modules.model_parts import decoder_layers

NUM_LAYERS = 14


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=NUM_LAYERS,
        vocab_size=64,
        max_position_embeddings=64,
    )
    config.save_pretrained(folder)
    return folder


def test_a_machine_without_triton_updates_otherwise_and_is_traced_for_itself(
    model: Path, folder: Path, fresh: MemoryEstimate
) -> None:
    with_triton, no_triton = fresh, dataclasses.replace(find_gpu("rtx-4090"), has_triton=False)
    without = estimated(recipe_of(model), KeptTraces(folder), no_triton)
    assert with_triton.step is not None
    assert without.step is not None
    assert with_triton.step.seconds != without.step.seconds
    assert len(with_triton.timeline.events) < len(without.timeline.events)


def test_a_hybrid_is_kept_apart_with_kernels_of_packages_and_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.Qwen3_5TextConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=4,
        vocab_size=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )
    config.save_pretrained(tmp_path / "model")
    recipe, kept = recipe_of(tmp_path / "model"), KeptTraces(tmp_path / "traces")
    found: dict[str, list[MemoryEstimate]] = {"": [], "1": []}
    for left_out in ("", "1", "", "1"):
        monkeypatch.setenv(LEFT_OUT_VARIABLE, left_out)
        found[left_out].append(estimated(recipe, kept))
    for first, again in found.values():
        assert_same(again, first)
    with_them, without = (estimates[0] for estimates in found.values())
    assert any("flash-linear-attention, which has to be installed" in one for one in with_them.choices)
    assert any("as without flash-linear-attention" in one for one in without.choices)
    assert with_them.allocated_peak_bytes != without.allocated_peak_bytes


def recipe_of(model: Path, *settings: str) -> Recipe:
    short = ("data.max_length=16", "training.gradient_accumulation_steps=1", "data.eval_size=2")
    return load_recipe("tiny", [f"model={model}", *short, *settings])


def estimated(recipe: Recipe, kept: KeptTraces | None = None, gpu: str | Gpu = "rtx-4090") -> MemoryEstimate:
    """All that is said, down to the timeline; not held against the recipe's own budget, which is no part of a trace."""
    estimate = estimate_memory(recipe, gpu, budget=Budget(), kept=kept)
    assert estimate.timeline.events
    return dataclasses.replace(estimate, trace_seconds=0.0)


def assert_same(mine: MemoryEstimate, fresh: MemoryEstimate) -> None:
    assert mine == fresh
    assert mine.timeline == fresh.timeline


KEY = TraceKey("a" * 24, "b" * 24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where traces are kept from one process to the next."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def kept(folder: Path) -> KeptTraces:
    return KeptTraces(folder)


@pytest.fixture(scope="module")
def fresh(model: Path, kept: KeptTraces) -> MemoryEstimate:
    """The recipe's estimate when nothing was kept before."""
    assert not kept._in_memory
    return estimated(recipe_of(model), kept)


@pytest.fixture(scope="module")
def short(fresh: MemoryEstimate, kept: KeptTraces) -> ShortTrace:
    """What was kept of it."""
    (found,) = kept._in_memory.values()
    return found


def test_the_same_again_is_equal_and_traces_nothing_in_this_process_and_in_the_next(
    model: Path, folder: Path, kept: KeptTraces, fresh: MemoryEstimate, traced_depths: list[int]
) -> None:
    recipe = recipe_of(model)
    assert_same(estimated(recipe, kept), fresh)
    assert_same(estimated(recipe, KeptTraces(folder)), fresh)
    assert traced_depths == []


def test_a_trace_of_all_layers_is_kept_too(short: ShortTrace, tmp_path: Path) -> None:
    whole = dataclasses.replace(short, traced=short.whole(), repetition=None)
    KeptTraces(tmp_path).keep(KEY, whole)
    assert KeptTraces(tmp_path).find(KEY) == whole


STREAMED = (
    *("accumulation.order=vertical", "model.dtype=bfloat16", "optimizer.master=split16"),
    *("optimizer.in_backward=true", "offload.optimizer=host", "offload.activations=inputs"),
    *("offload.parameters=stream", "loss.chunk_tokens=8"),
)
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "rows": ((), ("training.per_device_train_batch_size=3",)),
    "length": (("loss.chunk_tokens=null",), ("data.max_length=48",)),
    "rows-of-evaluation": ((), ("training.per_device_eval_batch_size=5",)),
    "accumulation": ((), ("training.gradient_accumulation_steps=4",)),
    "waiting-micro-batches": (
        ("training.gradient_accumulation_steps=3",),
        ("training.gradient_accumulation_steps=8", "training.per_device_train_batch_size=2"),
    ),
    "chunks-of-the-loss": (("loss.chunk_tokens=8",), ("data.max_length=64",)),
    "one-row-of-two": (("model.dtype=bfloat16",), ("training.per_device_train_batch_size=1",)),
    "streamed": (STREAMED, ("training.per_device_train_batch_size=4", "data.max_length=32")),
    "streamed-accumulation": (
        (*STREAMED, "training.gradient_accumulation_steps=5"),
        ("training.gradient_accumulation_steps=9", "data.max_length=24"),
    ),
}
SAME_PROGRAM = ["rows", "length", "waiting-micro-batches", "chunks-of-the-loss", "streamed"]
"""Those of which one short trace must be enough: their layers do the same."""
QUICK = ["waiting-micro-batches", "streamed"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in VARIANTS]
)
def test_a_varied_batch_is_estimated_as_if_it_were_alone(
    name: str, model: Path, tmp_path: Path, traced_depths: list[int]
) -> None:
    common, varied = VARIANTS[name]
    estimated(recipe_of(model, *common), KeptTraces(tmp_path))
    fresh = estimated(recipe_of(model, *common, *varied))
    del traced_depths[:]
    assert_same(estimated(recipe_of(model, *common, *varied), KeptTraces(tmp_path)), fresh)
    assert max(traced_depths) < NUM_LAYERS
    if name in SAME_PROGRAM:
        assert len(traced_depths) == 1


def test_other_chunks_of_the_loss_share_what_was_shown(model: Path, traced_depths: list[int]) -> None:
    kept = KeptTraces()
    common = ("data.max_length=64", "training.gradient_accumulation_steps=6", "accumulation.order=vertical")
    estimated(recipe_of(model, *common, "loss.chunk_tokens=8"), kept)
    recipe = recipe_of(model, *common, "loss.chunk_tokens=16")
    fresh = estimated(recipe)
    del traced_depths[:]
    assert_same(estimated(recipe, kept), fresh)
    assert len(traced_depths) == 1


@pytest.mark.slow
def test_other_numbers_of_resident_layers_share_the_trace(model: Path, traced_depths: list[int]) -> None:
    settings = (
        "adapter.name=lora",
        "model.dtype=bfloat16",
        "offload.parameters=stream",
        "checkpointing.mode=full",
    )
    config = transformers.AutoConfig.from_pretrained(model)
    config.num_hidden_layers = 26
    config.save_pretrained(model / "deep")
    few, many = (
        recipe_of(model / "deep", *settings, f"offload.resident_layers={number}") for number in (8, 15)
    )
    kept = KeptTraces()
    estimated(few, kept)
    fresh = estimated(many)
    del traced_depths[:]
    assert_same(estimated(many, kept), fresh)
    assert traced_depths == []


def test_a_stand_in_is_not_taken_for_one_of_as_many_layers_that_repeat_otherwise(model: Path) -> None:
    """Four checkpointed layers and four that are not: both kinds repeat for 8 of 20, only the second for 16."""
    config = transformers.AutoConfig.from_pretrained(model)
    config.num_hidden_layers = 20
    config.save_pretrained(model / "twenty")
    some, most = (
        recipe_of(model / "twenty", "checkpointing.mode=full", f"checkpointing.skip_last_layers={number}")
        for number in (8, 16)
    )
    kept = KeptTraces()
    fresh = estimated(some, kept)
    assert_same(estimated(most, kept), estimated(most))
    assert_same(estimated(some, kept), fresh)


def test_gpus_that_run_the_same_program_share_what_was_shown(model: Path, traced_depths: list[int]) -> None:
    kept = KeptTraces()
    recipe = recipe_of(model, "model.dtype=bfloat16")
    estimated(recipe, kept, "a100-80gb")
    fresh = estimated(recipe, gpu="rtx-4090")
    del traced_depths[:]
    assert_same(estimated(recipe, kept, "rtx-4090"), fresh)
    assert len(traced_depths) == 1


def _keep_more_in_deeper_models(model: torch.nn.Module, rows: int) -> None:
    """With several rows, a deep model keeps an activation in every second layer."""

    def keep(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output.exp().sigmoid() if output.size(0) > rows else None

    layers = decoder_layers(model)
    for layer in list(layers)[len(layers) // 2 :]:
        layer.register_forward_hook(keep)


def test_a_batch_that_makes_another_program_of_it_inherits_nothing(
    model: Path, tmp_path: Path, traced_depths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = tracing.build_session

    def build_with_hooks(*args: Any, **kwargs: Any) -> Any:
        session = build(*args, **kwargs)
        _keep_more_in_deeper_models(session.unwrapped_model, rows=2)
        return session

    monkeypatch.setattr(tracing, "build_session", build_with_hooks)
    kept = KeptTraces()
    two, more = (
        recipe_of(model, "checkpointing.mode=none", f"training.per_device_train_batch_size={rows}")
        for rows in (2, 3)
    )
    estimated(two, kept)
    assert max(traced_depths) < NUM_LAYERS  # else there would be nothing to inherit
    del traced_depths[:]
    mine = estimated(more, kept)
    assert traced_depths[-1] == NUM_LAYERS
    assert_same(mine, estimated(more))


# --- keys -------------------------------------------------------------------------------------------------------------

OTHER_VALUES = {
    "training.profile_steps": (2, 3),
    "data.sample_by": "document",
    "data.format": "text",
    "data.loss_on": "all",
    "training.report_to": ("tensorboard",),
    "data.data_files": ["a.txt"],
    "budget.device": "5GiB",
    "budget.host": "50GiB",
    "plan.allow": ("lora",),
    "plan.keep": ("optimizer",),
}


def test_keys_that_no_trace_sees_change_nothing(model: Path, fresh: MemoryEstimate) -> None:
    recipe = recipe_of(model)
    other = recipe
    for path in trace_key.NOT_TRACED:
        other = _with(other, path, _another(path, recipe_keys()[path].value_in(recipe)))
    assert other != recipe
    assert_same(estimated(other), fresh)


def _with(recipe: Recipe, path: str, value: Any) -> Recipe:
    group, _, name = path.rpartition(".")
    if not group:
        return dataclasses.replace(recipe, **{name: value})
    return dataclasses.replace(
        recipe, **{group: dataclasses.replace(getattr(recipe, group), **{name: value})}
    )


def _another(path: str, value: Any) -> Any:
    if path in OTHER_VALUES:
        return OTHER_VALUES[path]
    if isinstance(value, bool):
        return not value
    return value + 3 if isinstance(value, (int, float)) else "other"


def key_of(recipe: Recipe, machine: object = "gpu") -> trace_key.TraceKey | None:
    return trace_key.trace_key(recipe, transformers.LlamaConfig(num_hidden_layers=3), machine)


def test_every_other_key_is_part_of_it(model: Path) -> None:
    recipe = recipe_of(model)
    own = key_of(recipe)
    assert own is not None
    for path, key in recipe_keys().items():
        if path in trace_key.NOT_TRACED or path == "model.trust_remote_code":
            continue
        other = key_of(_with(recipe, path, _another(path, key.value_in(recipe))))
        assert other is not None
        assert other != own, path
        assert (other.family == own.family) == (path in trace_key.BATCH_SHAPE), path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small folder as the package whose files are part of the key, and nothing that is remembered of others."""
    (tmp_path / "room").mkdir()
    for name in ("__init__.py", "room/one.py"):
        (tmp_path / name).write_text("a = 1\n")
    monkeypatch.setattr(lowmem_ft, "__file__", str(tmp_path / "__init__.py"))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    trace_key._versions.cache_clear()
    trace_key._digest_of_source.cache_clear()


@pytest.mark.parametrize(
    "change, is_other",
    [
        (lambda package: (package / "room" / "one.py").write_text("a = 2\n"), True),
        (lambda package: (package / "room" / "one.py").rename(package / "room" / "two.py"), True),
        (lambda package: (package / "room" / "two.py").write_text(""), True),
        (lambda package: (package / "room" / "notes.txt").write_text("a = 2\n"), False),
    ],
    ids=["edited", "renamed", "new", "no code"],
)
def test_the_source_is_part_of_it(
    change: Callable[[Path], object], is_other: bool, package: Path, model: Path
) -> None:
    before = key_of(recipe_of(model))
    change(package)
    forget()
    assert (key_of(recipe_of(model)) != before) == is_other


@pytest.mark.parametrize(
    "change, is_other",
    [
        (lambda folder: (folder / "fla_core-0.6.0.dist-info").mkdir(), True),  # no list names it
        (lambda folder: (folder / "torch-2.13.0.dist-info").rmdir(), True),
        (lambda folder: (folder / "torch-2.13.0.dist-info").rename(folder / "torch-2.14.0.dist-info"), True),
        (lambda folder: (folder / "__pycache__").mkdir(), False),
    ],
    ids=["installed", "removed", "upgraded", "no package"],
)
def test_versions_of_all_that_is_installed_are_part_of_it(
    change: Callable[[Path], object],
    is_other: bool,
    package: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "any name"  # as of `pip install --target`
    (folder / "torch-2.13.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(folder)
    forget()
    before = key_of(recipe_of(model))
    change(folder)
    forget()
    assert (key_of(recipe_of(model)) != before) == is_other


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8"),
        lambda patch: patch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False),
        lambda patch: patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True),
    ],
    ids=["environment", "attention", "determinism"],
)
def test_what_else_a_trace_depends_on_is_part_of_it(
    change: Callable[[pytest.MonkeyPatch], None], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key_of(recipe_of(model))
    change(monkeypatch)
    assert key_of(recipe_of(model)) != before


def test_architecture_and_machine_are_part_of_it(model: Path) -> None:
    recipe = recipe_of(model)
    deeper = trace_key.trace_key(recipe, transformers.LlamaConfig(num_hidden_layers=4), "gpu")
    assert len({key_of(recipe), key_of(recipe, "other"), deeper}) == 3


def test_code_that_comes_with_a_model_is_not_compared(model: Path) -> None:
    assert key_of(recipe_of(model, "model.trust_remote_code=true")) is None


# --- files ------------------------------------------------------------------------------------------------------------


def _of_something_else(file: Path) -> None:
    with np.load(file) as arrays:
        other = dict(arrays)
    header = other["header"].tobytes().replace(KEY.family.encode(), b"0" * 24)
    _save(file, {**other, "header": np.frombuffer(header, np.uint8)})


def _with_objects(file: Path) -> None:
    _save(file, {"header": np.array([print], dtype=object)})


def _save(file: Path, arrays: dict[str, Any]) -> None:
    with file.open("wb") as stream:
        np.savez(stream, allow_pickle=True, **arrays)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"no archive"),
        lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
        lambda file: file.write_bytes(file.read_bytes()[:3000] + b"?" + file.read_bytes()[3001:]),
        _of_something_else,
        _with_objects,
    ],
    ids=["empty", "foreign", "cut", "garbled", "of-something-else", "with-pickled-objects"],
)
def test_what_cannot_be_read_is_made_anew(
    spoil: Callable[[Path], None], short: ShortTrace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    KeptTraces(tmp_path).keep(KEY, short)
    (file,) = tmp_path.iterdir()
    spoil(file)
    with caplog.at_level(logging.INFO, trace_cache.__name__):
        kept = KeptTraces(tmp_path)
        assert kept.find(KEY) is None
        assert kept.layers(KEY) is None
    assert "made again" in caplog.text
    kept.keep(KEY, short)
    assert KeptTraces(tmp_path).find(KEY) is not None


def test_no_bit_of_a_kept_trace_can_end_an_estimate(short: ShortTrace, tmp_path: Path) -> None:
    KeptTraces(tmp_path).keep(KEY, short)
    (file,) = tmp_path.iterdir()
    whole, found = file.read_bytes(), []
    for position in np.random.default_rng(0).integers(len(whole), size=150).tolist():
        spoilt = bytearray(whole)
        spoilt[position] ^= 1 << position % 8
        file.write_bytes(spoilt)
        found.append(KeptTraces(tmp_path).find(KEY))  # or there would be an error
    assert None in found
    file.write_bytes(whole)
    assert KeptTraces(tmp_path).find(KEY) is not None


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(
    short: ShortTrace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    kept = KeptTraces(tmp_path / "file" / "traces")
    for _ in range(2):
        kept.keep(KEY, short)
    (said,) = caplog.messages
    assert f"not kept in {tmp_path / 'file' / 'traces'}: " in said
    assert "LOWMEM_FT_TRACE_CACHE names another folder" in said
    assert kept.find(KEY) is short


def test_the_files_used_longest_ago_go_first(short: ShortTrace, tmp_path: Path) -> None:
    first, second, third = (TraceKey(KEY.family, letter * 24) for letter in "xyz")
    KeptTraces(tmp_path).keep(first, short)
    KeptTraces(tmp_path).keep(second, short)
    files = sorted(tmp_path.iterdir())
    for age, file in enumerate(files):
        os.utime(file, (1e9 - age, 1e9 - age))
    KeptTraces(tmp_path).find(second)  # used now
    room = sum(file.stat().st_size for file in files) * 5 // 4
    KeptTraces(tmp_path, max_folder_bytes=room).keep(third, short)
    assert [KeptTraces(tmp_path).find(key) is None for key in (first, second, third)] == [True, False, False]


def test_how_layers_repeat_in_another_program_of_the_model_is_a_guess(short: ShortTrace) -> None:
    """Where the smallest stand-in shows nothing, the next program of the model begins with the larger one."""
    assert short.repetition is not None
    kept, layers = KeptTraces(), short.repetition.layers
    kept.keep(KEY, short)
    other = KEY._replace(family="another program")
    assert kept.layers(other) is None
    assert kept.has(other, layers)
    assert not kept.has(other, dataclasses.replace(layers, lead=layers.lead + 1))
    assert not kept.has(KEY._replace(architecture="another model"), layers)


def test_memory_holds_the_latest_alone(short: ShortTrace) -> None:
    kept = KeptTraces()
    keys = [TraceKey(KEY.family, str(number)) for number in range(trace_cache.MAX_IN_MEMORY + 1)]
    for key in keys:
        kept.keep(key, short)
    assert [kept.find(key) is None for key in keys] == [True] + [False] * trace_cache.MAX_IN_MEMORY


def test_users_choose_the_folder_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = {"off": None, str(tmp_path): tmp_path, "": tmp_path / "caches" / "lowmem_ft" / "traces"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    for value, folder in chosen.items():
        monkeypatch.setenv(KEPT_FOLDER_VARIABLE, value)
        assert KeptTraces.of_user()._folder == folder

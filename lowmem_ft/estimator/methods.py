"""A model alone: what it needs to be fine-tuned in full, with LoRA and with QLoRA, by the recipes that come with us."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lowmem_ft.catalog.gpu import Gpu
from lowmem_ft.errors import UserError
from lowmem_ft.estimator.estimate import CannotRun, estimate_on_gpus
from lowmem_ft.estimator.kept_traces import KeptTraces
from lowmem_ft.estimator.runtime import model_on_meta
from lowmem_ft.memory.estimate import MemoryEstimate
from lowmem_ft.models import load_model_config, max_positions
from lowmem_ft.recipe import Recipe, load_recipe


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to fine-tune any model.

    Args:
        name: ``full``, ``lora`` or ``qlora``.
        title: for people.
        recipe: the shipped recipe that does it, for a model of some 8 billion parameters and for others.
        without_bfloat16: what it takes on a GPU that does not compute with bfloat16.
        resident_without_bfloat16: a shipped recipe that such a GPU tries first: with float32 weights on the GPU it is
            much faster than with streamed ones, and a small model fits.
        is_traced_in_pieces: whether further micro-batches add nothing to its peak, so that one is traced.
    """

    name: str
    title: str
    recipe: str
    without_bfloat16: tuple[str, ...]
    resident_without_bfloat16: str | None = None
    is_traced_in_pieces: bool = False


_FLOAT16 = ("model.dtype=float16", "training.mixed_precision=fp16")

METHODS = (
    Method(
        name="full",
        title="full",
        recipe="8b-8gb",  # the lowest rung of the ladder
        without_bfloat16=("model.dtype=float32", "optimizer.master=fp32", "training.mixed_precision=no"),
        resident_without_bfloat16="1b-fp16-t4",
    ),
    Method(name="lora", title="LoRA", recipe="7b-lora", without_bfloat16=_FLOAT16, is_traced_in_pieces=True),
    Method(
        name="qlora", title="QLoRA", recipe="7b-qlora", without_bfloat16=_FLOAT16, is_traced_in_pieces=True
    ),
)

_NO_HELD_OUT_DATA = ("data.eval_split=null", "training.eval_steps=null")
_ONE_MICRO_BATCH = ("training.gradient_accumulation_steps=1",)


@dataclass(frozen=True, kw_only=True)
class MethodEstimate:
    """What one method needs on one GPU.

    Args:
        method: the method.
        gpu: the GPU.
        command: settings that train it so, beside the data: ``recipe=NAME model=MODEL`` and what differs.
        estimate: what it needs; None if the GPU or the model cannot do it.
        problems: why it cannot; empty if it can.
    """

    method: Method
    gpu: Gpu
    command: tuple[str, ...]
    estimate: MemoryEstimate | None = None
    problems: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether it can be done on the GPU, and fits."""
        return self.estimate is not None and self.estimate.fits


def estimate_methods(
    model: str,
    gpus: Sequence[Gpu],
    *,
    settings: Sequence[str] = (),
    float32_streaming: bool = True,
    kept: KeptTraces | None = None,
    on_start: Callable[[str], None] = lambda doing: None,
) -> list[MethodEstimate]:
    """What a model needs on each GPU by each method: one optimizer step of rows of up to 2048 tokens.

    GPUs with bfloat16 share one trace of a method, and so do those without, each with its own workspaces. Their
    attention kernels differ: they were seen to take the same memory, and within 1 % the same time.

    Args:
        model: as in ``model=``.
        gpus: at least one.
        settings: further ``key=value`` settings that name the model or the budget, such as ``budget=24GiB``.
        float32_streaming: whether to trace full fine-tuning with streamed float32 weights, on GPUs without bfloat16
            where these do not fit; else such GPUs are said not to do it.
        kept: traces made before, as for ``estimate_memory``.
        on_start: called before a method is traced, with what is being done.

    Returns:
        For each method, and in it for each GPU in their order, what it needs.

    Raises:
        RecipeError: if the settings are wrong.
        ModelError: if there is no such model.
    """
    own = (f"model={model}", *settings)
    config = load_recipe(None, own).model
    hf_config = load_model_config(config, architecture_only=True)
    limit = max_positions(hf_config)
    float32_bytes = 4 * model_on_meta(config, hf_config).num_parameters()
    results: list[MethodEstimate] = []
    for method in METHODS:
        by_gpu: dict[str, MethodEstimate] = {}
        for route in _routes(method):
            alike = [gpu for gpu in gpus if gpu.has_bfloat16 == route.has_bfloat16 and gpu.name not in by_gpu]
            if route.float32 == "resident":
                alike = [gpu for gpu in alike if gpu.memory_bytes > float32_bytes]
            if not alike:
                continue
            command = (route.settings[0], *own, *route.settings[1:])
            if route.float32 == "streamed" and not float32_streaming:
                refused = CannotRun(gpu=alike[0], problems=(NOT_STREAMED_IN_FLOAT32,))
                answers: list[MemoryEstimate | CannotRun] = [refused] * len(alike)
            else:
                on_start(f"{method.title} on GPUs {route}")
                command, answers = _answers(method, command, limit, alike, kept)
            for gpu, answer in zip(alike, answers, strict=True):
                result = _method_estimate(method, gpu, command, answer)
                if result.fits or route.float32 != "resident":
                    by_gpu[gpu.name] = result
        results += [by_gpu[gpu.name] for gpu in gpus]
    return results


@dataclass(frozen=True)
class _Route:
    """One trace of a method, for GPUs with or without bfloat16: a recipe and settings of it."""

    settings: tuple[str, ...]
    has_bfloat16: bool
    float32: Literal["", "resident", "streamed"] = ""

    def __str__(self) -> str:
        return f"{'with' if self.has_bfloat16 else 'without'} bfloat16"


def _routes(method: Method) -> Iterator[_Route]:
    """In the order in which they are tried."""
    recipe = f"recipe={method.recipe}"
    yield _Route((recipe,), has_bfloat16=True)
    if method.resident_without_bfloat16 is None:
        yield _Route((recipe, *method.without_bfloat16), has_bfloat16=False)
    else:
        yield _Route((f"recipe={method.resident_without_bfloat16}",), has_bfloat16=False, float32="resident")
        yield _Route((recipe, *method.without_bfloat16), has_bfloat16=False, float32="streamed")


NOT_STREAMED_IN_FLOAT32 = (
    "without bfloat16 it has to stream float32 weights, at a fraction of the speed. Name the GPU, such as --gpu t4, to "
    "see what that takes."
)


def _method_estimate(
    method: Method, gpu: Gpu, command: tuple[str, ...], answer: MemoryEstimate | CannotRun
) -> MethodEstimate:
    if isinstance(answer, CannotRun):
        return MethodEstimate(method=method, gpu=gpu, command=command, problems=answer.problems)
    return MethodEstimate(method=method, gpu=gpu, command=command, estimate=answer)


def _answers(
    method: Method, command: tuple[str, ...], limit: int | None, gpus: Sequence[Gpu], kept: KeptTraces | None
) -> tuple[tuple[str, ...], list[MemoryEstimate | CannotRun]]:
    """The command, with rows that the model takes, and what it needs on GPUs that share a trace."""
    try:
        recipe = _recipe(command)
        length = recipe.data.max_length
        if limit is not None and length is not None and limit < length:
            command = (*command, f"data.max_length={limit}")
        traced = (*command, *_NO_HELD_OUT_DATA, *(_ONE_MICRO_BATCH if method.is_traced_in_pieces else ()))
        return command, estimate_on_gpus(_recipe(traced), gpus, kind=lambda gpu: gpu.has_bfloat16, kept=kept)
    except UserError as error:  # such as a model that a technique does not know; the other methods may do
        return command, [CannotRun(gpu=gpu, problems=error.problems) for gpu in gpus]


def _recipe(command: Sequence[str]) -> Recipe:
    name, *settings = command
    return load_recipe(name.removeprefix("recipe="), settings)

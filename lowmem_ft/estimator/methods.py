"""A model alone: what it needs to be fine-tuned in full, with LoRA and with QLoRA, by the recipes that come with us."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowmem_ft.catalog.gpu import Gpu
from lowmem_ft.errors import UserError
from lowmem_ft.estimator.estimate import CannotRun, estimate_on_gpus
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
        is_traced_in_pieces: whether further micro-batches add nothing to its peak, so that one is traced.
    """

    name: str
    title: str
    recipe: str
    without_bfloat16: tuple[str, ...]
    is_traced_in_pieces: bool = False


_FLOAT16 = ("model.dtype=float16", "training.mixed_precision=fp16")

METHODS = (
    Method(
        name="full",
        title="full",
        recipe="8b-8gb",  # the lowest rung of the ladder
        without_bfloat16=("model.dtype=float32", "optimizer.master=fp32", "training.mixed_precision=no"),
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
    on_start: Callable[[str], None] = lambda doing: None,
) -> list[MethodEstimate]:
    """What a model needs on each GPU by each method: one optimizer step of rows of up to 2048 tokens.

    GPUs with bfloat16 share one trace of a method, and so do those without, each with its own workspaces. Their
    attention kernels differ: they were seen to take the same memory, and within 1 % the same time.

    Args:
        model: as in ``model=``.
        gpus: at least one.
        settings: further ``key=value`` settings that name the model or the budget, such as ``budget=24GiB``.
        float32_streaming: whether to trace full fine-tuning without bfloat16, which takes float32 weights; else GPUs
            that would need it are said not to do it.
        on_start: called before a method is traced, with what is being done.

    Returns:
        For each method, and in it for each GPU in their order, what it needs.

    Raises:
        RecipeError: if the settings are wrong.
        ModelError: if there is no such model.
    """
    own = (f"model={model}", *settings)
    limit = max_positions(load_model_config(load_recipe(None, own).model, architecture_only=True))
    results: list[MethodEstimate] = []
    for method in METHODS:
        by_gpu: dict[str, MethodEstimate] = {}
        for has_bfloat16 in (True, False):
            alike = [gpu for gpu in gpus if gpu.has_bfloat16 == has_bfloat16]
            if not alike:
                continue
            command = (f"recipe={method.recipe}", *own, *(() if has_bfloat16 else method.without_bfloat16))
            if method.name == "full" and not has_bfloat16 and not float32_streaming:
                answers: list[MemoryEstimate | CannotRun] = [
                    CannotRun(gpu=gpu, problems=(NOT_STREAMED_IN_FLOAT32,)) for gpu in alike
                ]
            else:
                on_start(f"{model}: {method.title} on GPUs {'with' if has_bfloat16 else 'without'} bfloat16")
                command, answers = _answers(method, command, limit, alike)
            for gpu, answer in zip(alike, answers, strict=True):
                by_gpu[gpu.name] = _method_estimate(method, gpu, command, answer)
        results += [by_gpu[gpu.name] for gpu in gpus]
    return results


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
    method: Method, command: tuple[str, ...], limit: int | None, gpus: Sequence[Gpu]
) -> tuple[tuple[str, ...], list[MemoryEstimate | CannotRun]]:
    """The command, with rows that the model takes, and what it needs on GPUs that share a trace."""
    try:
        recipe = _recipe(command)
        length = recipe.data.max_length
        if limit is not None and length is not None and limit < length:
            command = (*command, f"data.max_length={limit}")
        traced = (*command, *_NO_HELD_OUT_DATA, *(_ONE_MICRO_BATCH if method.is_traced_in_pieces else ()))
        return command, estimate_on_gpus(_recipe(traced), gpus, kind=lambda gpu: gpu.has_bfloat16)
    except UserError as error:  # such as a model that a technique does not know; the other methods may do
        return command, [CannotRun(gpu=gpu, problems=error.problems) for gpu in gpus]


def _recipe(command: Sequence[str]) -> Recipe:
    name, *settings = command
    return load_recipe(name.removeprefix("recipe="), settings)

"""The methods to fine-tune a model given only its name and a few settings, as shipped recipes do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.recipe.gpu_count import dealt_rows
from lowmem_ft.recipe.loading import load_recipe
from lowmem_ft.recipe.reading.keys import SHORT_FORMS
from lowmem_ft.recipe.space.search_space import ROWS
from lowmem_ft.recipe.tree import Recipe


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to fine-tune any model.

    Args:
        name: ``full``, ``lora`` or ``qlora``.
        title: the name for people.
        rungs: shipped recipes for it, the fastest first. Each takes less of a GPU than the one before.
        roomy: settings of the first of them with which the rows of a micro-batch and the layers that keep their
            activations are chosen for each GPU.
        rows: the rows to choose from, the fewest first.
        kept: the quarters of the layers to choose from, the most first.
        leaner: settings with which the first of the rungs takes less, and computes the same more slowly: it fills the
            GPU that it names, and other GPUs are smaller and other models larger. Empty: ``roomy`` reaches as far.
        leaner_rows: rows of a micro-batch to choose from with them, the fewest first.
        without_bfloat16: settings for the last of them on a GPU that does not compute with bfloat16.
        resident_without_bfloat16: a shipped recipe that such a GPU tries first: with float32 weights on the GPU it is
            much faster than with streamed ones, and a small model fits.
    """

    name: str
    title: str
    rungs: tuple[str, ...]
    roomy: tuple[str, ...] = ()
    rows: tuple[int, ...] = (1, 2, 4, 8)
    kept: tuple[int, ...] = (4, 3, 2, 1, 0)
    leaner: tuple[str, ...] = ()
    leaner_rows: tuple[int, ...] = ()
    without_bfloat16: tuple[str, ...]
    resident_without_bfloat16: str | None = None


FUSED_KERNELS = {"model.kernels": "liger"}
"""The same mathematics by fewer kernels: faster and in less memory, where the package is installed and knows the model.

Its kernels round fewer times. A run without the package is refused, so that none takes more memory than estimated.
"""

_FLOAT16 = ("model.dtype=float16", "training.mixed_precision=fp16")
FULL = Method(
    name="full",
    title="full",
    rungs=("8b-bf16", "8b-24gb", "8b-16gb", "8b-8gb"),
    roomy=("optimizer.in_backward=false",),
    rows=(2, 4),  # with one row, recomputing the layers of 16 at once is as fast, and takes less
    kept=(4,),
    leaner=("accumulation.order=vertical",),
    leaner_rows=(1, 2, 4, 8),
    without_bfloat16=("model.dtype=float32", "optimizer.master=fp32", "training.mixed_precision=no"),
    resident_without_bfloat16="1b-fp16-t4",
)
LORA = Method(
    name="lora",
    title="LoRA",
    rungs=("7b-lora",),
    without_bfloat16=_FLOAT16,
)
QLORA = Method(
    name="qlora",
    title="QLoRA",
    rungs=("7b-qlora",),
    without_bfloat16=_FLOAT16,
)
METHODS = (FULL, LORA, QLORA)


_WHICH_AND_WHERE = (
    "model.name_or_path",
    "model.revision",
    "model.gguf_file",
    "model.trust_remote_code",
    "budget.device",
    "budget.host",
    "budget.enforce",
    "budget.retry",
    "distributed.strategy",
    "distributed.num_processes",
    "distributed.num_machines",
)


def model_settings_only(settings: Sequence[str]) -> list[str]:
    """Return the settings that name the model and the machines, frozen: none of the user's about how it is trained."""
    named = [f"{key}={value}" for key, value in values_by_key(settings).items() if key in _WHICH_AND_WHERE]
    return [*named, "adapter.name=lora"]  # which any base can be trained with, a packed one too


def methods_with(settings: Sequence[str]) -> tuple[Method, ...]:
    """Return the methods that settings leave open: ``adapter.name=lora`` is LoRA, ``model.quantization=nf4`` is QLoRA.

    Args:
        settings: ``key=value`` as typed.
    """
    values = values_by_key(settings)
    adapter, quantization = values.get("adapter.name"), values.get("model.quantization")
    if adapter == "none":
        return (FULL,)
    if quantization not in (None, "none"):
        return (QLORA,)
    if adapter is not None:
        return (LORA,)
    if any(key.startswith("adapter.") for key in values):
        return (LORA,) if quantization == "none" else (LORA, QLORA)
    return (FULL, LORA) if quantization == "none" else METHODS


def check_methods(
    settings: Sequence[str], check: Callable[[Recipe], None], *, has_bfloat16: bool = True
) -> None:
    """Report what is wrong with settings for every method that they leave open, before torch is imported.

    Args:
        settings: the settings as typed, including the model.
        check: refuses what a method would train.
        has_bfloat16: whether the device computes with it.

    Raises:
        UserError: if no method works with them; lists all problems.
    """
    problems: dict[str, None] = {}
    for method in methods_with(settings):
        of_device = () if has_bfloat16 else method.without_bfloat16
        of_method: dict[str, None] = {}
        for rung in reversed(method.rungs):
            try:
                check(recipe_of((f"recipe={rung}", *settings, *unless_typed(of_device, settings))))
                return
            except UserError as error:
                of_method = of_method or dict.fromkeys(error.problems)
        problems |= of_method
    raise UserError(*problems)


def unless_typed(further: Sequence[str], settings: Sequence[str]) -> list[str]:
    """Return those of further settings whose keys the user has not typed."""
    typed = values_by_key(settings)
    return [setting for setting in further if setting.partition("=")[0] not in typed]


def for_as_many_rows(shipped: Recipe, settings: Sequence[str], count: int = 1) -> dict[str, int]:
    """Derive what the user left open of micro-batch and accumulation: the rows of a step stay the same.

    Methods split the rows of a step differently. With one half typed and each method's own other half, or with as many
    rows on each of several GPUs, steps would have different numbers of rows, and their seconds could not be compared.

    Args:
        shipped: a method's recipe, without what the user typed.
        settings: ``key=value`` as typed; both halves typed are those of each GPU.
        count: number of GPUs.
    """
    typed = values_by_key(settings)
    given = [typed[key] for key in ROWS if key in typed]
    rows, micro_batches = (
        shipped.training.per_device_train_batch_size,
        shipped.training.gradient_accumulation_steps,
    )
    if not given:
        return {} if count == 1 else dict(zip(ROWS, dealt_rows(rows, micro_batches, count), strict=True))
    if (
        len(given) > 1 or not given[0].isdecimal() or int(given[0]) == 0
    ):  # the recipe's rules report what is wrong
        return {}
    return {
        key: max(1, round(rows * micro_batches / count / int(given[0]))) for key in ROWS if key not in typed
    }


def recipe_of(command: Sequence[str]) -> Recipe:
    """Return the recipe of a command: ``recipe=NAME`` and settings."""
    name, *settings = command
    return load_recipe(name.removeprefix("recipe="), settings)


def values_by_key(settings: Sequence[str]) -> dict[str, str]:
    """Return settings by their keys' full names."""
    pairs = (setting.partition("=") for setting in settings)
    return {SHORT_FORMS.get(key, key): value for key, _, value in pairs}

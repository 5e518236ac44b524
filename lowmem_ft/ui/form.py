"""Fields of the page: their limits, their text in an address, and the settings that they mean."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin
from urllib.parse import parse_qsl, urlencode

from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.catalog.model_architectures import load_architectures
from lowmem_ft.foundation.errors import did_you_mean, raise_problems
from lowmem_ft.recipe.reading.keys import SHORT_FORMS, recipe_keys, without_none
from lowmem_ft.recipe.reading.recipe_files import shipped_recipes
from lowmem_ft.ui.kept_files import KeptFiles, is_kept_name

METHOD_SETTINGS = {
    "full": ("adapter.name=none",),
    "lora": ("adapter.name=lora",),
    "qlora": ("model.quantization=nf4",),
}
"""For each method, the settings that leave it alone open, see ``recipe/shipped/fine_tuning_methods.py``."""

RECIPE = "recipe"
METHODS = (*METHOD_SETTINGS, RECIPE)
GPU_COUNTS = (1, 2, 4, 8)

FROM_RECIPE = "as in the recipe"
"""The choice of model that leaves a recipe its own."""

MOST_TOKENS, MOST_ROWS, MOST_GIB = 1 << 20, 1024, 65_536
MOST_MORE_CHARACTERS = 2000
MOST_QUERY_CHARACTERS, MOST_FIELDS = 8000, 64

_OWN_FIELDS = {
    "model.name_or_path": "model",
    "data.max_length": "tokens of a row",
    "training.per_device_train_batch_size": "rows at once",
    "budget.device": "budget",
    "budget.host": "host RAM",
    "distributed.num_processes": "GPUs",
}
_NOT_HERE = ("model.trust_remote_code", "checkpointing.mode=auto", "plan.mode")


@dataclass(frozen=True, kw_only=True)
class Form:
    """The fields of the page as text, empty where nothing is set. All limits are in :meth:`check`.

    Args:
        model: a name of the catalogue, the name of a kept ``config.json``, or, for a recipe, ``FROM_RECIPE``.
        method: one of ``METHODS``.
        recipe: the shipped recipe of the method ``recipe``.
        length: tokens of a row.
        rows: rows of a micro-batch.
        gpu: a GPU of the catalogue; empty: one of the size of the budget.
        gpus: number of GPUs that share the model.
        budget: GiB of device memory.
        host: GiB of host memory.
        more: further settings, ``key=value``, separated by blanks or lines; a key of text is refused.
    """

    model: str = "llama-3.1-8b"
    method: str = "lora"
    recipe: str = "7b-lora"
    length: str = ""
    rows: str = ""
    gpu: str = "rtx-4090"
    gpus: str = "1"
    budget: str = ""
    host: str = ""
    more: str = ""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Form:
        """Return the form of fields by name, as text; missing ones keep their default, unknown ones are ignored."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: _text(value) for name, value in values.items() if name in names})

    @classmethod
    def of_query(cls, query: str) -> Form:
        """Return the form of an address's query; if the query is too long, the defaults."""
        return cls.of(values_of(query))

    @property
    def query(self) -> str:
        """The fields that differ from their defaults, as the query of an address."""
        pairs = dataclasses.asdict(self).items()
        return urlencode([(name, value) for name, value in pairs if value != getattr(Form, name)])

    def check(self, files: KeptFiles) -> None:
        """Refuse what is beyond the limits of the page.

        Args:
            files: the files that were dropped on it.

        Raises:
            UserError: lists all problems.
        """
        raise_problems(self._problems(files))

    def settings(self, files: KeptFiles) -> tuple[str, ...]:
        """Return the settings of model, rows and budgets as they are typed; those of the method are not among them.

        Args:
            files: the files that were dropped on the page.
        """
        named = [] if self.model == FROM_RECIPE else [f"model={files.model(self.model) or self.model}"]
        values = {
            "data.max_length": self.length,
            "training.per_device_train_batch_size": self.rows,
            "budget.device": self.budget and f"{self.budget}GiB",
            "budget.host": self.host and f"{self.host}GiB",
        }
        return (*named, *(f"{key}={value}" for key, value in values.items() if value), *self.more.split())

    @property
    def devices(self) -> str | None:
        """The GPUs as ``--gpu`` takes them; None for a budget alone."""
        return (self.gpu if self.gpus == "1" else f"{self.gpus}x{self.gpu}") if self.gpu else None

    def _problems(self, files: KeptFiles) -> Iterator[str]:
        if self.method not in METHODS:
            yield f"The method must be one of {', '.join(METHODS)}, got {self.method!r}. Choose one."
        yield from self._problems_with_model(files)
        if self.method == RECIPE and self.recipe not in shipped_recipes():
            yield _not_listed("recipe", self.recipe, shipped_recipes())
        if self.gpu and self.gpu not in load_gpus():
            yield _not_listed("GPU", self.gpu, load_gpus())
        if self.gpus not in map(str, GPU_COUNTS):
            yield f"The number of GPUs must be one of {', '.join(map(str, GPU_COUNTS))}, got {self.gpus!r}. Choose one."
        if not self.gpu and not self.budget:
            yield "An estimate is for a GPU or for a budget, got neither. Choose a GPU, or set a budget in GiB."
        if not self.gpu and self.gpus != "1":
            yield f"Several GPUs need a type, got {self.gpus} without one. Choose a GPU."
        yield from _problem_of_number("tokens of a row", self.length, 2, MOST_TOKENS, is_whole=True)
        yield from _problem_of_number("rows at once", self.rows, 1, MOST_ROWS, is_whole=True)
        yield from _problem_of_number("budget", self.budget, 1, MOST_GIB)
        yield from _problem_of_number("host RAM", self.host, 1, MOST_GIB)
        yield from self._problems_with_more()

    def _problems_with_model(self, files: KeptFiles) -> Iterator[str]:
        if self.model == FROM_RECIPE:
            if self.method != RECIPE:
                yield f"The method {self.method} needs a model, got {FROM_RECIPE!r}. Choose a model of the list."
        elif is_kept_name(self.model):
            if files.model(self.model) is None:
                yield f"The file {self.model} is not on this machine any more. Drop the config.json again."
        elif self.model not in load_architectures():
            yield (
                f"{_not_listed('model', self.model, load_architectures())} The page looks nothing up: for another "
                "model, drop its config.json."
            )

    def _problems_with_more(self) -> Iterator[str]:
        if len(self.more) > MOST_MORE_CHARACTERS:
            yield (
                f"Further settings may have at most {MOST_MORE_CHARACTERS} characters, got {len(self.more)}. Write a "
                "recipe file, and use the command."
            )
            return
        for setting in self.more.split():
            name, equals, value = setting.partition("=")
            path = SHORT_FORMS.get(name, name)
            key = recipe_keys().get(path)
            if not equals or key is None:
                yield (
                    f"A further setting must be key=value with a recipe key, got {setting!r}. See `lowmem-ft recipes "
                    "NAME`."
                )
            elif path in _OWN_FIELDS:
                yield f"{path} has its own field on the page, got {setting!r}. Use the field {_OWN_FIELDS[path]!r}."
            elif path in _NOT_HERE or setting in _NOT_HERE:
                yield f"The page does not take {setting}. Use the command `lowmem-ft estimate` or `plan`."
            elif not (key.choices or _is_bounded(without_none(key.type_hint))) or not _PLAIN.fullmatch(value):
                yield (
                    f"Further settings on the page must be numbers, switches or names of a fixed list, got "
                    f"{setting!r}. Use the command for text, paths and lists."
                )


def values_of(query: str) -> dict[str, str]:
    """Return the fields of a query by name, empty ones too; none of a query longer than the page writes."""
    if len(query) > MOST_QUERY_CHARACTERS:
        return {}
    try:
        return dict(parse_qsl(query, keep_blank_values=True, max_num_fields=MOST_FIELDS))
    except ValueError:
        return {}


_PLAIN = re.compile(r"[\w.+-]{1,64}")


def _is_bounded(hint: Any) -> bool:
    """Return whether a type has no text among its values: text could name a file or a program."""
    members = get_args(hint) if get_origin(hint) is not None else (hint,)
    return all(member in (int, float, bool, type(None)) for member in members)


def _problem_of_number(
    what: str, text: str, least: int, most: int, *, is_whole: bool = False
) -> Iterator[str]:
    if not text:
        return
    pattern = r"\d{1,9}" if is_whole else r"\d{1,9}(\.\d{1,3})?"
    if re.fullmatch(pattern, text) is None or not least <= float(text) <= most:
        kind = "a whole number" if is_whole else "a number of GiB"
        yield (
            f"The field {what!r} must be {kind} from {least:,} to {most:,}, got {text!r}. Correct it, or empty the "
            "field."
        )


def _not_listed(what: str, name: str, names: Mapping[str, Any]) -> str:
    return f"The {what} must be one of the page's list, got {name!r}.{did_you_mean(name, names)}"


def _text(value: Any) -> str:
    """Return the text of a field: whole numbers without a decimal point, as browsers send ``2048.0``."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()

"""The page's parts and what happens when one of them changes; ``ui/answering.py`` answers, ``ui/views.py`` shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import gradio as gr  # pyright: ignore[reportMissingImports]

from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.catalog.model_architectures import load_architectures
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.recipe.reading.recipe_files import shipped_recipes
from lowmem_ft.ui import answering, views
from lowmem_ft.ui.desk import Answer, Desk, Progress, SupersededError
from lowmem_ft.ui.form import FROM_RECIPE, GPU_COUNTS, METHOD_SETTINGS, METHODS, RECIPE, Form, values_of
from lowmem_ft.ui.kept_files import (
    DATA_SUFFIXES,
    MOST_CONFIG_BYTES,
    MOST_DATA_BYTES,
    MOST_TOKENIZER_BYTES,
    KeptFiles,
    is_kept_name,
)

KEPT = "kept"
"""The name, in an address, of the settings that were kept for comparison."""

_TITLES = {"full": "full", "lora": "LoRA", "qlora": "QLoRA", RECIPE: "a shipped recipe"}
_FIELDS = tuple(field.name for field in dataclasses.fields(Form))

Shown = dict[Any, Any]
"""New values of components."""


def make_page(desk: Desk, files: KeptFiles) -> gr.Blocks:
    """Return the page.

    Args:
        desk: answers its questions.
        files: keeps what is dropped on it.
    """
    with gr.Blocks(title="lowmem-ft", analytics_enabled=False, fill_width=True) as page:
        _Page(desk, files).build(page)
    page.queue(max_size=32, default_concurrency_limit=8, api_open=False)
    return page


class _Page:
    """The components, and the functions that their events call."""

    def __init__(self, desk: Desk, files: KeptFiles) -> None:
        self._desk = desk
        self._files = files

    def build(self, page: gr.Blocks) -> None:
        """Lay out the components and connect their events."""
        gr.HTML("<h1>lowmem-ft</h1><p>What fine-tuning a model needs, before you rent a GPU.</p>")
        with gr.Row():
            with gr.Column(scale=1, min_width=300):
                self._lay_out_form()
            with gr.Column(scale=3, min_width=340):
                self._lay_out_answers()
        self.address = gr.Textbox(visible="hidden", elem_id="address")
        self._connect(page)

    def _lay_out_form(self) -> None:
        default = Form()
        self.fields: dict[str, Any] = {
            "model": gr.Dropdown(
                _models(),
                value=default.model,
                label="Model",
                elem_id="model",
                info="of the catalogue, or a dropped file",
            ),
            "method": gr.Radio(
                [(_TITLES[name], name) for name in METHODS],
                value=default.method,
                label="Method",
                elem_id="method",
            ),
            "recipe": gr.Dropdown(
                list(shipped_recipes()), value=default.recipe, label="Recipe", elem_id="recipe", visible=False
            ),
        }
        with gr.Row():
            self.fields["rows"] = _number("Rows at once", "rows")
            self.fields["length"] = _number("Tokens of a row", "length")
        gpus = [(f"{gpu.full_name}", name) for name, gpu in load_gpus().items()]
        self.fields["gpu"] = gr.Dropdown(
            [("the cheapest with the budget", ""), *gpus], value=default.gpu, label="GPU", elem_id="gpu"
        )
        self.fields["gpus"] = gr.Radio(
            [str(count) for count in GPU_COUNTS], value=default.gpus, label="Number of GPUs", elem_id="gpus"
        )
        with gr.Row():
            self.fields["budget"] = _number("Budget, GiB", "budget")
            self.fields["host"] = _number("Host RAM, GiB", "host")
        with gr.Accordion("Further settings and files", open=False, elem_id="further"):
            self.fields["more"] = gr.Textbox(
                label="Further settings",
                elem_id="more",
                lines=2,
                placeholder="checkpointing.mode=full adapter.r=32",
            )
            self.config_file = gr.File(
                label="config.json of another model", file_types=[".json"], elem_id="config-file", height=110
            )
            self.data_file = gr.File(
                label="Data: its longest row sets the tokens of a row",
                file_types=list(DATA_SUFFIXES),
                elem_id="data-file",
                height=110,
            )
            self.tokenizer_file = gr.File(
                label="tokenizer.json, which counts the tokens of data",
                file_types=[".json"],
                elem_id="tokenizer-file",
                height=110,
            )
            self.dropped = gr.HTML(elem_id="dropped")
        with gr.Row():
            self.keep = gr.Button("Keep to compare", size="sm", elem_id="keep")
            self.cancel = gr.Button("Cancel", size="sm", elem_id="cancel")

    def _lay_out_answers(self) -> None:
        self.progress = gr.HTML(elem_id="progress")
        self.estimate = gr.HTML(elem_id="estimate")
        self.answer, self.kept = gr.State(None), gr.State(None)
        self.compared = gr.HTML(elem_id="compared")
        with gr.Tabs():
            with gr.Tab("Command"):
                self.command = gr.HTML(elem_id="command")
            with gr.Tab("Training"):
                self.train = gr.HTML(elem_id="train")
            with gr.Tab("Recipe"):
                self.recipe_text = gr.HTML(elem_id="recipe-text")
            with gr.Tab("TRL"):
                self.script = gr.HTML(elem_id="script")
        self.asks = {
            "methods": gr.Button("GPUs and methods: tokens/s and dollars", elem_id="ask-methods"),
            "lengths": gr.Button("Where memory ends, and what one GiB more buys", elem_id="ask-lengths"),
            "plan": gr.Button("The fastest settings that fit, with reasons", elem_id="ask-plan"),
        }
        self.parts = {name: gr.HTML(elem_id=name) for name in self.asks}

    def _connect(self, page: gr.Blocks) -> None:
        inputs = [*self.fields.values(), self.kept]
        shown = [self.progress, self.estimate, self.answer, self.compared, self.command, self.recipe_text]
        shown += [self.train, self.script, self.address, *self.parts.values()]
        fields = list(self.fields.values())
        quiet: dict[str, Any] = {
            "show_progress": "hidden",
            "api_visibility": "private",
            "concurrency_limit": 8,
        }
        loaded = page.load(self._load, None, [*fields, self.kept, self.progress], **quiet)
        loaded.then(self._estimate, inputs, shown, **quiet)
        gr.on(
            [event for field in fields for event in _changes(field)],
            self._estimate,
            inputs,
            shown,
            trigger_mode="multiple",
            **quiet,
        )
        self.fields["method"].change(
            lambda method: gr.update(visible=method == RECIPE),
            self.fields["method"],
            self.fields["recipe"],
            **quiet,
        )
        self.keep.click(self._keep, [*fields, self.answer], [self.kept, self.compared, self.address], **quiet)
        self.cancel.click(self._cancel, None, self.progress, **quiet)
        for name, function, show in (
            ("methods", answering.compare_methods, lambda answer, form: views.table_html(answer)),
            ("lengths", answering.find_longest_rows, lambda answer, form: views.lengths_html(answer)),
            ("plan", answering.make_plan, lambda answer, form: views.plan_html(answer)),
        ):
            asked = self._asks(name, function, show)
            self.asks[name].click(asked, fields, self.parts[name], trigger_mode="multiple", **quiet)
        model, length = self.fields["model"], self.fields["length"]
        taken = self.config_file.upload(
            self._take_config, [self.config_file], [model, self.config_file, self.dropped], **quiet
        )
        taken.then(self._estimate, inputs, shown, **quiet)
        for file in (self.data_file, self.tokenizer_file):
            measured = file.upload(
                self._take_data,
                [self.data_file, self.tokenizer_file, *fields],
                [length, self.dropped],
                **quiet,
            )
            measured.then(self._estimate, inputs, shown, **quiet)
        self.address.change(None, self.address, None, js=_SHOW_ADDRESS, show_progress="hidden")

    def _load(self, request: gr.Request) -> Iterator[Sequence[Any]]:
        """Fill the fields from the address, and answer what was kept there for comparison."""
        values = values_of(str(request.query_params))
        form = Form.of(values)
        fields = [self._field(name, getattr(form, name)) for name in _FIELDS]
        order = list(self.fields)
        fields = [fields[_FIELDS.index(name)] for name in order]
        kept = Form.of_query(values[KEPT]) if KEPT in values else None
        yield [*fields, None, ""]
        if kept is None:
            return
        try:
            for event in self._ask(_tab(request), "kept", answering.estimate, kept):
                if isinstance(event, Answer):
                    yield [*(gr.skip() for _ in order), (kept.query, event.value), ""]
                else:
                    yield [*(gr.skip() for _ in order), gr.skip(), views.progress_html(event)]
        except SupersededError:
            return
        except UserError as error:
            yield [*(gr.skip() for _ in order), None, views.problems_html(error.problems)]

    def _field(self, name: str, value: str) -> Any:
        if name == "model":
            known = [*(choice for _, choice in _models()), *([value] if is_kept_name(value) else [])]
            return gr.update(choices=known, value=value if value in known else None)
        if name == "recipe":
            return gr.update(value=value if value in shipped_recipes() else None)
        if name == "gpu":
            return gr.update(value=value if value in ("", *load_gpus()) else None)
        return gr.update(value=value)

    def _estimate(self, request: gr.Request, *values: Any) -> Iterator[Shown]:
        """Answer the form as it is, with progress; the parts below it are emptied, as they are of another form."""
        form, kept = self._form(values[:-1]), values[-1]
        address = _address(form, kept)
        try:
            for event in self._ask(_tab(request), "estimate", answering.estimate, form):
                if isinstance(event, Progress):
                    yield {self.progress: views.progress_html(event)}
                    continue
                found = event.value
                yield {
                    self.progress: "",
                    self.estimate: views.estimate_html(found),
                    self.answer: found,
                    self.compared: views.compared_html(kept[1], found) if kept else "",
                    self.command: views.copied_html(found["command"]),
                    self.train: views.copied_html(found["train"]),
                    self.recipe_text: views.copied_html(found["recipe"]),
                    self.script: views.copied_html(found["script"]),
                    self.address: address,
                    **dict.fromkeys(self.parts.values(), ""),
                }
        except SupersededError:
            return
        except UserError as error:
            empty = dict.fromkeys(
                [
                    self.estimate,
                    self.compared,
                    self.command,
                    self.train,
                    self.recipe_text,
                    self.script,
                    *self.parts.values(),
                ],
                "",
            )
            problems = views.problems_html(error.problems)
            yield {**empty, self.progress: problems, self.answer: None, self.address: address}

    def _asks(
        self,
        kind: str,
        function: Callable[..., Any],
        show: Callable[[Mapping[str, Any], Form], str],
    ) -> Callable[..., Iterator[str]]:
        """Return the function of a button that answers with one part of the page."""

        def answer(request: gr.Request, *values: Any) -> Iterator[str]:
            form = self._form(values)
            try:
                for event in self._ask(_tab(request), kind, function, form):
                    yield (
                        views.progress_html(event) if isinstance(event, Progress) else show(event.value, form)
                    )
            except SupersededError:
                yield ""
            except UserError as error:
                yield views.problems_html(error.problems)

        return answer

    def _ask(
        self, tab: str, kind: str, function: Callable[..., Any], form: Form, *arguments: Any
    ) -> Iterator[Progress | Answer]:
        form.check(self._files)
        asked = answering.Asked(
            method=form.method,
            recipe=form.recipe,
            settings=form.settings(self._files),
            of_method=METHOD_SETTINGS.get(form.method, ()),
            devices=form.devices,
        )
        return self._desk.ask(tab, kind, function, asked, *arguments)

    def _form(self, values: Sequence[Any]) -> Form:
        return Form.of(dict(zip(self.fields, values, strict=True)))

    def _keep(self, *values: Any) -> Sequence[Any]:
        """Keep the settings and their estimate, or forget those that were kept where there is no estimate."""
        form, found = self._form(values[:-1]), values[-1]
        if found is None:
            return None, "", _address(form, None)
        return (form.query, found), views.compared_html(found, found), _address(form, (form.query, found))

    def _cancel(self, request: gr.Request) -> str:
        self._desk.cancel(_tab(request))
        return views.problems_html(["Cancelled. Change a setting to ask again."])

    def _take_config(self, path: str | None) -> Sequence[Any]:
        try:
            name = self._files.keep_config(_content(path, MOST_CONFIG_BYTES))
        except UserError as error:
            return gr.skip(), None, views.problems_html(error.problems)
        choices = [*_models(), (f"dropped {name}", name)]
        return gr.update(choices=choices, value=name), None, f"<p>The model is the dropped file, {name}.</p>"

    def _take_data(
        self, request: gr.Request, data: str | None, tokenizer: str | None, *values: Any
    ) -> Iterator[Sequence[Any]]:
        """Count the tokens of dropped data, once there is a tokenizer too, and set the length to the longest row."""
        try:
            if data is None or tokenizer is None:
                missing = (
                    "data file" if data is None else "tokenizer.json of the model, which counts its tokens"
                )
                yield gr.skip(), f"<p>Drop the {missing} too.</p>"
                return
            form = dataclasses.replace(self._form(values), length="")
            kept_data = self._files.keep_data(_content(data, MOST_DATA_BYTES), Path(data).suffix.lower())
            kept_tokenizer = self._files.keep_tokenizer(_content(tokenizer, MOST_TOKENIZER_BYTES))
            places = self._files.data(kept_data), self._files.tokenizer(kept_tokenizer)
            for event in self._ask(_tab(request), "data", answering.measure_rows, form, *places):
                if isinstance(event, Progress):
                    yield gr.skip(), views.progress_html(event)
                else:
                    yield str(max(2, event.value["longest"])), views.rows_html(event.value)
        except SupersededError:
            return
        except UserError as error:
            yield gr.skip(), views.problems_html(error.problems)


_SHOW_ADDRESS = """(query) => {
    const theme = new URLSearchParams(window.location.search).get("__theme");
    const whole = [query, theme ? "__theme=" + theme : ""].filter(Boolean).join("&");
    history.replaceState(null, "", whole ? "?" + whole : window.location.pathname);
}"""


def _models() -> list[tuple[str, str]]:
    found = [(f"{name} ({model.hub_id})", name) for name, model in load_architectures().items()]
    return [(FROM_RECIPE, FROM_RECIPE), *found]


def _number(label: str, name: str) -> gr.Textbox:
    return gr.Textbox(
        label=label,
        elem_id=name,
        placeholder="as in the recipe" if name in ("rows", "length") else "all there is",
        max_lines=1,
        min_width=120,
    )


def _changes(field: Any) -> list[Any]:
    """Return the events of a user's change to a field; a text field waits until the edit is complete."""
    return [field.submit, field.blur] if isinstance(field, gr.Textbox) else [field.input]


def _address(form: Form, kept: tuple[str, Any] | None) -> str:
    parts = [form.query, *([urlencode({KEPT: kept[0]})] if kept else [])]
    return "&".join(part for part in parts if part)


def _tab(request: gr.Request) -> str:
    return str(request.session_hash)


def _content(path: str | None, most_bytes: int) -> bytes:
    """Return the content of an uploaded file, truncated to one byte more than the limit."""
    assert path is not None, "an upload has a file"
    with open(path, "rb") as file:
        return file.read(most_bytes + 1)

"""Tables and words at any width: rows of the whole catalogue, and settings as long as they get."""

from __future__ import annotations

import dataclasses
import shlex

import pytest
from rich.console import Console
from rich.text import Text

from lowmem_ft.cli.console.output import Output
from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.memory.memory_estimate import BudgetVerdict, DeviceLimit, StepTime
from lowmem_ft.foundation.units import GIB
from lowmem_ft.planning.estimator.method_estimates import MethodEstimate
from lowmem_ft.recipe.shipped.fine_tuning_methods import METHODS
from lowmem_ft.reports.gpu_table import gpu_table
from lowmem_ft.reports.method_table import methods_on_gpu, methods_on_gpus
from lowmem_ft.reports.text.document import Command, Document, Pairs, Table
from lowmem_ft.reports.text.wrapping import filled, shell_lines

GPUS = load_gpus()
LONG = "training.per_device_train_batch_size=16"


@pytest.fixture
def everywhere(estimate):
    """An estimate on each GPU, of a model so small that its speed has many digits, on hosts of all sizes."""

    def one(number: int, name: str):
        memory = GPUS[name].memory_bytes
        return dataclasses.replace(
            estimate,
            gpu=DeviceLimit(name=name, memory_bytes=memory),
            budget=BudgetVerdict(device_bytes=memory, host_bytes=GIB),
            host_peak_bytes=int(1234.5 * GIB),
            step=StepTime(seconds=1.0, tokens=12_345_678, bound_by="compute"),
            fits=number % 3 > 0,
        )

    return [one(number, name) for number, name in enumerate(GPUS)]


@pytest.fixture
def tables(everywhere):
    results = [
        MethodEstimate(
            method=method, gpu=GPUS[of.gpu.name], command=("recipe=7b-lora", f"model={LONG}"), estimate=of
        )
        for method in METHODS
        for of in everywhere
    ]
    return [gpu_table(everywhere, GPUS, {}), methods_on_gpus(results, GPUS)]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_gpu_is_cut_and_no_line_is_too_long(tables, as_text, width):
    for table in tables:
        lines = as_text(table, width).splitlines()
        assert max(map(len, lines)) <= width
        assert {*GPUS} <= {line.split()[0] for line in lines if line.strip()}


def test_a_verdict_on_a_host_is_whole(everywhere, as_text):
    name = everywhere[0].gpu.name
    results = [
        MethodEstimate(method=METHODS[0], gpu=GPUS[name], command=("recipe=8b-8gb",), estimate=everywhere[0])
    ]
    assert "full  host 1.20 TiB over" in as_text(methods_on_gpu(results, GPUS[name]))


def test_columns_go_in_their_order_until_there_is_room(as_text):
    rows = [["a-name-of-22-columns-..", "12345", "12345"]]
    table = Table(("name", "first", "second"), rows, left=("name",), spare=("first", "second"))
    heads = {width: as_text(table, width).splitlines()[0].split() for width in (40, 35, 30, 24)}
    assert heads == {
        40: ["name", "first", "second"],
        35: ["name", "second"],
        30: ["name", "second"],
        24: ["name"],
    }
    assert "Not shown in 30 columns: first." in " ".join(as_text(table, 30).split())
    assert "Not shown" not in as_text(table, 40)


def test_where_nothing_may_go_all_but_the_names_is_folded(as_text):
    table = Table(("name", "number"), [["rtx-9090", "123456789"]], left=("name",))
    assert [line.split() for line in as_text(table, 14).splitlines()][-2:] == [
        ["rtx-9090", "12345"],
        ["6789"],
    ]


@pytest.mark.parametrize("width", [80, 60, 44])
def test_no_setting_is_broken_to_whichever_side(as_text, width):
    sentence = "the device lacks 3.00 MiB, as it does with everything else that was tried before this"
    for row in ((LONG, sentence), (sentence, f"{LONG}, checkpointing.mode=full"), (LONG, LONG)):
        lines = as_text(Pairs([row, ("short", "was 4")]), width).splitlines()
        assert max(map(len, lines)) <= width
        words = " ".join(lines).replace(",", "").split()
        assert words.count(LONG) == sum(LONG in side for side in row)


def test_words_to_the_left_make_room_for_a_setting_to_the_right(as_text):
    sentence = "the device lacks 3.00 MiB, as it does with everything else that was tried before this"
    assert LONG in as_text(Pairs([(sentence, f"{LONG}, checkpointing.mode=full")]), 80).splitlines()[0]


def test_a_command_in_backticks_stays_on_one_line_and_a_path_is_never_broken():
    path = "/somewhere/very-far-away/with-hyphens/and/more"
    lines = filled(f"Look at `lowmem-ft recipes NAME`, or read {path} as a whole.", 30)
    assert lines == ["Look at", "`lowmem-ft recipes NAME`, or", "read", path, "as a whole."]


def test_a_long_command_goes_on_as_a_shell_takes_it():
    lines = shell_lines(["lowmem-ft", "train", "recipe=tiny", "training.seed=3", "data.packing=true"], 44)
    assert lines == ["  lowmem-ft train recipe=tiny \\", "      training.seed=3 data.packing=true"]


def test_a_word_that_a_shell_would_take_apart_is_quoted_and_stays_on_one_line():
    command = ["train", "data=my own chats.jsonl", "plan.allow=[lora]"]
    lines = shell_lines(command, 24)
    assert lines[1:] == ["      'data=my own chats.jsonl' \\", "      'plan.allow=[lora]'"]
    assert shlex.split("".join(line.removesuffix("\\") for line in lines)) == command


def test_in_a_window_too_narrow_for_anything_words_stand_below_each_other(as_text):
    assert filled("train recipe=tiny", 0) == ["train", "recipe=tiny"]
    assert shell_lines(["train", "recipe=tiny"], 1) == ["  train \\", "      recipe=tiny"]
    words = (LONG, "the device lacks 3.00 MiB")
    assert "".join(as_text(Pairs([words]), 9).split()) == "".join(words).replace(" ", "")


def test_characters_of_two_columns_count_as_two(as_text):
    path, rest = "/模型/七十亿参数", ["as", "a", "whole", "model"]
    lines = filled(" ".join([path, *rest]), 20)
    assert lines == [f"{path} as", "a whole model"], "18 columns and 13"
    assert path in as_text(Pairs([("model", f"was {path}")]), 30)


def test_what_has_no_content_leaves_no_blank_line(as_text):
    section = Document(Pairs([]), title="Nothing")
    printed = as_text(Document("first", None, "", section, Document(), Table(("a",), [], left=()), "last"))
    assert printed == "first\n\nlast\n"


def test_a_paragraph_breaks_between_words_and_keeps_its_styles():
    console = Console(width=12, force_terminal=True, color_system="standard", no_color=False)
    with console.capture() as capture:
        console.print(Document(Text.assemble("see `a b c d`", (" and stop", "red"))))
    assert capture.get().splitlines() == ["see", "`a b c d`", "\x1b[31mand stop\x1b[0m"]


def test_a_word_longer_than_a_line_goes_beyond_the_edge_and_is_not_broken(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    address = "https://example.org/a/page/with/a/long/name"
    Output().add(f"See {address} for more.", Pairs([("source", f"at {address}")]), Command("train", address))
    lines = capsys.readouterr().out.splitlines()
    assert sum(address in line for line in lines) == 3
    assert max(len(line) for line in lines if address not in line) <= 20


def test_in_a_pipe_rows_and_commands_are_one_line_unless_its_width_is_given(monkeypatch, capsys):
    def printed() -> list[str]:
        table = Table(
            ("GPU", "verdict", "host"), [["l4", "one two " * 20, "1"]], left=("GPU",), wraps=("verdict", 8)
        )
        Output().add(table, Pairs([("label", "word " * 40)]), Command(*["--word"] * 40))
        return [line for line in capsys.readouterr().out.splitlines() if line.strip()]

    monkeypatch.delenv("COLUMNS", raising=False)
    assert [len(line.split()) for line in printed()] == [3, 42, 41, 40]
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, printed())) <= 60


def test_a_word_too_long_for_its_place_is_not_set_next_to_a_label_of_several_lines(as_text):
    label = f"{'a' * 30} {'b' * 30}"
    lines = as_text(Pairs([(label, f"at {LONG} or not")], indent=0), 60).splitlines()
    assert [line.split() for line in lines] == [["a" * 30, "at"], ["b" * 30], [LONG], ["or", "not"]]
    assert max(map(len, lines)) <= 60

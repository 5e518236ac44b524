"""``lowmem-ft data``: what a model reads, on a terminal, in a pipe and as JSON."""

import json
import shutil

import datasets
import pytest
from rich.console import Console
from tiny_models import TINY

from lowmem_ft.cli import main
from lowmem_ft.recipe import load_recipe
from lowmem_ft.reports.data_table import NOTHING_WRONG, data_table
from lowmem_ft.training.run.data_inspection import inspect_data_of

SYSTEM_LOST = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_EVAL = ("data.eval_size=null", "training.eval_steps=null")
HOSTILE = "\x1b[31mred\x1b[0m \x1b]0;title\x07\u202etfel"


@pytest.fixture(autouse=True)
def _own_place(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def write_chats(tmp_path):
    def write(*answers, system=None, name="chats.jsonl"):
        first = [] if system is None else [{"role": "system", "content": system}]
        rows = [
            [
                *first,
                {"role": "user", "content": f"Question {number}"},
                {"role": "assistant", "content": answer},
            ]
            for number, answer in enumerate(answers)
        ]
        (tmp_path / name).write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
        return name

    return write


def run(capsys, *arguments):
    code = main(["data", "recipe=tiny", *arguments])
    return code, capsys.readouterr().out


def test_all_is_well_with_the_shipped_data(capsys):
    code, out = run(capsys)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "Format of" in out
    assert "⟦Paris.<|im_end|>⟧" in out
    assert "the longest" in out
    assert "128 (the recipe's)" in out
    assert "data.packing=true" in out
    assert NOTHING_WRONG in out
    assert "as the model reads it" not in out, "the log's example is shown once"


@pytest.mark.parametrize("number, code", [(999, 4), (1000, 0)])
def test_a_kind_of_chat_is_looked_for_in_many_rows_and_the_limit_is_said(capsys, tmp_path, number, code):
    (tmp_path / "lost.jinja").write_text(SYSTEM_LOST)
    answer = {"role": "assistant", "content": "yes"}
    rows = [{"messages": [{"role": "user", "content": f"Go {n}?"}, answer]} for n in range(1001)]
    rows[number]["messages"].insert(0, {"role": "system", "content": "Be brief."})
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, out = run(capsys, "data=chats.jsonl", *NO_EVAL, "data.chat_template=lost.jinja")
    assert found == code
    said = "tried on the kinds of rows among the first 1,000 of each source, on 64 kinds at most."
    assert (said in " ".join(out.split())) == (code == 0)


def test_what_is_wrong_is_listed_and_ends_with_4(capsys, write_chats, tmp_path):
    (tmp_path / "lost.jinja").write_text(SYSTEM_LOST)
    data = write_chats(*["yes"] * 5, "long " * 300, system=HOSTILE)
    settings = [f"data={data}", *NO_EVAL, "data.chat_template=lost.jinja"]
    code, out = run(capsys, *settings)
    assert code == 4
    words = " ".join(out.split())
    assert "The chat template leaves out the system message of some chats" in words
    assert "data.max_length=128 cuts the answers of 1 of 6" in words
    assert NOTHING_WRONG not in out
    code, out = run(capsys, *settings, "--json", "-")
    values = json.loads(out)
    assert code == 4
    assert [warning["check"] for warning in values["warnings"]] == ["message_lost", None]


def test_texts_cannot_reach_the_terminal_raw(capsys, write_chats):
    data = write_chats(HOSTILE, system=HOSTILE)
    _, out = run(capsys, f"data={data}", *NO_EVAL)
    assert not {char for char in out if not char.isprintable()} - {"\n"}
    assert r"\x1b[31mred\x1b[0m \x1b]0;title\x07\u202etfel" in "".join(
        line.strip() + " " for line in out.splitlines()
    )


def test_nor_can_names_of_columns(capsys, tmp_path):
    (tmp_path / "odd.jsonl").write_text(json.dumps({HOSTILE: "x"}) + "\n")
    assert main(["data", "recipe=tiny", "data=odd.jsonl"]) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert r"Columns seen: \x1b[31mred" in said


def test_a_cut_row_says_what_is_lost(capsys, write_chats):
    data = write_chats("yes", "a b " * 900, "no", "x y " * 200)
    code, out = run(capsys, f"data={data}", *NO_EVAL, "--json", "found.json", "--show", "1")
    assert code == 4
    with open("found.json") as file:
        values = json.load(file)
    assert [(row["example"], row["why"]) for row in values["rows"]] == [
        (0, "first"),
        (1, "longest"),
        (3, "cut"),
    ]
    longest = values["rows"][1]
    assert longest["num_read"] == 128
    lost = longest["num_tokens"] - 128
    assert lost == longest["labels_lost"] + 1, "all but the line break at the end is answer"
    said = f"[cut here: {lost:,} tokens, {lost - 1:,} of them learnt]"
    assert said in " ".join(out.split())
    (own,) = [cut for cut in values["cuts"] if cut["max_length"] == 128]
    assert (own["rows"], own["rows_cut"], own["answers_cut"], own["rows_left_out"]) == (4, 2, 2, 0)
    assert sum(each["rows"] for each in values["bins"]) == values["num_examples"] == 4
    assert values["cuts"][-1]["max_length"] == 256, "what the model takes at most"


@pytest.fixture
def without_limit(tmp_path):
    """The tokenizer of the recipe `tiny` alone, without a model's config."""
    folder = tmp_path / "tokenizer_alone"
    folder.mkdir()
    for file in TINY.glob("*"):
        if file.name not in ("config.json", "data.jsonl"):
            shutil.copy(file, folder)
    return "model=tokenizer_alone"


def test_the_tokenizer_alone_is_enough(capsys, write_chats, without_limit):
    data = write_chats("one", "a b " * 900)
    settings = [without_limit, f"data={data}", *NO_EVAL, "data.max_length=null", "--show", "1"]
    code, out = run(capsys, *settings)
    assert code == 0
    words = " ".join(out.split())
    assert "Not checked, as the model cannot be read" in words
    _, out = run(capsys, *settings, "--json")
    longest = json.loads(out)["rows"][1]
    assert longest["num_read"] == longest["num_tokens"] > 1800
    assert f"[... {longest['num_tokens'] - 400:,} tokens not shown ...]" in words
    begin = "".join(piece["text"] for piece in longest["begin"])
    assert begin.startswith("<|im_start|>user\nQuestion 1<|im_end|>\n<|im_start|>assistant\na b a b")
    assert longest["end"][0]["text"].endswith("a b <|im_end|>")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_rows_of_tokens_need_no_tokenizer_and_are_shown_as_ids(capsys, tmp_path, kind):
    (tmp_path / "config_alone").mkdir()
    shutil.copy(TINY / "config.json", tmp_path / "config_alone")
    rows = [{"input_ids": [5, 6, 7, number], "labels": [-100, -100, 7, number]} for number in range(4)]
    if kind == "file":
        (tmp_path / "tokens").with_suffix(".jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    else:
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "tokens")
    data = "data=tokens.jsonl" if kind == "file" else "data=tokens"
    code, out = run(capsys, "model=config_alone", data, *NO_EVAL)
    assert code == 0
    assert "4 examples, 16 tokens, 8 of them learnt, longest 4" in " ".join(out.split())
    assert "5 6 ⟦7 0 ⟧" in out
    assert "Rows are shown as ids. No tokenizer could be read from config_alone" in " ".join(out.split())


def test_raw_text_is_split(capsys, tmp_path):
    (tmp_path / "prose.txt").write_text(
        "word " * 400 + "\n\nshort\n\nshorter\n\nshortest\n\n"
    )  # blank lines are no rows
    code, out = run(capsys, "data=prose.txt", *NO_EVAL, "--show", "0")
    assert code == 0
    assert "Raw text is split, and nothing is lost" in out
    assert "Example 0" not in out


@pytest.mark.parametrize("settings", [["data.packing=true"], ["data.streaming=true", "training.max_steps=1"]])
def test_packed_and_streamed_data_are_shown_by_example(settings, capsys, write_chats):
    data = write_chats(*["yes"] * 20, "no " * 200)
    code, out = run(capsys, f"data={data}", *NO_EVAL, *settings, "--json", "-")
    values = json.loads(out)
    assert code == 0, "one answer in 21 may be cut"
    assert values["num_examples"] == 21
    assert values["num_streamed"] == (21 if "streaming" in settings[0] else None)
    assert [row["why"] for row in values["rows"]] == ["first", "first", "longest"]
    own, *others = values["paddings"]
    assert own["settings"] == ""
    if "packing" in settings[0]:
        assert [other["settings"] for other in others] == ["data.packing=false"]
        assert own["computed"] < others[0]["computed"]
        assert own["num_rows"] < 21


def test_colours_mark_what_is_learnt_on_a_terminal(write_chats):
    found = inspect_data_of(load_recipe("tiny", [f"data={write_chats('yes', 'no')}", *NO_EVAL]), show=1)

    def shown(**settings):
        console = Console(force_terminal=True, width=80, _environ={}, **settings)
        with console.capture() as captured:
            console.print(data_table(found), soft_wrap=True)
        return captured.get()

    coloured = shown(color_system="standard")
    assert "\x1b[1;32myes<|im_end|>" in coloured
    assert "⟦" not in coloured
    assert "⟦yes<|im_end|>⟧" in shown(color_system="standard", no_color=True)
    assert "⟦yes<|im_end|>⟧" in shown(color_system=None)

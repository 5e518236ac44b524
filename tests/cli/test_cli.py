from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import LIMIT_SECONDS, launch_variables, set_launch

import lowmem_ft
from lowmem_ft.cli import COMMANDS, main
from lowmem_ft.cli.answers import train as train_answer
from lowmem_ft.cli.commands import train as train_command
from lowmem_ft.cli.console.exit_codes import MORE_ON_MEMORY
from lowmem_ft.foundation.errors import DoesNotFitError, Interrupted
from lowmem_ft.planning.preflight import train as preflight
from lowmem_ft.recipe import load_recipe, shipped_recipes
from lowmem_ft.recipe.shipped.needs import needs_of_shipped_recipes
from lowmem_ft.training.processes import rendezvous

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "finetune.py"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch):
    """The recipes that reach the training loop, in place of training them."""
    recipes: list = []
    monkeypatch.setattr(preflight, "train", lambda recipe, folder: recipes.append(recipe))
    monkeypatch.setattr(train_answer, "_print_report", lambda result: None)  # there is no run
    for variable in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    return recipes


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        env={**os.environ, "COLUMNS": "80"},
    )


def test_help_and_version_fill_80_columns_and_do_not_import_torch():
    calls = [[], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
    code = f"""
import contextlib, sys
import lowmem_ft
from lowmem_ft.cli import main
for call in {calls!r}:
    with contextlib.suppress(SystemExit):
        main(call)
print("HEAVY", {{"torch", "transformers", "omegaconf"}} & set(sys.modules))
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert "HEAVY set()" in done.stdout
    assert done.stdout.count("usage: lowmem-ft") == len(calls) - 1
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []
    assert f"lowmem-ft {lowmem_ft.__version__}" in done.stdout


def test_the_package_offers_its_public_names_on_first_use():
    assert lowmem_ft.load_recipe is load_recipe
    assert {"Budget", "Recipe", "load_recipe", "train"} <= set(dir(lowmem_ft))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lowmem_ft.nothing  # noqa: B018


def test_train_hands_the_loaded_recipe_to_the_training_loop(trained):
    assert main(["train", "training.seed=3", "recipe=tiny", "data.packing=true"]) == 0
    assert trained == [load_recipe("tiny", ["training.seed=3", "data.packing=true"])]


def test_the_script_is_the_train_command():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--help"], capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 0
    assert "recipe=NAME|PATH" in done.stdout


def test_each_problem_is_a_line_on_stderr_without_a_traceback(trained, capsys):
    assert main(["train", "recipe=tiny", "training.sed=1", "--learning-rate", "1"]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.splitlines() == [
        "error: A setting is written key=value, got `--learning-rate 1`. Write training.learning_rate=1.",
        "error: training.sed is not a recipe key. Did you mean `training.seed`?",
    ]
    assert trained == []


def test_a_terminal_gets_problems_in_whole_words_and_a_pipe_gets_each_on_one_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    command = ["train", "recipe=tiny", "training.sed=1", "data.format=a_kind_that_is_not_there"]
    assert main(command) == 2
    in_a_pipe = capsys.readouterr().err.splitlines()
    assert len(in_a_pipe) == 2
    assert max(map(len, in_a_pipe)) > 80
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(command) == 2
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(line.strip() for line in lines) == " ".join(in_a_pipe)


def test_only_the_main_process_speaks(trained, capsys, monkeypatch):
    met: list[object] = []
    monkeypatch.setattr(rendezvous, "tell_others", met.append)  # there are none
    set_launch(monkeypatch, rank=1)
    assert main(["train", "recipe=nothing"]) == 2
    assert capsys.readouterr().err == ""
    set_launch(monkeypatch, rank=0)
    assert main(["train", "recipe=nothing"]) == 2
    assert "There is no recipe 'nothing'" in capsys.readouterr().err
    assert len(met) == 2


@pytest.mark.parametrize(
    "left_over",
    [
        {"RANK": "1"},
        {"LOCAL_RANK": "3"},
        {"RANK": "x", "WORLD_SIZE": "1"},
        {"RANK": "1", "WORLD_SIZE": "2"},
        {**launch_variables(1), "RANK": "2"},
        {**launch_variables(1), "WORLD_SIZE": "two"},
        {**launch_variables(1), "MASTER_ADDR": ""},
        {**launch_variables(1), "MASTER_PORT": "99999"},
    ],
    ids=lambda left_over: " ".join(f"{name}={value}" for name, value in left_over.items()),
)
def test_variables_that_make_no_launch_silence_no_error(trained, capsys, monkeypatch, left_over):
    """Batch scripts, containers and notebooks leave them behind."""
    for name, value in left_over.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "recipe=nothing"]) == 2
    assert capsys.readouterr().err.count("There is no recipe 'nothing'") == 1


@pytest.mark.parametrize(
    "command", [["gpus", "nothing"], ["estimate", "recipe=nothing"], ["data", "recipe=nothing"]]
)
def test_a_command_that_never_is_one_of_several_always_speaks(capsys, monkeypatch, command):
    set_launch(monkeypatch, rank=1)
    assert main(command) == 2
    assert capsys.readouterr().err.count("'nothing'") == 1


def test_help_is_a_word_too(capsys):
    for asked, same in (
        (["help"], ["--help"]),
        (["help", "gpus"], ["gpus", "--help"]),
        (["-V"], ["--version"]),
    ):
        assert main(asked) == main(same) == 0
        told = capsys.readouterr().out
        assert told[: len(told) // 2] == told[len(told) // 2 :] != ""
    assert main(["help", "gpuz"]) == 2
    assert "Did you mean `gpus`" in capsys.readouterr().err


def test_a_working_folder_that_is_gone_is_told(trained, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert main(["train", "recipe=tiny"]) == 2
    assert "The current folder has been deleted." in capsys.readouterr().err


def test_what_does_not_fit_names_the_page_on_memory(trained, monkeypatch, capsys):
    def fail(recipe: object, folder: object) -> None:
        raise DoesNotFitError("too big")

    monkeypatch.setattr(preflight, "train", fail)
    assert train_command.main(["recipe=tiny"]) == 3
    assert capsys.readouterr().err.splitlines()[-2:] == ["error: too big", MORE_ON_MEMORY]


def test_help_names_the_first_page(capsys):
    assert main(["--help"]) == 0
    assert "`lowmem-ft docs` lists pages by question" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "raised,code",
    [
        (DoesNotFitError("too big"), 3),
        (KeyboardInterrupt(), 130),
        (Interrupted(signal.SIGINT), 130),
        (Interrupted(signal.SIGTERM), 143),
    ],
    ids=repr,
)
def test_the_exit_code_says_whose_fault_it_is(trained, monkeypatch, raised, code):
    def fail(recipe: object, folder: object) -> None:
        raise raised

    monkeypatch.setattr(preflight, "train", fail)
    assert train_command.main(["recipe=tiny"]) == code


def test_our_own_bug_keeps_its_traceback(trained, monkeypatch):
    monkeypatch.setattr(preflight, "train", lambda recipe, folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_command.main(["recipe=tiny"])


STOPPED = {
    "lowmem_ft.planning.preflight.train.train": ["train", "recipe=tiny"],
    "lowmem_ft.recipe.request.request.load_recipe": ["train", "recipe=tiny"],
    "lowmem_ft.cli.estimating.estimate_recipe.estimate_memory": ["estimate", "recipe=tiny", "--gpu", "l4"],
    "lowmem_ft.planning.planner.plan": ["plan", "recipe=tiny", "--gpu", "l4"],
    "lowmem_ft.cli.answers.export.check_merge": ["merge", "adapter", "out"],
    "importlib.import_module": ["recipes"],
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize("where", STOPPED)
def test_a_command_that_is_stopped_says_so_in_one_line(where, number, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(where, lambda *args, **kwargs: signal.raise_signal(number))
    before = signal.getsignal(signal.SIGTERM)
    assert main(STOPPED[where]) == 128 + number
    trained = "before the first step: nothing was trained, and nothing was written."
    what = trained if STOPPED[where][0] == "train" else "before it was finished: nothing was written."
    assert capfd.readouterr().err == f"Stopped by {number.name} {what}\n"
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_error_that_comes_of_ctrl_c_is_not_told_in_its_place(trained, monkeypatch, capfd):
    def interrupted(recipe, folder):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as stop:
            raise ImportError("numpy.core.multiarray failed to import") from stop

    monkeypatch.setattr(preflight, "train", interrupted)
    assert train_command.main(["recipe=tiny"]) == 130
    assert "Stopped by SIGINT" in capfd.readouterr().err


def test_a_command_that_takes_sigterm_for_an_answer_ends_with_its_exit_code(trained, monkeypatch):
    """A search ends with the best so far, as after Ctrl-C."""

    def ends(recipe, folder):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(preflight, "train", ends)
    assert train_command.main(["recipe=tiny"]) == 143
    monkeypatch.setattr(preflight, "train", lambda recipe, folder: None)
    assert train_command.main(["recipe=tiny"]) == 0


def test_sigterm_that_a_launcher_passes_on_is_no_second_one(trained, monkeypatch, capfd):
    def told_twice(recipe, folder):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(preflight, "train", told_twice)
    assert train_command.main(["recipe=tiny"]) == 143
    assert "Stopped by SIGTERM" in capfd.readouterr().err


TOLD_AGAIN = """
import signal
from lowmem_ft.foundation.system import signals

signals.ONE_REQUEST_SECONDS = -1
with signals.raise_at_signals():
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.raise_signal(signal.SIGTERM)
        print("still there")
"""


def test_a_later_sigterm_ends_the_process_whatever_it_does():
    ended = subprocess.run([sys.executable, "-c", TOLD_AGAIN], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "")


def test_a_worker_that_a_pool_ends_by_sigterm_ends_in_silence(trained, monkeypatch, capfd):
    def in_a_worker(recipe, folder):
        if (worker := os.fork()) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM

    monkeypatch.setattr(preflight, "train", in_a_worker)
    assert train_command.main(["recipe=tiny"]) == 0
    assert "Stopped" not in capfd.readouterr().err


def test_a_reader_that_has_seen_enough_ends_the_command_in_silence(monkeypatch, capfd):
    """As in ``lowmem-ft recipes | head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["recipes", "7b-bf16"]) == 141
    assert capfd.readouterr().err == ""


def test_a_pipe_that_breaks_within_a_run_is_our_own_bug(trained, monkeypatch):
    def fail(recipe: object, folder: object) -> None:
        raise BrokenPipeError("a data loader's worker")

    monkeypatch.setattr(preflight, "train", fail)
    with pytest.raises(BrokenPipeError):
        train_command.main(["recipe=tiny"])


def test_recipes_lists_each_with_its_description(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert names == list(shipped_recipes())
    assert {"1b-bf16", "7b-qlora", "70b-qlora-24gb", "demo"} < set(names)
    entries = re.split(r"\n(?=\S)", "\n".join(lines))
    for name, entry in zip(names, entries, strict=True):
        assert " ".join(entry.split()).endswith(load_recipe(name).description)


def test_recipes_says_what_each_needs_of_a_card_and_of_the_host(capsys):
    assert main(["recipes"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    shown = dict(line.split(maxsplit=1) for line in lines)
    needs = needs_of_shipped_recipes()
    assert {name: shown[name] for name in needs} == {name: str(need) for name, need in needs.items()}
    card, _, sizes = shown["8b-8gb"].partition(": ")
    assert card == "rtx-4060"
    assert re.fullmatch(r"[\d.]+ of 7\.7 GiB, and [\d.]+ GiB of host memory", sizes)
    assert shown["tiny"] == "cpu: 365 MiB of host memory (505 MiB with torch for CUDA)"


def test_recipes_does_without_torch():
    code = "import sys; from lowmem_ft.cli import main; main(['recipes']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("name", ["8b-bf16", "tiny"])
def test_recipes_prints_a_file_that_loads_to_an_equal_recipe(capsys, tmp_path, name):
    assert main(["recipes", name, "training.seed=5"]) == 0
    path = tmp_path / "saved.yaml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_recipe(path) == load_recipe(name, ["training.seed=5"])


def test_log_lines_of_other_processes_stay_quiet():
    code = """
import logging
from lowmem_ft.cli.console.logs import set_up_logging
set_up_logging()
logging.getLogger("lowmem_ft.x").info("chosen because")
logging.getLogger("other").info("chatter")
logging.getLogger("other").warning("trouble")
"""
    environment = {**os.environ, **launch_variables(0)}
    speaks = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    quiet = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**environment, **launch_variables(1)},
    )
    assert "chosen because" in speaks.stderr
    assert "trouble" in speaks.stderr
    assert "chatter" not in speaks.stderr
    assert speaks.stdout == quiet.stdout == quiet.stderr == ""


def test_library_lines_are_said_once_and_errors_that_are_raised_anyway_not_at_all():
    code = """
import logging, datasets, huggingface_hub
from lowmem_ft.cli.console.asking import start_logging, take_over_library_logs
start_logging()
take_over_library_logs()
logging.getLogger("huggingface_hub.x").warning("said once")
logging.getLogger("datasets.packaged_modules.json.json").error("said by us")
"""
    done = run_python(code)
    assert done.stderr.count("said once") == 1
    assert "said by us" not in done.stderr

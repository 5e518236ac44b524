"""Every launch line of the README, the docs and the headers of files starts, on this machine's processor.

What a GPU would do beyond that is not shown: a line is started with ``training.use_cpu=true``, two processes and the
smallest model, which shares what the line's own recipe shares, and is otherwise as it is written.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys

import accelerate.commands.launch as accelerate_launch
import pytest
import torch.distributed.run as torch_launch
from launch_lines import LAUNCHERS, ROOT, launch_lines

from lowmem_ft.recipe import load_recipe

PROGRAMS = {
    "accelerate": ["-m", "accelerate.commands.accelerate_cli"],
    "torchrun": ["-m", "torch.distributed.run"],
}
LINES = launch_lines()
WHOLE = [line for line in LINES if line.recipe is not None and "..." not in line.text]
ALWAYS_STARTED = "accelerate launch --config_file configs/ddp.yaml"
"""The others are slow; tests of several processes elsewhere start them as torchrun does."""


def started():
    """Each command once, with all that are the same on this machine."""
    alike = {}
    for line in WHOLE:
        alike.setdefault(str(line.on_this_machine(0)), []).append(line)
    for lines in alike.values():
        text = lines[0].text
        marks = [] if text.startswith(ALWAYS_STARTED) else [pytest.mark.slow]
        if "zero" in text:
            is_missing = importlib.util.find_spec("deepspeed") is None
            marks.append(pytest.mark.skipif(is_missing, reason="make test-deepspeed installs it"))
        pages = sorted({line.page for line in lines})
        yield pytest.param(lines[0], marks=marks, id=f"{pages[0]} and {len(pages) - 1} more: {text}")


def test_lines_are_found_wherever_they_are_written():
    assert len(LINES) > 40
    folders = {line.page.partition("/")[0] for line in LINES}
    assert folders >= {"README.md", "docs", "recipes", "configs", "scripts", "lowmem_ft"}
    assert {line.page for line in WHOLE if line.page.startswith("configs/")} == {
        f"configs/{path.name}" for path in (ROOT / "configs").iterdir()
    }
    assert {line.page for line in WHOLE if line.page.startswith("recipes/")} == {
        f"recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")
    }
    slow = [parameter for parameter in started() if parameter.marks]
    assert len(list(started())) - len(slow) == 1


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.page}: {line.text}")
def test_the_line_has_options_that_its_launcher_knows_and_a_recipe_that_loads(line):
    launcher = next(launcher for launcher in LAUNCHERS if line.text.startswith(launcher))
    words = line.words[len(launcher.split()) :]
    if "..." in words:
        words[words.index("...") :] = ["finetune.py"]
    words = [
        word.replace("=N", "=2") if word.startswith("--") else "2" if word == "N" else word for word in words
    ]
    if all(word.startswith("-") or word.isdigit() for word in words):
        words.append("finetune.py")
    parser = {
        "accelerate launch": accelerate_launch.launch_command_parser,
        "torchrun": torch_launch.get_args_parser,
    }[launcher]()
    options = parser.parse_args(words)
    assert getattr(options, "config_file", None) is None or (ROOT / options.config_file).exists()
    if line.recipe is not None:
        load_recipe(line.recipe, line.settings)


@pytest.mark.parametrize("line", started())
def test_the_line_trains(line, tmp_path):
    for name in ("configs", "scripts", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    for name in ("my_chats.jsonl", "chats.jsonl", "my.jsonl"):
        (tmp_path / name).write_text(f"{json.dumps({'messages': chat})}\n" * 64)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    machines = [_start(words, tmp_path) for words in line.on_this_machine(port)]
    said = [process.communicate()[0] for process in machines]
    assert [process.returncode for process in machines] == [0] * len(machines), "\n".join(said)
    here = line.on_this_machine(0)[0]
    is_of_two = any(word.startswith(("--num_processes", "--nproc_per_node")) for word in here)
    assert ("2 processes:" if is_of_two else "1 process:") in said[0]
    assert (tmp_path / line.output_dir / "model").is_dir()


def _start(words, folder):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
    }
    return subprocess.Popen(
        [sys.executable, *PROGRAMS[words[0]], *words[1:]],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

"""Every line that launches a run, as the README, the docs, headers of files and help texts write it."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from lowmem_ft.recipe import load_recipe

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "docs/*.md", "recipes/*.yaml", "configs/*.yaml", "scripts/*.py"]
PAGES += ["lowmem_ft/__main__.py", "lowmem_ft/cli/*.py"]
LAUNCHERS = ("accelerate launch", "torchrun")


@dataclasses.dataclass(frozen=True)
class LaunchLine:
    """One of them.

    Args:
        page: where it is.
        text: as it is there, in one line and without its comment.
    """

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        """Without what stands for more of them."""
        return [
            word for word in shlex.split(self.text) if not word.startswith("[") and not word.endswith("]")
        ]

    @property
    def recipe(self) -> str | None:
        """The recipe's name; tiny where the line has a placeholder; None where it leaves settings out."""
        named = [word.partition("=")[2] for word in self.words if word.startswith("recipe=")]
        return ("tiny" if "NAME" in named[0] else named[0]) if named else None

    @property
    def settings(self) -> list[str]:
        """Those beside the recipe."""
        return [
            word for word in self.words if re.match(r"[a-z_.]+=", word) and not word.startswith("recipe=")
        ]

    @property
    def output_dir(self) -> str:
        """Where it writes on this machine."""
        named = [word.partition("=")[2] for word in self.settings if word.startswith("training.output_dir=")]
        return named[0] if named else "run"

    def on_this_machine(self, port: int) -> list[list[str]]:
        """The same without a GPU and with the smallest model: the words of each machine's command.

        Args:
            port: that nobody uses.
        """
        line = [*self._with_two_processes(port), *self._settings_of_tiny()]
        return [_as_machine(line, rank) for rank in ((0, 1) if self._is_of_machines else (0,))]

    def _with_two_processes(self, port: int) -> Iterator[str]:
        """The same words for two processes, which meet on this machine at a port of their own."""
        launcher = 2 if self.words[0] == "accelerate" else 1
        yield from self.words[:launcher]
        if self._is_for_several and "--num_processes" not in self.words and launcher == 2:
            yield from ("--num_processes", "2")
        if not self._is_of_machines and "--standalone" not in self.words:
            yield from ("--main_process_port", f"{port}") if launcher == 2 else (f"--master_port={port}",)
        values = {
            "--num_processes": "2",
            "--nproc_per_node": "1" if self._is_of_machines else "2",
            "--main_process_port": f"{port}",
            "--master_port": f"{port}",
            "--main_process_ip": "127.0.0.1",
            "--master_addr": "127.0.0.1",
            "recipe": "tiny",
        }
        before = ""
        for word in self.words[launcher:]:
            name, is_pair, _ = word.partition("=")
            if is_pair and name in values:
                yield f"{name}={values[name]}"
            else:
                yield word if word.startswith("-") else values.get(before, word)
            before = word

    def _settings_of_tiny(self) -> Iterator[str]:
        recipe = load_recipe(self.recipe, [])
        strategy, adapter = recipe.distributed.strategy, recipe.adapter.name
        yield from [] if strategy is None else [f"distributed.strategy={strategy}"]
        yield from [] if adapter == "none" else [f"adapter.name={adapter}"]
        yield from ("training.use_cpu=true", "training.max_steps=1", "training.eval_steps=null")
        yield from ("budget.preflight=false", f"training.output_dir={self.output_dir}")

    @property
    def _is_of_machines(self) -> bool:
        return "--num_machines" in self.words or "--nnodes=2" in self.words

    @property
    def _is_for_several(self) -> bool:
        """Whether accelerate is to start as many processes as a machine has GPUs, or a file says."""
        return "--config_file" in self.words or load_recipe(self.recipe, []).distributed.strategy is not None


def launch_lines() -> list[LaunchLine]:
    """All of them, each once a page."""
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    lines = [LaunchLine(str(page.relative_to(ROOT)), text) for page in pages for text in _texts(page)]
    return list(dict.fromkeys(lines))


def _texts(page: Path) -> Iterator[str]:
    text = re.sub(r"^# ?", "", page.read_text("utf-8"), flags=re.M)  # headers of YAML files
    text = re.sub(r"\\\\?\n\s*", "", text)  # a line that goes on
    starts = "|".join(LAUNCHERS)
    for line in re.findall(rf"^[ \t]*(?:\$ )?((?:{starts}) [^`\n]*)$", text, re.M):
        yield _tidied(re.sub(r"\s+#.*", "", line))
    for words in re.findall(rf"`((?:{starts}) [^`]*)`", re.sub(r"(?s)\n```.*?\n```", "", text)):
        if "{" not in words:  # an f-string of a message
            yield _tidied(words)


def _tidied(text: str) -> str:
    return " ".join(text.split())


def _as_machine(words: list[str], rank: int) -> list[str]:
    ranked, before = [], ""
    for word in words:
        is_rank = before == "--machine_rank"
        ranked.append(f"{rank}" if is_rank else re.sub(r"^--node_rank=0$", f"--node_rank={rank}", word))
        before = word
    return ranked

"""A user's script, run on a tracing machine as ``python script.py ARGS`` runs it, until its steps have been seen."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import runpy
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lowmem_ft.foundation.errors import Interrupted, UserError
from lowmem_ft.foundation.memory.allocator.caching_allocator import CachingAllocator
from lowmem_ft.foundation.notebook_cells import SUFFIX
from lowmem_ft.foundation.packages import own_folder
from lowmem_ft.foundation.upstream.patches import replace
from lowmem_ft.foundation.upstream.tested import installed_version
from lowmem_ft.planning.script_runs.after_training import AfterTraining
from lowmem_ft.planning.script_runs.batch_search import MOST_FAILURES, BatchSearch, may_handle_running_out
from lowmem_ft.planning.script_runs.generation import ShortGeneration
from lowmem_ft.planning.script_runs.launch import ALONE, Launch, by_torchrun
from lowmem_ft.planning.script_runs.notebook_run import NotebookRun
from lowmem_ft.planning.script_runs.other_processes import only_this_process, other_processes_kept_apart
from lowmem_ft.planning.script_runs.ranks import RankWatch
from lowmem_ft.planning.script_runs.script_refusals import refuse_what_cannot_be
from lowmem_ft.planning.script_runs.short_data import DataCut
from lowmem_ft.planning.script_runs.steps import Enough, StepWatch
from lowmem_ft.planning.script_runs.temporary_files import FilesKeptAway
from lowmem_ft.planning.script_runs.trainers import ShortTraining
from lowmem_ft.planning.script_runs.vllm_share import VllmShare
from lowmem_ft.planning.script_runs.weights import weights_from_configs
from lowmem_ft.virtual_gpu.recording.code_places import PeakPlace
from lowmem_ft.virtual_gpu.recording.limited_memory import LimitedMemory
from lowmem_ft.virtual_gpu.recording.untraceable import what_cannot_be_traced
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine
from lowmem_ft.virtual_gpu.values.questions import is_of_library, shown_line

ENVIRONMENT = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Settings that turn trackers off, whatever the script asks for, and make libraries quiet."""

PASSED_OVER = "passed over: "
"""The begin of a note on the parts of a notebook that were not run."""

_MOST_FRAMES = 5

_WITHOUT_NETWORK = (socket.gaierror, ConnectionError)
_WITHOUT_NETWORK_TOO = ("ConnectError", "ConnectTimeout", "LocalEntryNotFoundError", "OfflineModeIsEnabled")
"""Errors of requests to others: Python's own, and the names of those of httpx and the hub."""

_PACKAGE = own_folder("lowmem_ft")
_STANDS_FOR_OTHERS = tuple(
    map(
        own_folder,
        ("lowmem_ft.virtual_gpu", "lowmem_ft.foundation.upstream", "lowmem_ft.planning.script_runs"),
    )
)


class ScriptError(UserError):
    """The script ended in an error of its own.

    Attributes:
        own_traceback: Python's traceback, with the frames of the script's own code.
        needs_launcher: whether the script misses a variable that a launcher sets.
    """

    def __init__(self, problem: str, own_traceback: str, *, needs_launcher: bool = False) -> None:
        super().__init__(problem)
        self.own_traceback = own_traceback
        self.needs_launcher = needs_launcher


class ScriptRun:
    """One run of a script.

    Args:
        path: the path of the script, Python or a notebook.
        arguments: what the script finds in ``sys.argv``.
        machine: a fresh machine for it to run on.
        num_steps: optimizer steps to see.
        on_step: called with the number of each step as it ends.
        on_trainer: called with each trainer that is about to train.
        on_reading: called as the script reads data.
        launch: how it is started.
        allocator: an allocator with a limit, to give it torch's error where memory runs out; None: it never does.

    Attributes:
        handles_running_out: whether the script might continue after such an error.
    """

    def __init__(
        self,
        path: Path,
        arguments: Sequence[str],
        machine: TracingMachine,
        num_steps: int,
        on_step: Callable[[int], None],
        on_trainer: Callable[[Any], None],
        on_reading: Callable[[], None],
        launch: Launch = ALONE,
        allocator: CachingAllocator | None = None,
    ) -> None:
        self.launch = launch
        self.path = path
        self.notebook = NotebookRun(path) if path.suffix == SUFFIX else None
        self._own = str(path if self.notebook is None else path.absolute())
        self._folder = path.parent.absolute()
        self.arguments = arguments
        self.machine = machine
        self.watch = StepWatch(machine, num_steps, on_step)
        self.peak = PeakPlace(machine.recorder, self._own)
        self.ranks = RankWatch(launch, machine.say)
        self.cut = DataCut(launch.plan.in_all(num_steps), on_reading)
        files = FilesKeptAway()
        self.after = AfterTraining(machine, self.peak)
        self.training = ShortTraining(machine, self.cut, files, num_steps, on_trainer, self.after)
        self.generation = ShortGeneration(machine)
        self.vllm = VllmShare(machine)
        self._files = files
        machine.keeps_files_away = True
        machine.recorder.as_torch_reports = True
        self.batches = BatchSearch()
        self.handles_running_out = False
        self.memory = allocator and LimitedMemory(
            machine.recorder, allocator, self._runs_out, self._starts_over
        )

    def run(self) -> None:
        """Run the script.

        Raises:
            ScriptError: if it ends in an error.
            UserError: if it does what an estimate cannot follow, or ends without a step.
        """
        with (
            _as_program(self.path, self.arguments, self.launch.environment),
            self.machine,
            contextlib.ExitStack() as undo,
        ):
            if words := self.launch.in_words():
                self.machine.say(words)
            self._files.redirect(undo)
            weights_from_configs(undo, self.machine.say, self.after.end_before_it)
            self.cut.apply(undo)
            self.training.apply(undo)
            self.generation.apply(undo)
            self.vllm.apply(undo)
            self.watch.apply(undo)
            self.ranks.apply(undo)
            self.batches.apply(undo)
            other_processes_kept_apart(undo)
            self.after.apply(undo)
            refuse_what_cannot_be(undo, self.launch)
            if self.notebook is not None:
                self.notebook.apply(undo)
            with only_this_process():
                self._run()
            with self._files.as_ever():  # a script may have deleted its own modules
                self.handles_running_out = self.batches.is_one or may_handle_running_out(self._texts())
        if not self.watch.steps:
            nothing = (
                f"{self.path} ended without an optimizer step or a backward pass, so there is nothing to estimate. "
                f"Pass it, after `--`, the arguments with which it trains; {self.after.other_processes()}."
            )
            raise self._noted(UserError(nothing))

    def passed_over(self) -> str:
        """Return a note on the parts of a notebook that were not run; nothing where all were."""
        passed_over = self.notebook and self.notebook.passed_over()
        return f"{PASSED_OVER}{passed_over}" if passed_over else ""

    def _noted(self, error: UserError) -> UserError:
        if note := self.passed_over():
            UserError.__init__(error, *error.problems, f"{note}.")
        return error

    def _texts(self) -> Iterator[str]:
        files = [*_modules_of(self._folder, set()).values()]
        if self.notebook is None:
            files.append(str(self.path))
        else:
            yield self.notebook.code
        yield from (Path(file).read_text(encoding="utf-8", errors="replace") for file in files)

    def _runs_out(self) -> None:
        self.batches.runs_out()
        self.watch.forget()
        if len(self.batches.failed) >= MOST_FAILURES:
            raise Enough

    def _starts_over(self) -> None:
        self.machine.attribution.starts_over()
        self.peak.starts_over()

    def _run(self) -> None:
        try:
            if self.notebook is None:
                runpy.run_path(str(self.path), run_name="__main__")
            else:
                self.notebook.run()
        except Enough:
            pass  # not an error: our own signal that all the steps have been seen
        except SystemExit as end:
            if end.code in (None, 0):
                return
            said = f": {end.code}" if isinstance(end.code, str) else f" by sys.exit({end.code})"
            if not self.watch.steps:
                last = _last_words(sys.stderr)
                raise self._noted(ScriptError(f"{self.path} exited{said}{last}", "")) from end
            self.machine.say(f"the script exited after step {len(self.watch.steps)}{said}")
        except (KeyboardInterrupt, Interrupted):
            raise
        except BaseException as error:  # a panic of a Rust library is not an Exception
            if self.after.has_begun and not isinstance(error, torch.OutOfMemoryError):
                words = str(error) if isinstance(error, UserError) else _first_line(error)
                self.machine.say(
                    f"after training: the script is seen up to an error{self._where(error)}: {words}"
                )
                return
            raise self._noted(self._told(error)) from error

    def _where(self, error: BaseException) -> str:
        own = _own_frames(error.__traceback__, self._own)
        return f" (at {shown_line(own[-1].filename, own[-1].lineno)})" if own else ""

    def _told(self, error: BaseException) -> UserError:
        if isinstance(error, UserError):
            return UserError(*(f"{problem}{self._where(error)}" for problem in error.problems))
        return what_cannot_be_traced(error) or self._explained(error)

    def _explained(self, error: BaseException) -> ScriptError:
        shown = _own_frames(error.__traceback__, self._own, and_last_of_ours=_MOST_FRAMES // 2)
        innermost = _innermost_of_others(error)
        frames = [*shown, *(() if innermost in shown else (innermost,))]
        is_ours = bool(shown) and _is_called_by_scripts(shown[-1].filename)
        whose = "its own code and lowmem_ft" if is_ours else "its own code"
        whose += "" if innermost in shown else ", and the last"
        words = traceback.format_exception_only(type(error), error)
        lines = "".join([*traceback.format_list(frames[-_MOST_FRAMES:]), *words])
        step = len(self.watch.steps)
        when = f"in step {step + 1}" if step else "before the end of its first step"
        first_line = _first_line(error)
        if reason := _lacks(error):
            return ScriptError(f"{self.path} ended in an error {when}: {reason}{self._where(error)}", "")
        where = ", in code of lowmem_ft" if is_ours else ""
        return ScriptError(
            f"{self.path} ended in an error {when}{where}: {first_line}",
            f"The frames of {whose}:\n{lines}",
            needs_launcher=isinstance(error, KeyError)
            and error.args[0] in by_torchrun().environment.keys() - os.environ.keys(),
        )


def _own_frames(
    trace: TracebackType | None, script: str, *, and_last_of_ours: int = 0
) -> list[traceback.FrameSummary]:
    """Return the frames of the script's own code, and the last frames of this package that it calls or runs under."""
    frames = traceback.extract_tb(trace)
    ours = [frame for frame in frames if _is_called_by_scripts(frame.filename)]
    last = ours[len(ours) - and_last_of_ours :] if and_last_of_ours else []
    return [
        frame
        for frame in frames
        if frame.filename.startswith(script) or not _is_of_library(frame.filename) or frame in last
    ]


def _innermost_of_others(error: BaseException) -> traceback.FrameSummary:
    """Return the last frame of a script or a library, without what stands for libraries here."""
    frames = traceback.extract_tb(error.__traceback__)
    return next(
        (frame for frame in reversed(frames) if not frame.filename.startswith(_STANDS_FOR_OTHERS)), frames[-1]
    )


def _lacks(error: BaseException) -> str:
    """Return what this machine lacks where a script ends because of that; else nothing."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        library = error.name.partition(".")[0]
        if library != error.name and (version := installed_version(library)):
            return f"it needs {error.name}, which {library} {version} does not have"
        return f"it needs the package {error.name}, which is not installed here"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, _WITHOUT_NETWORK) or type(cause).__name__ in _WITHOUT_NETWORK_TOO:
            return f"it needs a network, and reaches none here: {_first_line(error)}"
        cause = cause.__cause__ or cause.__context__
    return ""


def _first_line(error: BaseException) -> str:
    return traceback.format_exception_only(type(error), error)[-1].strip().splitlines()[0]


def _is_of_library(file: str) -> bool:
    return is_of_library(file) or file == "<string>"  # code that dataclasses write


def _is_called_by_scripts(file: str) -> bool:
    """Check whether a file is this package's, except the stand-ins for torch, files and trainers during an estimate."""
    return file.startswith(_PACKAGE) and not file.startswith(_STANDS_FOR_OTHERS)


def _last_words(stream: Any) -> str:
    """Return the last line that a script has printed, such as argparse's error."""
    said = stream.getvalue().strip().splitlines() if isinstance(stream, io.StringIO) else []
    return f". Its last line: {said[-1]}" if said else "."


@contextlib.contextmanager
def _as_program(path: Path, arguments: Sequence[str], more: Mapping[str, str]) -> Iterator[None]:
    """Give the script what a process of its own would have, and restore in the end what it may change.

    Its output is discarded: losses are those of a model without values.
    """
    environment, folder, modules = dict(os.environ), os.getcwd(), set(sys.modules)
    disabled = logging.root.manager.disable
    with contextlib.ExitStack() as undo:
        undo.callback(_forget_modules_of, path.parent, modules)
        undo.callback(os.chdir, folder)
        undo.callback(_set_environment, environment)
        undo.callback(logging.disable, disabled)
        _restore_precision(undo)
        undo.enter_context(warnings.catch_warnings())
        undo.enter_context(torch.random.fork_rng(devices=[]))
        replace(undo, sys, "argv", [str(path), *arguments])
        replace(undo, sys, "path", [str(path.parent.absolute()), *sys.path])
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        os.environ.update({**ENVIRONMENT, **more})
        _silence_rich(undo)
        undo.enter_context(contextlib.redirect_stdout(io.StringIO()))
        undo.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


def _silence_rich(undo: contextlib.ExitStack) -> None:
    """Replace the console that the whole process shares: it is the command line's, and bound to its stderr."""
    rich = sys.modules.get("rich")
    if rich is not None:
        nowhere = importlib.import_module("rich.console").Console(file=io.StringIO())
        replace(undo, rich, "get_console", lambda: nowhere)


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _restore_precision(undo: contextlib.ExitStack) -> None:
    """Restore in the end what float32 products are computed in, by torch's older and newer settings."""
    backends: Any = torch.backends
    for owner in (backends, backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul):
        undo.callback(setattr, owner, "fp32_precision", owner.fp32_precision)
    with contextlib.suppress(RuntimeError):  # where this program has used the newer ones itself
        undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())


def _forget_modules_of(folder: Path, before: set[str]) -> None:
    """Forget modules from the script's folder: another script may have modules of the same names."""
    for name in _modules_of(folder, before):
        del sys.modules[name]


def _modules_of(folder: Path, before: set[str]) -> dict[str, str]:
    """Return the names and files of the modules from a folder, except for those that were there before."""
    inside = f"{folder.absolute()}{os.sep}"
    files = {name: getattr(sys.modules[name], "__file__", None) or "" for name in set(sys.modules) - before}
    return {name: file for name, file in files.items() if file.startswith(inside) and not is_of_library(file)}

"""A notebook, run as a script: its code cells in order, in one namespace, in the folder that it is in.

What is not Python is for the kernel: of that, ``%env``, ``%cd``, ``%run`` of a Python file and ``%%writefile`` do what
they say, as the cells after them need it. Everything else (``!pip install``, ``%%bash``) is passed over, and named.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.util
import inspect
import linecache
import os
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tqdm import tqdm

from lowmem_ft.foundation.notebook_cells import cell_file, read_cells
from lowmem_ft.foundation.upstream.import_hooks import when_imported, wrap_when_imported
from lowmem_ft.foundation.upstream.patches import replace

_MOST_NAMED = 6
_LONGEST_NAME = 40


class NotebookRun:
    """One run of a notebook.

    Args:
        path: its file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._cells = read_cells(path, str(path))
        self._main = ModuleType("__main__")
        self._kernel = _Kernel(vars(self._main))

    @property
    def code(self) -> str:
        """All of its code, as Python."""
        return "\n".join(cell.code for cell in self._cells)

    def apply(self, undo: contextlib.ExitStack) -> None:
        """Make this process the notebook's kernel until a stack is undone."""
        vars(self._main).update(get_ipython=lambda: self._kernel, display=_show_nothing)
        undo.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
        sys.modules["__main__"] = self._main
        undo.callback(os.chdir, os.getcwd())
        os.chdir(self._path.parent)
        for cell in self._cells:  # for tracebacks and inspect.getsource
            file, lines = cell_file(self._path, cell), [f"{line}\n" for line in cell.source.split("\n")]
            linecache.cache[file] = (len(cell.source), None, lines, file)
            undo.callback(linecache.cache.pop, file, None)
        self._provide_ipython(undo)
        undo.callback(self._kernel.forget_written)

    def run(self) -> None:
        """Run the cells; what they raise ends it."""
        for cell in self._cells:
            self._kernel.cell = cell.number
            file = cell_file(self._path, cell)
            code = compile(cell.code, file, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            result = eval(code, vars(self._main))
            if inspect.iscoroutine(result):
                asyncio.run(result)

    def passed_over(self) -> str:
        """Return what was passed over so far, and in which cells; empty: nothing."""
        names = [*dict.fromkeys(self._kernel.passed_over)]
        more = f", and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return ", ".join(names[:_MOST_NAMED]) + more

    def _provide_ipython(self, undo: contextlib.ExitStack) -> None:
        """Provide what notebooks use of IPython, which has no shell here, or is not installed, and of widgets."""
        if importlib.util.find_spec("IPython") is None:
            package, shown = ModuleType("IPython"), ModuleType("IPython.display")
            vars(shown).update(display=_show_nothing, __getattr__=_shown)
            vars(package).update(get_ipython=None, display=shown, version_info=(9, 0, 0), __version__="9.0.0")
            for module in (package, shown):
                module.__spec__ = ModuleSpec(module.__name__, None)  # which libraries look for
                sys.modules[module.__name__] = module
                undo.callback(sys.modules.pop, module.__name__, None)
        when_imported(
            undo, "IPython", lambda module: replace(undo, module, "get_ipython", lambda: self._kernel)
        )
        for name in ("tqdm_notebook", "tqdm"):
            when_imported(undo, "tqdm.notebook", lambda module, name=name: replace(undo, module, name, tqdm))
        for name in ("notebook_login", "interpreter_login"):
            wrap_when_imported(undo, "huggingface_hub._login", "", name, _show_nothing)


class _Kernel:
    """The object that a notebook gets by ``get_ipython()``.

    Args:
        namespace: the names that cells have defined.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.user_ns = namespace
        self.config: dict[str, Any] = {}
        """Empty, as in IPython's console: progress bars and consoles are those of a terminal."""
        self.cell = 0
        self.passed_over: list[str] = []
        self._written: set[str] = set()

    def system(self, command: str) -> None:
        """Pass over a command of the shell."""
        self._pass_over(f"!{command}")

    def getoutput(self, command: str, *args: Any, **kwargs: Any) -> _Output:
        """Pass over a command whose output is asked for: it has none."""
        self._pass_over(f"!{command}", ", read as no output")
        return _Output()

    def run_line_magic(self, name: str, line: str = "", *args: Any) -> Any:
        """Obey a magic that later cells may need; pass over any other."""
        words = line.split()
        do = {
            "env": self._set_variable,
            "set_env": self._set_variable,
            "cd": _change_folder,
            "run": self._run,
        }
        if words and name in do:
            done, value = do[name](line, words)
            if done:
                return value
        return self._pass_over(f"?{line}" if name == "pinfo" else f"%{name} {line}")

    def run_cell_magic(self, name: str, line: str, cell: str) -> None:
        """Write the cell into a file where it says so; else pass over it."""
        words = line.split()
        if name not in ("writefile", "file") or not words:
            self._pass_over(f"%%{name} {line}")
            return
        with open(words[-1], "a" if "-a" in words else "w", encoding="utf-8") as file:
            file.write(cell)
            place = Path(file.name).absolute()
        if place.suffix == ".py":  # where a script's files are kept, from which a later cell may import it
            self._written.add(place.stem)
            sys.path.insert(0, str(place.parent))

    def captured(self) -> Any:
        """Return what ``%%capture`` leaves: no output."""
        return SimpleNamespace(stdout="", stderr="", outputs=[], show=_show_nothing)

    def forget_written(self) -> None:
        """Forget the modules that cells have written."""
        for name in self._written:
            sys.modules.pop(name, None)

    def _set_variable(self, line: str, words: list[str]) -> tuple[bool, Any]:
        name, is_set, value = line.partition("=" if "=" in words[0] else " ")
        if is_set:
            os.environ[name.strip()] = value.strip().removeprefix("=").strip()
        return True, os.environ.get(name.strip())

    def _run(self, line: str, words: list[str]) -> tuple[bool, Any]:
        file = next((word for word in words if word.endswith(".py")), "")
        if not os.path.isfile(file):
            return False, None
        defined = runpy.run_path(file, run_name="__main__")
        self.user_ns.update((name, value) for name, value in defined.items() if not name.startswith("__"))
        return True, None

    def _pass_over(self, text: str, further: str = "") -> None:
        first, *others = text.strip().split("\n")
        is_short = len(first) <= _LONGEST_NAME and not others
        shown = first if is_short else f"{first[:_LONGEST_NAME].rstrip()} ..."
        self.passed_over.append(f"`{shown}` (cell {self.cell}{further})")


def _change_folder(line: str, words: list[str]) -> tuple[bool, Any]:
    folder = os.path.expanduser(line.strip("'\""))
    if not os.path.isdir(folder):
        return False, None
    os.chdir(folder)
    return True, None


class _Output(list[str]):
    """The lines that a command has written: none."""

    n = s = ""

    @property
    def l(self) -> _Output:  # noqa: E743
        return self


class _Shown:
    """An object of ``IPython.display``, which shows nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Show nothing again."""


def _show_nothing(*args: Any, **kwargs: Any) -> _Shown:
    return _Shown()


def _shown(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Shown

"""Notebooks, run as scripts."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from measuring.real_script import run_for_real
from user_scripts.models import write_all

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.planning.script_runs import ScriptError, estimate_script

SHARE = 0.001
OF_IMPORTS = 64
"""Bytes of tensors that libraries make as they are first imported."""

NOTEBOOKS = sorted((Path(__file__).parents[3] / "scripts" / "user_scripts" / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("user")
    write_all(path)
    for notebook in NOTEBOOKS:
        shutil.copy(notebook, path)
    return path


def without_commands(notebook: Path) -> str:
    """Its Python, as somebody copies it by hand into a script."""
    cells = json.loads(notebook.read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    text = re.sub(r"(?m)^!.*\\\n.*$|^[!?%](?!time ).*$|\?$", "", text)
    text = re.sub(r"(?m)^%time |^from IPython.*$", "", text).replace("display(Markdown(", "print((")
    text = re.sub(r"(?m)^(\s+)!.*$", r"\1pass", text)
    return re.sub(r"= !.*", "= []", text)


@pytest.mark.parametrize(
    "notebook",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem == "torch_loop" else pytest.mark.slow)
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_takes_what_its_code_takes_as_a_script_and_in_a_real_run(folder, notebook, monkeypatch):
    (folder / "same.py").write_text(without_commands(notebook))
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(folder.parent)
        found = estimate_script(f"{folder.name}/{notebook.name}", gpu="cpu")
    monkeypatch.chdir(folder)
    of_script = estimate_script("same.py", gpu="cpu")
    assert found.estimate.by_phase == pytest.approx(dict(of_script.estimate.by_phase), abs=OF_IMPORTS)
    real = run_for_real(notebook.name)
    phases = {phase: size for phase, size in found.estimate.by_phase.items() if phase != "load"}
    assert phases == pytest.approx({phase: real.by_phase[phase] for phase in phases}, rel=SHARE)
    assert "passed over: " in found.estimate.choices[0]


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """Writes cells into a notebook, in the present folder."""
    monkeypatch.chdir(tmp_path)

    def write(*cells: str) -> str:
        parts = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
        Path("train.ipynb").write_text(json.dumps({"nbformat": 4, "metadata": {}, "cells": parts}))
        return "train.ipynb"

    return write


TRAINS = """
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
while True:
    model(torch.zeros(8, 64, device="cuda")).sum().backward()
    optimizer.step()
""".strip()


def test_what_is_not_run_is_named_and_what_later_cells_need_is_done(notebook, tmp_path):
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "settings.py").write_text("WIDTH = 3")
    main, before = sys.modules["__main__"], dict(os.environ)
    found = estimate_script(
        notebook(
            "lines = !nvidia-smi\nassert lines == lines.l == [] and lines.n == ''",
            "if True:\n    !pip install trl\nelse:\n    !never",
            "%env A_NAME=some words\n%env B_NAME 2\n%matplotlib inline",
            "import os\nassert (os.environ['A_NAME'], os.environ['B_NAME']) == ('some words', '2')\nmodel?",
            "%%bash\nexit 1",
            "%cd others\n%cd nowhere\n%run settings.py\nassert WIDTH == 3 and os.path.isfile('settings.py')",
            "%%writefile written_by_a_cell.py\nNAME = 'written'",
            "from written_by_a_cell import NAME\nassert NAME == 'written'",
            "%%capture out\nprint(1)",
            "assert out.stdout == ''\n%load_ext autoreload\n%conda install x\n%pip install y",
            TRAINS,
        ),
        gpu="t4",
    )
    assert found.estimate.choices[0] == (
        "passed over: `!nvidia-smi` (cell 1, read as no output), `!pip install trl` (cell 2), `%matplotlib inline` "
        "(cell 3), `?model` (cell 4), `%%bash` (cell 5), `%cd nowhere` (cell 6), and 3 more"
    )
    assert str(found.peak.own) == "train.ipynb, cell 11, line 6"
    assert sys.modules["__main__"] is main
    assert dict(os.environ) == before
    assert Path.cwd() == tmp_path
    assert "written_by_a_cell" not in sys.modules
    assert not list(tmp_path.rglob("written_by_a_cell.py"))


def test_cells_have_what_a_kernel_gives(notebook):
    name = notebook(
        "from IPython import get_ipython as given\nfrom IPython.display import HTML, clear_output, display as show\n"
        "assert given() is get_ipython() and 'google.colab' not in str(get_ipython())\n"
        "show(HTML('x')).update(1)\ndisplay(1, display_id='a')\nclear_output(wait=True)",
        "from huggingface_hub import login, notebook_login\nfrom tqdm.notebook import tqdm, trange\n"
        "notebook_login()\nlogin()\nassert [*tqdm([1])] == [1] and [*trange(2)] == [0, 1]",
        "assert __name__ == '__main__' and '__file__' not in globals()",
        "def doubled(x):\n    return 2 * x\n\ndoubled",
        "import asyncio, inspect, pickle\nawait asyncio.sleep(0)",
        "assert 'return 2 * x' in inspect.getsource(doubled)\nassert pickle.loads(pickle.dumps(doubled)) is doubled",
        TRAINS,
    )
    found = estimate_script(name, gpu="t4")
    assert not any(choice.startswith("passed over") for choice in found.estimate.choices)


def test_an_error_names_its_cell_and_what_was_not_run_before(notebook):
    name = notebook("!pip install trl", "def divided():\n    return 1 / 0", "\ndivided()")
    with pytest.raises(ScriptError) as caught:
        estimate_script(name, gpu="t4")
    ended, passed_over = caught.value.problems
    assert (
        ended
        == "train.ipynb ended in an error before the end of its first step: ZeroDivisionError: division by zero"
    )
    assert passed_over == "passed over: `!pip install trl` (cell 1)."
    lines = caught.value.own_traceback.splitlines()
    places = [line.split("train.ipynb")[1] for line in lines if "File" in line]
    assert places == [', cell 3", line 2, in <module>', ', cell 2", line 2, in divided']
    assert "    return 1 / 0" in lines


ENDINGS = {
    "no Python": ("x = 1\nif x\n    y", "not Python in cell 2, line 2"),
    "no package": ("import no_such_package", r"needs the package no_such_package \(cell 2, line 1\)"),
    "Colab": ("from google.colab import userdata", r"google.colab \(cell 2, line 1\), which only Colab has"),
    "a refusal": (
        "!date\ninput()",
        r"gets no input.*\(at train.ipynb, cell 2, line 2\)\npassed over: `!date` \(cell 2\)",
    ),
    "no step": ("!python train.py", r"(?s)ended without an optimizer step.*passed over: `!python train.py`"),
}


@pytest.mark.parametrize("cell, words", ENDINGS.values(), ids=ENDINGS.keys())
def test_what_a_notebook_cannot_do_is_said_with_its_cell(notebook, cell, words):
    with pytest.raises(UserError, match=words):
        estimate_script(notebook("x = 1", cell), gpu="t4")


def test_a_notebook_that_handles_running_out_is_tried_with_a_limit(notebook):
    found = estimate_script(
        notebook(
            "import torch\n\ndef train(size):\n    model = torch.nn.Linear(size, size, device='cuda')\n"
            "    optimizer = torch.optim.SGD(model.parameters())\n    for _ in range(4):\n"
            "        model(torch.zeros(1, size, device='cuda')).sum().backward()\n        optimizer.step()",
            "try:\n    train(60_000)\nexcept torch.OutOfMemoryError:\n    train(64)",
        ),
        gpu="t4",
    )
    assert found.estimate.fits
    assert (
        "out of memory: once, which the script handled; answered for what it did then"
        in found.estimate.choices
    )

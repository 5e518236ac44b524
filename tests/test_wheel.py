"""The package as a wheel in an environment of its own, where there is no clone: neither scripts/ nor tests/."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from processes import LIMIT_SECONDS

pytest.importorskip("hatchling")

import torch
from release import MOST_BYTES, FailedStepError, check_contents, check_version, wheel_problems

import lowmem_ft
from lowmem_ft.recipe import load_recipe, shipped_recipes

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Runs Python with the wheel's files, and the libraries of this environment without its lowmem_ft."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    unpacked = folder / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (site_packages,) = (folder / "venv").glob("lib/python*/site-packages")
    libraries = Path(torch.__file__).parents[1]
    # Lines of a .pth file are only added to the path: an editable install among the libraries does not take part.
    (site_packages / "wheel.pth").write_text(f"{unpacked}\n{libraries}\n")
    python = folder / "venv" / "bin" / "python"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": "", "HOME": str(folder)}
        return subprocess.run(
            [str(python), *arguments],
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
            timeout=LIMIT_SECONDS,
        )

    run.wheel, run.unpacked = wheel, unpacked  # pyright: ignore[reportFunctionMemberAccess]
    return run


def test_it_is_the_wheel_that_runs(installed):
    done = installed("-c", "import lowmem_ft; print(lowmem_ft.__file__)")
    assert Path(done.stdout.strip()) == installed.unpacked / "lowmem_ft" / "__init__.py"


def test_recipes_catalogue_and_command_come_with_it(installed):
    inside = installed.unpacked / "lowmem_ft"
    assert (inside / "py.typed").is_file()
    (entry_points,) = installed.unpacked.glob("*.dist-info/entry_points.txt")
    assert "lowmem-ft = lowmem_ft.__main__:main" in entry_points.read_text()
    listed = installed("-m", "lowmem_ft", "recipes").stdout
    names = [line.split()[0] for line in listed.splitlines() if not line.startswith(" ")]
    assert names == list(shipped_recipes())
    assert "rtx-4090" in installed("-m", "lowmem_ft", "gpus").stdout
    assert (inside / "recipes" / "tiny" / "tokenizer.json").is_file()


def test_the_release_finds_every_file_in_it_and_no_other(installed):
    assert [*wheel_problems(installed.wheel)] == []


def test_the_release_names_what_a_wheel_lacks_and_what_does_not_belong_there(installed, tmp_path):
    broken = tmp_path / installed.wheel.name
    with zipfile.ZipFile(installed.wheel) as whole, zipfile.ZipFile(broken, "w") as archive:
        for name in whole.namelist():
            if name not in ("lowmem_ft/recipes/tiny.yaml", "lowmem_ft/docs/index.md"):
                archive.writestr(name, whole.read(name))
        archive.writestr("lowmem_ft/docs/estimate.svg", bytes(MOST_BYTES + 1))
        archive.writestr("tests/test_wheel.py", "")
    with pytest.raises(FailedStepError) as failure:
        check_contents(broken)
    assert str(failure.value).splitlines()[1:] == [
        "lacks lowmem_ft/docs/index.md",
        "lacks lowmem_ft/recipes/tiny.yaml",
        "has lowmem_ft/docs/estimate.svg",
        "has tests/test_wheel.py",
        f"has lowmem_ft/docs/estimate.svg, of {MOST_BYTES + 1:,} bytes",
    ]


def test_metadata_and_package_say_the_same_version(installed):
    (metadata,) = installed.unpacked.glob("*.dist-info/METADATA")
    assert f"\nVersion: {lowmem_ft.__version__}\n" in metadata.read_text(encoding="utf-8")
    assert installed("-m", "lowmem_ft", "--version").stdout == f"lowmem-ft {lowmem_ft.__version__}\n"


@pytest.mark.parametrize(
    "tag, told",
    [
        ("v9.9.9", f"The tag of version {lowmem_ft.__version__} is v{lowmem_ft.__version__}, got v9.9.9."),
        (lowmem_ft.__version__, f"got {lowmem_ft.__version__}."),
    ],
)
def test_a_tag_of_another_version_is_refused(tag, told):
    with pytest.raises(FailedStepError, match=re.escape(told)):
        check_version(tag)


def test_no_text_names_a_script_that_is_not_there(installed):
    """Not help, not recipes, not messages: what they name works from a wheel."""
    files = [
        path
        for path in (installed.unpacked / "lowmem_ft").rglob("*")
        if path.suffix in (".py", ".yaml", ".jinja")
    ]
    assert len(files) > 100
    assert [str(path) for path in files if "scripts/finetune" in path.read_text(encoding="utf-8")] == []
    assert (
        "accelerate launch --num_processes 2 -m lowmem_ft train"
        in installed("-m", "lowmem_ft", "train", "--help").stdout
    )
    shown = installed("-m", "lowmem_ft", "recipes", "tiny").stdout
    assert "accelerate launch -m lowmem_ft train recipe=FILE.yaml" in shown


def test_a_mistake_is_told(installed):
    done = installed("-m", "lowmem_ft", "train", "recipe=tiny", "data=nowhere.jsonl")
    assert (done.returncode, done.stderr.count("error: ")) == (2, 1)


@pytest.mark.slow
def test_it_trains_under_accelerate_launch_in_two_processes(installed):
    launch = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m", "lowmem_ft", "train")
    done = installed(
        *launch, "recipe=tiny", "training.max_steps=2", "data.eval_size=null", "training.eval_steps=null"
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stderr


@pytest.mark.slow
def test_it_trains(installed):
    settings = (
        "training.max_steps=1",
        "training.output_dir=run",
        "training.use_cpu=true",
        "budget.preflight=false",  # the launched run has a process that estimates
        "data.eval_size=null",
        "training.eval_steps=null",
    )
    done = installed("-m", "lowmem_ft", "train", "recipe=tiny", *settings)
    assert done.returncode == 0, done.stderr
    assert "step 1/1" in done.stderr


def test_strings_of_the_package_name_pages_that_exist_and_no_file_of_the_clone():
    """Errors and help are read where there is a wheel alone: they name commands and pages, not scripts/ and docs/."""
    of_the_clone = re.compile(r"\b(?:scripts|docs|configs|tests)/(?:\w|[. ]|$)")
    found, pages, num_strings = [], set(), 0
    for file in sorted((ROOT / "lowmem_ft").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
        documentation = {id(statement.value) for statement in statements}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in documentation
            ):
                num_strings += 1
                found += [f"{file}:{node.lineno}: {text}" for text in of_the_clone.findall(node.value)]
                pages |= {*re.findall(r"lowmem-ft docs (\w+)", node.value)}
    assert num_strings > 5_000
    assert found == []
    assert "out_of_memory" in pages
    assert [page for page in pages if not (ROOT / "docs" / f"{page}.md").is_file()] == []


def test_no_description_of_a_recipe_names_a_file_of_the_clone():
    descriptions = [load_recipe(name).description for name in shipped_recipes()]
    assert len(descriptions) > 10
    assert not [text for text in descriptions if "scripts/" in text or "docs/" in text]

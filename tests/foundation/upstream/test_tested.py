"""Which versions were tested is written once, and whoever uses another is told once."""

from __future__ import annotations

import itertools
import logging
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from lowmem_ft.foundation.upstream import tested
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.run import loop
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LISTS = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
REQUIREMENTS = map(Requirement, itertools.chain.from_iterable(LISTS))
LOWER_BOUNDS = {requirement.name: str(requirement.specifier) for requirement in REQUIREMENTS}


@pytest.fixture
def versions(monkeypatch):
    """Lets libraries be there in other versions than they are."""
    installed = {}
    monkeypatch.setattr(tested, "_warned", set())
    real = tested.installed_version
    monkeypatch.setattr(tested, "installed_version", lambda name: installed.get(name) or real(name))
    return installed


@pytest.mark.parametrize("library", tested.TESTED)
def test_a_range_begins_at_the_lower_bound_and_has_the_pinned_versions(library):
    first, _ = tested.TESTED[library]
    package = library.replace("_", "-")
    assert LOWER_BOUNDS[package] == f">={first}"
    pins = re.findall(rf"^{package}==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pins
    assert all(tested._is_tested(library, pin) for pin in pins)


@pytest.mark.parametrize(
    "version, expected",
    [
        ("2.10.3", False),
        ("2.11.0", True),
        ("2.13.0+cpu", True),
        ("2.15.9", True),
        ("2.16.0", False),
        ("2.16.0.dev20261101+cu130", False),
        ("3.0.0", False),
        ("0+unknown", False),
        ("a checkout", False),
    ],
)
def test_patch_releases_are_in(version, expected):
    assert tested._is_tested("torch", version) is expected


@pytest.mark.parametrize("library", tested.TESTED)
def test_what_is_advised_is_the_tested_range(library):
    advised = Requirement(tested.install_tested(library)).specifier
    first, last = map(Version, tested.TESTED[library])
    assert first in advised
    assert last in advised
    assert f"{last}.7" in advised
    assert f"{last.major}.{last.minor + 1}" not in advised


def test_an_estimate_with_another_version_warns_once(versions, caplog):
    versions |= {"torch": "2.16.0", "transformers": "6.0.0"}
    with caplog.at_level(logging.WARNING, "lowmem_ft"):
        for _ in range(2):
            with TracingMachine():
                pass
    (record,) = caplog.records
    for part in ("torch 2.16.0", "torch 2.11 to 2.15", "transformers 6.0.0", "transformers 5.17 to 5.24"):
        assert part in record.getMessage()


def test_training_with_another_version_warns_before_anything_fails(versions, caplog, monkeypatch):
    def fail(*args):
        raise RuntimeError("as an untested version may")

    monkeypatch.setattr(loop.TrainingRun, "build", fail)
    versions["accelerate"] = "2.0.0"
    with pytest.raises(RuntimeError):
        loop.train(load_recipe("tiny", ["training.use_cpu=true"]))
    assert "accelerate 2.0.0 (tested: accelerate 1.10 to 1.15)" in caplog.text


def test_tested_versions_and_libraries_that_nobody_imported_are_not_mentioned(versions, caplog, monkeypatch):
    versions |= {"torch": "2.15.0", "peft": "0.99.0"}
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    tested.warn_if_untested()
    assert not caplog.records


@pytest.mark.parametrize(
    "installed, is_older",
    [("1.14.2", True), ("1.16.0", False), ("2.0.0.dev1", False), ("unknown", False), (None, False)],
)
def test_a_release_older_than_a_version_is_told(installed, is_older, monkeypatch):
    monkeypatch.setattr(tested, "installed_version", lambda library: installed)
    assert tested.is_before("trl", (1, 16)) is is_older

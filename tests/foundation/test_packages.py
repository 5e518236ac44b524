"""What a machine has is found as the library itself would find it."""

from __future__ import annotations

import os
import subprocess
import sysconfig

import pytest

from lowmem_ft.foundation import packages
from lowmem_ft.foundation.packages import triton_lacks


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """A machine with Triton and Python's headers, and no programs but those that are made here."""
    monkeypatch.setattr(packages, "is_installed", lambda package: package == "triton")
    headers = tmp_path / "include"
    headers.mkdir()
    (headers / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(headers)})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)

    def make(*names):
        for name in names:
            (tmp_path / name).touch(mode=0o755)

    return make


@pytest.mark.parametrize("made", [["gcc"], ["clang"], ["gcc", "clang"]])
def test_triton_takes_gcc_or_clang(programs, made):
    programs(*made)
    assert triton_lacks() is None


def test_without_a_compiler_the_way_to_one_is_told(programs):
    programs("python3", "cc")  # a name that Triton does not ask for
    assert triton_lacks() == (
        "Triton needs a C compiler, and none is installed. `apt-get install gcc` installs one."
    )


def test_a_compiler_that_is_named_is_the_one(programs, monkeypatch, tmp_path):
    programs("gcc", "mine")
    for name in ("mine", str(tmp_path / "mine")):
        monkeypatch.setenv("CC", name)
        assert triton_lacks() is None
    monkeypatch.setenv("CC", "ccache gcc")  # Triton takes it for one program
    assert "CC=ccache gcc is not one. Unset CC" in str(triton_lacks())


def test_without_pythons_headers_it_compiles_nothing(programs, tmp_path):
    programs("gcc")
    (tmp_path / "include" / "Python.h").unlink()
    assert "`apt-get install python3-dev`" in str(triton_lacks())


def test_what_is_not_installed_is_told_first(programs, monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda package: False)
    assert "pip install triton" in str(triton_lacks())


@pytest.mark.parametrize("made", [[], ["gcc"], ["clang"]])
@pytest.mark.parametrize("compiler", [None, "mine", "clang"])
def test_triton_itself_finds_a_compiler_exactly_then(programs, monkeypatch, tmp_path, made, compiler):
    build = pytest.importorskip("triton.runtime.build", reason="there is no Triton for this system")

    def check_call(command, **options):
        if not os.access(os.path.join(tmp_path, command[0]), os.X_OK):
            raise FileNotFoundError(command[0])

    programs(*made)
    if compiler is not None:
        monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(subprocess, "check_call", check_call)
    if find := getattr(build, "_find_compiler", None):  # from Triton 3.8 on it looks once
        find.cache_clear()
    lacks = triton_lacks()
    if lacks is None:
        build._build("launcher", "launcher.c", str(tmp_path), [], [], [], [])
    else:
        with pytest.raises((RuntimeError, FileNotFoundError)):
            build._build("launcher", "launcher.c", str(tmp_path), [], [], [], [])

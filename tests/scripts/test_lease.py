"""A lease of a GPU: its time, its rows, what it lacks; here at tiny sizes, on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
import zipfile
from pathlib import Path

import lease
import measured_on
import psutil
import pytest
import torch
from lease import ITEMS, Item, Lease, rows_of
from lease_items import parts
from lease_items.parts import Part, Setting, measure

from lowmem_ft import VirtualGPU

SCRIPT = Path(lease.__file__)
FACTS = {"device", "date", "gpu", "driver", "host", "versions", "commit"}

BLOCKED = """
import os, sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in os.environ["WITHOUT"].split(","):
            return PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
"""A sitecustomize: packages named in a variable are not installed."""


def item(name, program, cap=60, **options):
    """Write an item that is a program, which may ``tell`` rows."""
    tells = "import json, os, sys, time\ntell = lambda **row: os.write(int(os.environ['LEASE_ROWS_FD']), "
    tells += "json.dumps(row).encode() + b'\\n')\n"
    return Item(name=name, decides="", cap=cap, needs=(), command=("-c", tells + program), **options)


MEASURES = "tell(part='a', outcome='measured', numbers={'x_seconds': 1})"


def ends(out):
    """How each item ended."""
    return {row["item"]: row["outcome"] for row in rows_of(out / "rows.jsonl") if row["part"] is None}


def outcomes(out, of):
    return [
        (row["part"], row["outcome"])
        for row in rows_of(out / "rows.jsonl")
        if row["item"] == of and row["part"]
    ]


@pytest.fixture
def without(tmp_path, monkeypatch):
    """Takes packages from every process that starts."""

    def take(*packages):
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(BLOCKED)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
        monkeypatch.setenv("WITHOUT", ",".join(packages))

    return take


def tiny(out, *arguments):
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--minutes", "60", "--out", str(out)]
    command += arguments
    return subprocess.run(command, capture_output=True, text=True)


def test_a_tiny_lease_measures_without_datasets_and_goes_on_where_it_ended(tmp_path, without):
    without("datasets", "pyarrow", "pandas")
    done = tiny(tmp_path / "out", "--only", "products", "our-steps")
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "out" / "rows.jsonl")
    assert ends(tmp_path / "out") == {"products": "done", "our-steps": "missing"}
    (asked,) = (row["numbers"] for row in rows if row["item"] == "lease")
    assert (asked["datasets"], asked["pyarrow"], asked["pytest"]) == (False, False, True)
    (missing,) = (row for row in rows if row["outcome"] == "missing")
    assert missing["why"] == "not installed: datasets, pyarrow"
    assert all(set(row) >= FACTS for row in rows)
    first = next(row for row in rows if row["item"] == "products")
    assert first["settings"] == {"rows": 1, "row_tokens": 64, "data": "random"}
    assert first["numbers"]["tflop_per_second"] > 0
    assert first["sm_clock_mhz_mean"] is None or first["gpu"]
    assert {*first["host"]} == {"processor", "cores", "kernel", "sandbox", "python"}
    assert first["versions"]["torch"] == torch.__version__

    tiny(tmp_path / "out", "--only", "products")
    assert [row["item"] for row in rows_of(tmp_path / "out" / "rows.jsonl")[len(rows) :]] == ["lease"]


@pytest.mark.slow
def test_everything_that_a_cpu_can_run_is_measured(tmp_path):
    done = tiny(tmp_path / "out")
    assert done.returncode == 0, done.stdout
    on_cpu = {one.name for one in ITEMS if one.on_cpu}
    assert ends(tmp_path / "out") == dict.fromkeys(on_cpu, "done")


@pytest.mark.slow
def test_layers_and_kernels_need_no_datasets(tmp_path, without):
    without("datasets", "pyarrow", "pandas", "trl", "omegaconf")
    tiny(tmp_path / "out", "--only", "kernels", "host", "layer")
    assert ends(tmp_path / "out") == {"kernels": "done", "host": "done", "layer": "done"}


def test_what_hangs_is_killed_with_its_children_and_the_next_item_runs(tmp_path):
    hangs = MEASURES + "\nimport subprocess\n"
    hangs += "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    hangs += "tell(part='child', outcome='measured', numbers={'pid': child.pid})\ntell(begins='b')\ntime.sleep(600)"
    found = Lease(tmp_path, 60, "cpu").run([item("hangs", hangs, cap=10), item("next", MEASURES)])
    assert found == 1
    assert ends(tmp_path) == {"hangs": "killed", "next": "done"}
    assert outcomes(tmp_path, "hangs") == [("a", "measured"), ("child", "measured"), ("b", "killed")]
    (pid,) = (row["numbers"]["pid"] for row in rows_of(tmp_path / "rows.jsonl") if row["part"] == "child")
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_what_fails_says_its_last_line_and_the_next_item_runs(tmp_path):
    fails = MEASURES + "\nprint('before')\nsys.exit('no such kernel')"
    assert Lease(tmp_path, 60, "cpu").run([item("fails", fails), item("next", MEASURES)]) == 1
    rows = rows_of(tmp_path / "rows.jsonl")
    assert ends(tmp_path) == {"fails": "failed", "next": "done"}
    assert [row["why"] for row in rows if row["outcome"] == "failed"] == ["exit code 1: no such kernel"]
    assert "before" in (tmp_path / "lease.log").read_text()


def test_an_item_begins_only_if_its_least_seconds_are_left(tmp_path):
    items = [item("long", "time.sleep(600)", least=50), item("short", MEASURES, least=1)]
    Lease(tmp_path, 40, "cpu").run(items)
    assert ends(tmp_path) == {"long": "no time", "short": "done"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_lease_that_is_cut_off_keeps_its_rows(number, tmp_path):
    cut = MEASURES + "\ntell(part=os.getpid(), outcome='measured')\ntime.sleep(600)"
    items = [(one.name, one.command) for one in (item("first", MEASURES), item("cut", cut))]
    program = f"""
import lease, pathlib
items = [lease.Item(name=name, decides="", cap=60, needs=(), command=command) for name, command in {items!r}]
with lease.ended_by_signals():
    lease.Lease(pathlib.Path({str(tmp_path)!r}), 600, "cpu").run(items)
"""
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent)}
    running = subprocess.Popen([sys.executable, "-c", program], env=environment)
    begin = time.monotonic()
    while len(outcomes(tmp_path, "cut")) < 2:
        assert running.poll() is None
        assert time.monotonic() - begin < 300
        time.sleep(0.05)
    running.send_signal(number)
    running.wait()
    (_, _), (pid, _) = outcomes(tmp_path, "cut")
    if number == signal.SIGTERM:  # of the other nobody can tell its children
        assert not psutil.pid_exists(pid)
    elif psutil.pid_exists(pid):
        os.kill(pid, signal.SIGKILL)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"item": "cut", "part": "half a r')

    Lease(tmp_path, 60, "cpu").run([item("first", MEASURES), item("cut", MEASURES)])
    assert len(outcomes(tmp_path, "first")) == 1
    assert outcomes(tmp_path, "cut") == [("a", "measured"), (pid, "measured"), ("a", "measured")]


def test_parts_fail_alone_and_those_that_were_measured_are_not_again():
    ran, told = [], []

    def part(name, **options):
        def run():
            ran.append(name)
            if name == "bad":
                raise ValueError("no such type")
            return {"seconds": 1}

        return Part(name=name, run=run, **{"seconds": 1, **options})

    offered = [part("killed"), part("there"), part("bad"), part("long", seconds=99)]
    offered += [part("lacking", needs=("no_such_package",)), part("good")]
    setting = Setting(device="cuda", tiny=True, seconds=60)
    measure(offered, setting, told.append, measured={"there"}, killed={"killed"})
    assert ran == ["bad", "good", "killed"]
    rows = {row["part"]: row for row in told if "part" in row}
    found = {name: row["outcome"] for name, row in rows.items()}
    assert found == {
        "bad": "failed",
        "long": "no time",
        "lacking": "missing",
        "good": "measured",
        "killed": "measured",
    }
    assert rows["bad"]["why"] == "ValueError: no such type"
    assert rows["lacking"]["why"] == "not installed: no_such_package"
    measure([part("gpu", needs_cuda=True)], Setting(device="cpu", tiny=True, seconds=60), told.append)
    assert told[-1]["outcome"] == "left out"


def test_tests_of_the_ladder_come_first_and_go_on_behind_a_failure(tmp_path):
    pytest_file = tmp_path / "test_some.py"
    pytest_file.write_text(
        "def test_other(): pass\ndef test_each_rung(): assert 1 == 2\ndef test_a_late_copy(): pass\n"
    )
    done = tiny(tmp_path / "out", "--only", "tests", "--tests", str(pytest_file))
    assert done.returncode == 1
    found = [(part.rpartition("::")[2], outcome) for part, outcome in outcomes(tmp_path / "out", "tests")]
    assert found == [
        ("test_each_rung", "failed"),
        ("test_a_late_copy", "measured"),
        ("test_other", "measured"),
    ]
    assert ends(tmp_path / "out")["tests"] == "done"
    (why,) = (row["why"] for row in rows_of(tmp_path / "out" / "rows.jsonl") if row["outcome"] == "failed")
    assert "assert 1 == 2" in why


@pytest.mark.parametrize(
    "module", ["products", "kernels", "host", pytest.param("layer", marks=pytest.mark.slow)]
)
def test_what_only_a_gpu_runs_is_run_on_a_virtual_one(module, monkeypatch):
    """Each call is one that CUDA takes; seconds there are nobody's."""
    lease_module = __import__(f"lease_items.{module}", fromlist=["parts"])

    def timed(calls, device, *, repeats=1):
        assert device == "cuda"
        for call in calls[:2]:
            call()
        return parts.Times(1.0, 1.0)

    monkeypatch.setattr(lease_module, "timed", timed, raising=False)
    monkeypatch.setattr(lease_module, "CHAIN", 2, raising=False)
    monkeypatch.setattr("calibrate.rates.timed", timed)
    monkeypatch.setattr(
        lease_module, "recorded", lambda run: {}, raising=False
    )  # torch's profiler sees no GPU
    monkeypatch.setattr(parts, "NOT_IN_CACHE_BYTES", 1)
    with VirtualGPU("h200"):
        for part in lease_module.parts(Setting(device="cuda", tiny=True, seconds=60)):
            if "liger" not in part.name and all(parts.importlib.util.find_spec(name) for name in part.needs):
                assert part.run(), part.name


# --- what the rows depend on ------------------------------------------------------------------------------------------


class Nvml(types.ModuleType):
    """A driver whose clock rises with each look."""

    NVML_CLOCK_SM = 1
    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self):
        super().__init__("pynvml")
        self.clock = 1000

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA H200"

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlDeviceGetClockInfo(self, handle, kind):
        self.clock += 100
        return self.clock

    def nvmlDeviceGetPowerUsage(self, handle):
        return 512_000


def test_clock_and_power_are_means_since_the_last_row(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    meter = measured_on.GpuMeter()  # looks once, to see whether it may
    assert (meter.gpu_name, meter.driver) == ("NVIDIA H200", "580.1")
    meter.look()
    assert meter.means() == {"sm_clock_mhz_mean": 1250, "power_watts_mean": 512}
    assert meter.means() == {"sm_clock_mhz_mean": 1400, "power_watts_mean": 512}


def test_without_nvml_nvidia_smi_prints_them(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\ncase \"$*\" in *name*) echo 'NVIDIA H100, 570.2';; *) echo '1700, 400.0'; echo '[N/A], 1'; "
        "echo '1900, 500.0'; exec sleep 60;; esac\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    meter = measured_on.GpuMeter()
    try:
        assert (meter.gpu_name, meter.driver) == ("NVIDIA H100", "570.2")
        while len(meter._seen) < 2:
            meter.look()
            time.sleep(0.01)
        assert meter.means() == {"sm_clock_mhz_mean": 1800, "power_watts_mean": 450}
        assert meter.means() == {"sm_clock_mhz_mean": None, "power_watts_mean": None}
    finally:
        meter.close()


# --- what is carried --------------------------------------------------------------------------------------------------


def wheel(folder, name):
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nVersion: 1.0\n\nText\n")
        file.writestr(f"{name}.py", "VALUE = 1\n")


def test_packed_wheels_are_there_for_items_and_installed_nowhere(tmp_path):
    (tmp_path / "wheels").mkdir()
    wheel(tmp_path / "wheels", "carried_here")
    asks = item(
        "asks", "import carried_here\ntell(part='a', outcome='measured', numbers={'v': carried_here.VALUE})"
    )
    with lease.packages_of(tmp_path / "wheels"):
        lack = Lease(tmp_path / "out", 60, "cpu")
        assert lack.run([asks]) == 0
    assert lease._is_there("carried_here") is False
    rows = rows_of(tmp_path / "out" / "rows.jsonl")
    assert [row["numbers"] for row in rows if row["item"] == "asks" and row["part"]] == [{"v": 1}]
    assert json.loads((tmp_path / "out" / "rows.jsonl").read_text().splitlines()[0])["item"] == "lease"

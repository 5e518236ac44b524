"""A GPU that is lent for minutes: measure what would change a decision, the most important first.

    python scripts/lease.py --minutes 8 --out DIR [--packed WHEELS] [--only ITEM ...]
    python scripts/lease.py --minutes 2 --out DIR           # a shorter list
    python scripts/lease.py --list --minutes 8
    python scripts/lease.py --pack WHEELS                   # before, where a package index can be reached

Each item runs in a process of its own, which is ended with all that it started when its seconds are over. None is
begun that could not end in the time that is left. A row is in ``DIR/rows.jsonl`` as soon as it is measured, so that a
lease that is cut off keeps what it has, and what items print is in ``DIR/lease.log``. A second start with the same
folder continues where the first one ended.

A row has its item and part, what tells its numbers from others (``settings``), numbers with their units, and what they
depend on: GPU, driver, processor, kernel, sandbox, Python, versions, commit, and the mean clock and power while it was
measured. Nothing is asked of a network, weights are random. A package that is missing costs the parts that need it
alone; a row says which. ``--pack`` collects those that a machine with torch, transformers, accelerate and peft may
lack, as wheels to carry there, for Python 3.12 and Linux on x86-64; ``--packed`` uses them there, and installs nothing.

Nothing reads the rows by itself. Of rates (``products``, ``kernels``) the clock's are in
``lowmem_ft/foundation/catalog/clock_rates.json``; seconds of steps belong to ``tests/data/measured/speed-cuda.json``,
from which ``bench speed --write-measured`` writes the table of ``docs/benchmarks.md``; the host's seconds are in
``clock_rates.json`` (``operator_seconds``) and, in operators, in ``lowmem_ft/virtual_gpu/upstream/host_python.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import parser_of
from measured_on import GpuMeter, host_facts, installed_versions, require_device

ROOT = Path(__file__).resolve().parents[1]

Row = dict[str, Any]

ASKED = (
    "pyarrow",
    "pandas",
    "pytest",
    "datasets",
    "omegaconf",
    "peft",
    "trl",
    "bitsandbytes",
    "liger_kernel",
    "triton",
)
"""Packages that a lease first asks for, by the names that they are imported by."""

_ROWS_FD = "LEASE_ROWS_FD"
"""Variable with the number of the pipe that a process of an item writes its rows to."""

_ENDING_SECONDS = 3
"""Seconds of a lease that are kept for ending a process and writing its row."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A group of measurements in one process.

    Args:
        name: the item's name.
        decides: what its numbers decide.
        cap: most seconds.
        short_cap: likewise in a lease of less than four minutes.
        least: seconds without which it is not begun.
        from_minutes: length of a lease that has it on its list.
        measures: module of ``lease_items``, and its function: it yields parts or, where it ``continues``, runs them.
        command: a program in place of that; ``{out}`` is the lease's folder.
        needs: packages without which it is not begun, by the names that they are imported by.
        on_cpu: whether a CPU can run it, at tiny sizes.
        continues: whether it ends at its first failure, and continues behind that when it is started again.
    """

    name: str
    decides: str
    cap: float
    short_cap: float | None = None
    least: float = 10
    from_minutes: float = 0
    measures: str = ""
    command: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("torch",)
    on_cpu: bool = True
    continues: bool = False


SHORT_MINUTES = 4
"""Below them a lease has time for rates and a layer alone."""

ALL_OF_OURS = ("torch", "transformers", "datasets", "pyarrow", "omegaconf")
PEERS = (*ALL_OF_OURS, "trl", "peft", "bitsandbytes", "liger_kernel")

ITEMS = (
    Item(
        name="products",
        decides="whether runs on constant tokens were too fast, and the clock's share for products",
        cap=25,
        measures="products:parts",
    ),
    Item(
        name="kernels",
        decides="the clock's bandwidth for each kind of kernel; the tile of our update; documents in attention",
        cap=50,
        short_cap=30,
        measures="kernels:parts",
    ),
    Item(
        name="host",
        decides="whether a slow step is the host's, and by how much hosts differ",
        cap=15,
        from_minutes=SHORT_MINUTES,
        measures="host:parts",
    ),
    Item(
        name="peer-steps",
        decides="what ours has to beat: the Trainer at its best on equal rows",
        cap=100,
        least=45,
        from_minutes=6,
        measures="steps:of_peer",
        needs=PEERS,
    ),
    Item(
        name="our-steps",
        decides="the published ratio, and whether one row a micro-batch or two is faster",
        cap=100,
        least=45,
        from_minutes=6,
        measures="steps:of_ours",
        needs=PEERS,
    ),
    Item(
        name="layer",
        decides="whether layers are to be compiled",
        cap=90,
        least=15,
        measures="layer:parts",
        needs=("torch", "transformers"),
    ),
    Item(
        name="tests",
        decides="whether what passes on the virtual GPU passes on this one: races, memory, kernels",
        cap=3600,
        least=20,
        from_minutes=SHORT_MINUTES,
        measures="gpu_tests:run",
        needs=(*ALL_OF_OURS, "pytest", "hypothesis"),
        on_cpu=False,
        continues=True,
    ),
    *(
        Item(name=name, decides=decides, cap=3600, least=60, from_minutes=45, command=command, on_cpu=False)
        for name, decides, command in (
            (
                "memory",
                "the ranges of estimates (its rows go to tests/data/measured/measured-cuda.json)",
                (
                    "scripts/measure_memory.py",
                    "--device",
                    "cuda",
                    "--only-measure",
                    "--out",
                    "{out}/memory.json",
                ),
            ),
            (
                "ladder",
                "seconds of each rung of the memory ladder",
                (
                    *("scripts/bench", "ladder", "--device", "cuda", "--model", "llama-3.2-1b"),
                    *("--budgets", "24GiB", "8GiB", "4GiB", "--steps", "6"),
                ),
            ),
            ("step", "a step next to the stock Trainer's", ("scripts/bench", "step", "--device", "cuda")),
        )
    ),
)
"""In the order in which they are measured."""


def main() -> int:
    """Measure, or list, or pack; exit code 1 if any item did not end well."""
    parser = parser_of(__doc__)
    names = [item.name for item in ITEMS]
    parser.add_argument("--minutes", type=float, default=8.0, help="length of the lease (default: 8)")
    parser.add_argument("--out", type=Path, default=Path("runs/lease"), help="folder of rows and log")
    parser.add_argument("--only", nargs="+", choices=names, metavar="ITEM", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--list", action="store_true", help="print the items of such a lease, and measure nothing"
    )
    parser.add_argument(
        "--packed", type=Path, metavar="WHEELS", help="folder of wheels to use, as --pack made it"
    )
    parser.add_argument(
        "--pack", type=Path, metavar="WHEELS", help="collect wheels to carry, and measure nothing"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="sizes that a CPU runs at once, without caps; they measure nothing",
    )
    parser.add_argument("--commit", help="the code's, where git does not know it")
    parser.add_argument("--in-this-process", nargs=2, metavar=("ITEM", "ENDS"), help=argparse.SUPPRESS)
    parser.add_argument("--tests", nargs="+", default=[], help=argparse.SUPPRESS)
    given, begin = parser.parse_args(), time.monotonic()
    if given.device == "cpu" and not given.tiny:
        parser.error("--device cpu needs --tiny: a CPU would take days for the sizes of a GPU.")
    if given.pack is not None:
        from lease_items.wheels import pack

        return pack(given.pack)
    if given.in_this_process:
        name, ends = given.in_this_process
        measure_here(next(item for item in ITEMS if item.name == name), float(ends), given)
        return 0
    items = [item for item in ITEMS if item.name in given.only] if given.only else list_of(given.minutes)
    items = [item for item in items if item.on_cpu or given.device == "cuda" or given.tests]
    if given.tiny:  # tried on any machine, however busy
        items = [dataclasses.replace(item, cap=3600) for item in items]
    if given.list:
        for item in items:
            print(f"{item.name:11} up to {item.cap:4.0f} s  {item.decides}")
        return 0
    options = ["--device", given.device, *(["--tiny"] if given.tiny else [])]
    options += ["--tests", *given.tests] if given.tests else []
    with packages_of(given.packed), ended_by_signals():
        if lacks := [name for name in ("torch", "psutil") if not _is_there(name)]:
            sys.exit(
                f"A lease needs {' and '.join(lacks)}, which {sys.executable} does not have. Name another Python."
            )
        require_device(given.device)
        seconds = given.minutes * 60 - (time.monotonic() - begin)  # importing torch takes some, unpacking too
        lease = Lease(given.out, seconds, given.device, options=options, commit=given.commit)
        return lease.run(items)


def list_of(minutes: float) -> list[Item]:
    """Return the items of a lease of so many minutes."""
    items = [item for item in ITEMS if item.from_minutes <= minutes]
    if minutes >= SHORT_MINUTES:
        return items
    return [dataclasses.replace(item, cap=item.short_cap or item.cap) for item in items]


# --- the lease: processes, time, rows ---------------------------------------------------------------------------------


class Lease:
    """Runs items one after the other while there is time, and keeps each row.

    Args:
        out: the folder of rows and log.
        seconds: length of the lease, from now on.
        device: ``cuda`` or ``cpu``.
        options: further options of the processes of items.
        commit: of the code; None: git is asked.
    """

    def __init__(
        self,
        out: Path,
        seconds: float,
        device: str,
        *,
        options: Sequence[str] = (),
        commit: str | None = None,
    ) -> None:
        self._ends = time.monotonic() + seconds
        self._out, self._device, self._options = out, device, options
        out.mkdir(parents=True, exist_ok=True)
        self._file = out / "rows.jsonl"
        self._rows = rows_of(self._file)
        self._meter = GpuMeter()
        self._facts: Row = {
            "gpu": self._meter.gpu_name,
            "driver": self._meter.driver,
            "host": host_facts(),
            "versions": installed_versions(),
            "commit": commit or _commit(),
        }

    def run(self, items: Sequence[Item]) -> int:
        """Run items; return 1 if anything failed or was killed, else 0."""
        there = {name: _is_there(name) for name in ASKED}
        self._keep({"item": "lease", "part": "packages", "outcome": "measured", "numbers": there})
        first = len(self._rows)
        try:
            for item in items:
                if self._has(item):
                    print(f"{item.name}: {self._file} has it already", flush=True)
                    continue
                end = self._run(item)
                while end == "incomplete" and item.continues:
                    end = self._run(item)
        finally:
            self._meter.close()
        return int(any(row["outcome"] in ("failed", "killed") for row in self._rows[first:]))

    def _has(self, item: Item) -> bool:
        """Return whether the file has all of an item."""
        return any(row["item"] == item.name and row.get("outcome") == "done" for row in self._rows)

    def _run(self, item: Item) -> str:
        """Run an item; return how it ended."""
        begin = time.monotonic()
        left = self._ends - begin - _ENDING_SECONDS
        missing = [name for name in item.needs if not _is_there(name)]
        seconds = min(item.cap, left)
        why = ""
        if missing:
            end, why = "missing", f"not installed: {', '.join(missing)}"
        elif left < item.least:
            end, why = "no time", f"it needs {item.least:.0f} s, {max(left, 0):.0f} are left"
        else:
            print(f"{item.name}: up to {seconds:.0f} s", flush=True)
            self._meter.means()  # of this item, not of what was before
            end, why = self._measure(item, seconds)
        row = {"item": item.name, "part": None, "outcome": end, **({"why": why} if why else {})}
        self._keep(row | {"seconds": round(time.monotonic() - begin, 1)} | self._meter.means())
        print(f"{item.name}: {end}{f', {why}' if why else ''}, {time.monotonic() - begin:.0f} s", flush=True)
        return end

    def _measure(self, item: Item, seconds: float) -> tuple[str, str]:
        """Run an item's process, keep its rows, and end it when its seconds are over."""
        reads, writes = os.pipe()
        log = (self._out / "lease.log").open("ab")
        log.write(f"=== {item.name}, {datetime.datetime.now().isoformat(timespec='seconds')}\n".encode())
        log.flush()
        process = subprocess.Popen(
            self._command(item, seconds),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(writes,),
            env=self._environment(writes),
            start_new_session=True,
        )
        os.close(writes)
        running, well = "", True
        ends = time.monotonic() + seconds
        try:
            for message in self._messages(reads, process, ends):
                running = message.pop("begins", running)
                if message:
                    running = ""
                    row = {"item": item.name, **message}
                    well = well and row["outcome"] in ("measured", "left out")
                    self._keep(row | self._meter.means())
            if process.poll() is None:
                if running:
                    killed = {"item": item.name, "part": running, "outcome": "killed"}
                    self._keep(killed | self._meter.means())
                return "killed", f"its {seconds:.0f} s were over{f', in {running}' if running else ''}"
            if process.returncode:
                return "failed", f"exit code {process.returncode}: {_last_line(self._out / 'lease.log')}"
            return ("done", "") if well else ("incomplete", "")
        finally:
            end_with_children(process)
            os.close(reads)
            log.close()

    def _messages(self, reads: int, process: subprocess.Popen[bytes], ends: float) -> Iterator[Row]:
        """Yield what an item's process writes until it, or its time, ends; and look at the meter meanwhile."""
        unread, is_open = b"", True
        while True:
            is_last = process.poll() is not None or time.monotonic() >= ends  # then what is there is read
            wait = 0 if is_last else min(0.1, max(ends - time.monotonic(), 0))
            ready, _, _ = select.select([reads] if is_open else [], [], [], wait)
            self._meter.look()
            if ready:
                more = os.read(reads, 1 << 20)
                is_open = bool(more)
                *lines, unread = (unread + more).split(b"\n")
                yield from (json.loads(line) for line in lines)
            if is_last and (not ready or time.monotonic() >= ends):
                return

    def _command(self, item: Item, seconds: float) -> list[str]:
        if item.command:
            out = str(self._out.resolve())
            return [sys.executable, *(word.replace("{out}", out) for word in item.command)]
        here = ["--in-this-process", item.name, str(time.time() + seconds), "--out", str(self._out.resolve())]
        return [sys.executable, __file__, *here, *self._options]

    def _environment(self, writes: int) -> dict[str, str]:
        paths = [str(ROOT), str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", _ROWS_FD: str(writes)}
        return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(paths)}

    def _keep(self, row: Row) -> None:
        """Append a row, so that it is on disk when this returns."""
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        row = {**row, "device": self._device, "date": now, **self._facts}
        self._rows.append(row)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def measure_here(item: Item, ends: float, given: argparse.Namespace) -> None:
    """Measure an item's parts in this process, and write a row of each for the lease to keep.

    Args:
        item: the item.
        ends: when its time is over, as ``time.time()`` counts.
        given: the command's options.
    """
    rows = [row for row in rows_of(given.out / "rows.jsonl") if row["item"] == item.name and row["part"]]
    pipe = int(os.environ[_ROWS_FD])

    def tell(message: Row) -> None:
        os.write(pipe, json.dumps(message).encode() + b"\n")

    module, _, function = item.measures.partition(":")
    measured = getattr(importlib.import_module(f"lease_items.{module}"), function)
    if item.continues:
        measured(tell, {row["part"] for row in rows}, given.tests)
        return
    from lease_items.parts import Setting, measure

    setting = Setting(device=given.device, tiny=given.tiny, seconds=ends - time.time())
    of = {
        outcome: {row["part"] for row in rows if row["outcome"] == outcome}
        for outcome in ("measured", "killed")
    }
    measure(measured(setting), setting, tell, measured=of["measured"], killed=of["killed"])


def rows_of(file: Path) -> list[Row]:
    """Return a file's rows; a last one that was cut off is left out, and its line ended."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        file.write_text("".join(lines), encoding="utf-8")
    return [json.loads(line) for line in lines]


def end_with_children(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started, also what has left its group."""
    import psutil

    try:
        started = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
    for one in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let a signal that ends this process unwind it, so that none of its children stays."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def packages_of(wheels: Path | None) -> Iterator[None]:
    """Let this process, and those it starts, import from a folder of wheels; what is installed comes after it."""
    if wheels is None:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as file:
                file.extractall(folder)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, before]))
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(folder)
            os.environ["PYTHONPATH"] = before or ""


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _commit() -> str | None:
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # a copy without its history
        return None


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


if __name__ == "__main__":
    sys.exit(main())

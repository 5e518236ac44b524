"""Wheels to carry to a machine that reaches no package index: what a lent machine with torch and transformers lacks."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"

CARRIED = ("omegaconf", "datasets", "dill", "multiprocess", "liger-kernel", "trl", "bitsandbytes")
"""Packages to carry, what most items need first; the versions are the tested ones."""

MOST_BYTES = 64 * 2**20
"""Most bytes that can be carried, the project's own files included."""

PYTHON = "3.12"

_PLATFORMS = tuple(f"manylinux_2_{number}_x86_64" for number in range(17, 40))
"""pip compares them by name: a wheel for glibc 2.24 is not found under 2.28."""


def pack(folder: Path) -> int:
    """Download the wheels, and print their sizes, and which packages they need there.

    Returns:
        1 if they are too large to carry, else 0.

    Raises:
        subprocess.CalledProcessError: if pip finds one of them nowhere; it says so itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):  # two versions of a package would be unpacked over each other
        wheel.unlink()
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    options = (
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        PYTHON,
        "--implementation",
        "cp",
    )
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", *options, *platforms),
            *("--constraint", str(CONSTRAINTS), "--dest", str(folder), *CARRIED),
        ],
        check=True,
    )
    wheels = sorted(folder.glob("*.whl"), key=lambda wheel: wheel.stat().st_size, reverse=True)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:6.1f} MiB  {wheel.name}")
    carried = {wheel.name.partition("-")[0].replace("_", "-") for wheel in wheels}
    needed = sorted({name for wheel in wheels for name in needs_of(wheel)} - carried)
    print(f"They need there: {', '.join(needed)}.")
    return told_size(folder)


def told_size(folder: Path) -> int:
    """Print whether a folder's wheels can be carried together with the project's files; return 1 if not, else 0."""
    wheels = sorted(folder.glob("*.whl"), key=lambda wheel: wheel.stat().st_size)
    project = _bytes_of_project()
    total = sum(wheel.stat().st_size for wheel in wheels) + project
    text = f"{total / 2**20:.1f} MiB with the project's own {project / 2**20:.1f}, of {MOST_BYTES / 2**20:.0f} MiB"
    if total <= MOST_BYTES:
        print(f"{text}.")
        return 0
    largest, over = wheels[-1], total - MOST_BYTES
    enough = next((wheel for wheel in wheels if wheel.stat().st_size >= over), largest)
    print(
        f"{text}: too large to carry. Delete {enough.name} ({enough.stat().st_size / 2**20:.1f} MiB): what needs it is "
        "left out then, and rows say so.",
        file=sys.stderr,
    )
    return 1


def needs_of(wheel: Path) -> set[str]:
    """Return the packages that a wheel requires without any of its extras."""
    with zipfile.ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = file.read(name).decode().splitlines()
    required = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    names = (re.split(r"[^\w.-]", one, maxsplit=1)[0] for one in required if "extra ==" not in one)
    return {name.lower().replace("_", "-") for name in names}


def _bytes_of_project() -> int:
    """Return the bytes of files that git knows: they are carried as well."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=CONSTRAINTS.parent, capture_output=True, text=True, check=True
    )
    files = (CONSTRAINTS.parent / name for name in listed.stdout.split("\0") if name)
    return sum(file.stat().st_size for file in files if file.is_file())

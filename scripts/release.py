"""Build a release, check what is in it, and try its wheel in a fresh environment, in an empty folder.

    python scripts/release.py                   # leaves the sdist and the wheel in dist/, and publishes nothing
    python scripts/release.py --tag v0.1.0      # the tag must be that of this version, and CHANGELOG.md have its date

Installing the wheel's dependencies takes minutes and a package index; what is tried afterwards needs no network. The
first step that fails ends it, with exit code 1.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from command_line import parser_of

import lowmem_ft

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = {"lowmem_ft/**/*": "", "recipes/**/*": "lowmem_ft/", "docs/*.md": "lowmem_ft/"}
"""The files of the repository that a wheel has, and the folder that they are in there."""

MOST_BYTES = 256 * 2**10
"""Most bytes of a file of the wheel: the largest are the demo's rows."""

TRIED = (
    "docs out_of_memory",
    "estimate recipe=8b-24gb --gpu rtx-4090",
    "train recipe=tiny training.use_cpu=true training.output_dir=run",
    "report run",
)
"""Commands that a new user may type, and that must end well."""


class FailedStepError(Exception):
    """A step of the release found something wrong; the message says what."""


def main() -> int:
    """Take one step after the other, until one fails."""
    parser = parser_of(__doc__)
    parser.add_argument("--tag", help="the tag that is to be released: v and the version")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the two files (dist)")
    options = parser.parse_args()
    out = options.out.resolve()
    with tempfile.TemporaryDirectory(prefix="lowmem-ft-release-") as temporary:
        environment = Path(temporary, "venv")
        steps = {
            "compare version and tag": lambda: check_version(options.tag),
            "build sdist and wheel": lambda: build(out),
            "check metadata (twine)": lambda: _run(
                sys.executable, "-m", "twine", "check", "--strict", *_built(out)
            ),
            "check the wheel's contents": lambda: check_contents(_wheel(out)),
            "install the wheel in a fresh environment": lambda: install(_wheel(out), environment),
            "try it in an empty folder": lambda: try_it(environment, Path(temporary)),
        }
        for number, (name, step) in enumerate(steps.items(), start=1):
            print(f"[{number}/{len(steps)}] {name} ...", flush=True)
            began = time.monotonic()
            try:
                step()
            except FailedStepError as failure:
                print(f"error: Step {number}, {name}: {failure}", file=sys.stderr)
                return 1
            print(f"      done in {time.monotonic() - began:.0f} s", flush=True)
    print(
        f"lowmem-ft {lowmem_ft.__version__} can be released: {', '.join(Path(each).name for each in _built(out))}"
    )
    return 0


def check_version(tag: str | None) -> None:
    """Compare the version with the changelog's newest heading, and with the tag if there is one.

    Raises:
        FailedStepError: if they differ, or the changelog calls a tagged version unreleased.
    """
    version = lowmem_ft.__version__
    heading = re.search(r"^## \[(.+?)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    if heading is None or heading[1] != version:
        raise FailedStepError(
            f"CHANGELOG.md begins with {heading and heading[0]}, and the version is {version}."
        )
    if tag is not None and tag != f"v{version}":
        raise FailedStepError(f"The tag of version {version} is v{version}, got {tag}.")
    if tag is not None and not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[2]):
        raise FailedStepError(f"CHANGELOG.md says {heading[0]!r}. Write the date of the release there.")


def build(out: Path) -> None:
    """Build the sdist, and the wheel from it, in place of those of an earlier build."""
    for earlier in _built(out):
        Path(earlier).unlink()
    _run(sys.executable, "-m", "build", "--outdir", str(out), str(ROOT))


def check_contents(wheel: Path) -> None:
    """Print how much a wheel holds.

    Raises:
        FailedStepError: if it lacks a file or has one too many; names them.
    """
    if problems := [*wheel_problems(wheel)]:
        raise FailedStepError("\n".join([f"{wheel.name} is not complete, or not clean:", *problems]))
    print(f"      {wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB", flush=True)


def wheel_problems(wheel: Path) -> Iterator[str]:
    """Yield a line for each file that a wheel lacks, and for each that does not belong there."""
    with zipfile.ZipFile(wheel) as archive:
        bytes_of = {each.filename: each.file_size for each in archive.infolist()}
    shipped = {
        f"{folder}{path.relative_to(ROOT).as_posix()}"
        for pattern, folder in SHIPPED.items()
        for path in ROOT.glob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    }
    metadata = re.compile(r"lowmem_ft-[^/]+\.dist-info/")
    yield from (f"lacks {name}" for name in sorted(shipped - bytes_of.keys()))
    yield from (f"has {name}" for name in sorted(bytes_of.keys() - shipped) if metadata.match(name) is None)
    yield from (f"has {name}, of {size:,} bytes" for name, size in bytes_of.items() if size > MOST_BYTES)


def install(wheel: Path, environment: Path) -> None:
    """Install a wheel and its dependencies, in the tested versions, into a new virtual environment."""
    _run(sys.executable, "-m", "venv", str(environment))
    pip = (str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet")
    _run(*pip, "--constraint", str(ROOT / "constraints.txt"), str(wheel))


def try_it(environment: Path, temporary: Path) -> None:
    """Run commands where there is neither the repository nor a network nor what earlier runs have kept.

    Raises:
        FailedStepError: if one fails, or version or pages are not those of the repository.
    """
    folder = temporary / "empty"
    folder.mkdir()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables |= {"HF_HUB_OFFLINE": "1", "HOME": str(temporary), "XDG_CACHE_HOME": str(temporary / "cache")}

    def lowmem(words: str) -> str:
        print(f"      $ lowmem-ft {words}", flush=True)
        return _run(str(environment / "bin" / "lowmem-ft"), *words.split(), cwd=folder, env=variables)

    if (said := lowmem("--version").strip()) != f"lowmem-ft {lowmem_ft.__version__}":
        raise FailedStepError(f"The version is {lowmem_ft.__version__}, and the wheel says {said}.")
    listed = [line.split()[0] for line in lowmem("docs").splitlines()]
    if listed != sorted(page.stem for page in ROOT.glob("docs/*.md")):
        raise FailedStepError(f"`lowmem-ft docs` lists other pages than docs/ has: {', '.join(listed)}.")
    for words in TRIED:
        lowmem(words)


def _built(out: Path) -> list[str]:
    """Return the paths of sdist and wheel."""
    return [str(path) for path in sorted(out.glob("lowmem_ft-*")) if path.suffix in (".whl", ".gz")]


def _wheel(out: Path) -> Path:
    return next(out.glob("lowmem_ft-*.whl"))


def _run(*words: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a command and return what it prints.

    Raises:
        FailedStepError: if it fails, with the end of its output.
    """
    done = subprocess.run(words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
        raise FailedStepError(f"`{shlex.join(words)}` ended with exit code {done.returncode}:\n{said}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

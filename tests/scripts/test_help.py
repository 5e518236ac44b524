"""Every script says what it is for, and refuses what it does not know, before it does anything."""

from __future__ import annotations

import json
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"

ASK_EACH = """
import contextlib, io, json, pathlib, runpy, sys

answers = {}
for script in sys.argv[1:]:
    for argument in ("--help", "--no-such-option"):
        folders, said = list(sys.path), io.StringIO()
        sys.path.insert(0, str(pathlib.Path(script).parent))
        sys.argv = [script, argument]
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                runpy.run_path(script, run_name="__main__")
            code = "no end"
        except SystemExit as end:
            code = end.code
        except Exception as error:
            code = repr(error)
        sys.path[:] = folders
        answers[f"{pathlib.Path(script).name} {argument}"] = [code, said.getvalue()]
print(json.dumps(answers))
"""


def test_every_script_answers_help_and_refuses_an_option_it_does_not_know(forks, tmp_path):
    scripts = [str(path) for path in sorted(SCRIPTS.rglob("*.py")) if "__main__" in path.read_text("utf-8")]
    assert len(scripts) > 20
    done = forks.run(ASK_EACH, *scripts, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert len(answers) == 2 * len(scripts)
    for asked, (code, said) in answers.items():
        if asked.endswith("--help"):
            assert (code, said[:6].lower()) == (0, "usage:"), (asked, code, said[:200])
        else:
            assert code == 2, (asked, code, said[:200])
            assert "error: " in said, (asked, said[:200])
    assert list(tmp_path.iterdir()) == []

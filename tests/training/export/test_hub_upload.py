"""An upload that cannot work is refused before training; one that fails leaves the folder and says what to run."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.training.export import hub_upload
from lowmem_ft.training.run.loop import train

UPLOAD = ("training.max_steps=2", "training.push_to_hub=true", "training.hub_model_id=me/model")


def test_a_hub_out_of_reach_is_noticed_before_the_first_step(tiny, tmp_path):
    with pytest.raises(UserError, match=r"cannot be reached.*hf upload"):
        train(tiny(*UPLOAD, output_dir=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_missing_login_is_noticed_before_the_first_step(tiny, tmp_path, monkeypatch):
    def refuse(self):
        raise LocalTokenNotFoundError("no token")

    monkeypatch.setattr(hub_upload, "hub_is_reachable", lambda: True)
    monkeypatch.setattr(HfApi, "whoami", refuse)
    with pytest.raises(UserError, match="hf auth login"):
        train(tiny(*UPLOAD, output_dir=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.fixture
def hub(monkeypatch):
    """A hub that records what is uploaded; its calls take what the real ones take."""
    uploads = []
    answers = {
        "whoami": lambda self: {"name": "me"},
        "create_repo": lambda self, name, **options: SimpleNamespace(repo_id=name, **options),
        "upload_folder": lambda self, **upload: uploads.append(upload),
    }
    monkeypatch.setattr(hub_upload, "hub_is_reachable", lambda: True)
    for name, answer in answers.items():
        monkeypatch.setattr(HfApi, name, create_autospec(getattr(HfApi, name), side_effect=answer))
    return uploads


def test_the_finished_folder_is_uploaded(tiny, tmp_path, hub):
    result = train(tiny(*UPLOAD, output_dir=tmp_path / "run"))
    assert hub == [{"repo_id": "me/model", "folder_path": result.model_folder}]


def test_an_upload_that_fails_keeps_the_folder_and_says_what_to_run(tiny, tmp_path, hub, monkeypatch):
    def fail(self, **upload):
        raise ConnectionResetError("gone")

    monkeypatch.setattr(HfApi, "upload_folder", fail)
    with pytest.raises(UserError, match=r"saved in .*Run later: hf upload me/model"):
        train(tiny(*UPLOAD, output_dir=tmp_path / "run"))
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()

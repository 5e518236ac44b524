"""What a run says about the model that it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.export.finished_model import log_finished_model


@pytest.mark.parametrize("weights, can_merge", [("random", False), ("pretrained", True)])
def test_a_merge_is_advised_where_there_is_a_base(weights, can_merge, caplog):
    caplog.set_level("INFO")
    log_finished_model(
        Path("here/model"), load_recipe("tiny", ["adapter.name=lora", f"model.weights={weights}"])
    )
    assert "The adapter is in here/model" in caplog.text
    assert ("lowmem-ft merge here/model" in caplog.text) == can_merge

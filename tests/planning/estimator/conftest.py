from __future__ import annotations

from typing import Any

import pytest

from lowmem_ft.planning.estimator.traces import tracing


@pytest.fixture
def traced_depths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of layers that were traced, in order."""
    depths: list[int] = []
    original = tracing.trace_layers

    def spy(recipe: Any, hf_config: Any, machine: Any, process_index: int) -> Any:
        depths.append(hf_config.get_text_config().num_hidden_layers)
        return original(recipe, hf_config, machine, process_index)

    monkeypatch.setattr(tracing, "trace_layers", spy)
    return depths

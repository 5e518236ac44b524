"""The state of every random generator that training draws from, as JSON."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def export_random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of Python's, numpy's and torch's generators, on the host and on ``device``."""
    version, internal, gauss_next = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    state = numpy_state["state"]
    return {
        "python": [version, list(internal), gauss_next],
        "numpy": dict(numpy_state, state={"key": state["key"].tolist(), "pos": state["pos"]}),
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None,
    }


def import_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore every generator to the state that :func:`export_random_state` returned."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    numpy_state = dict(state["numpy"])
    numpy_state["state"] = dict(
        numpy_state["state"], key=np.array(numpy_state["state"]["key"], dtype=np.uint32)
    )
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8), device)

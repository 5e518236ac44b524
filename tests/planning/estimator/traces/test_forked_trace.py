"""Of two traces that an estimate needs, one is made in a forked process: with the same result, or else here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from processes import LIMIT_SECONDS

from lowmem_ft import estimate_memory
from lowmem_ft.planning.estimator import estimating_processes
from lowmem_ft.planning.estimator.traces import forked_trace
from lowmem_ft.recipe import load_recipe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")

PROGRAM = """
import json, os, multiprocessing, sys, time
from lowmem_ft import estimate_memory
from lowmem_ft.planning.estimator import estimating_processes
from lowmem_ft.planning.estimator.traces import forked_trace, tracing
from lowmem_ft.recipe import load_recipe

os.environ[estimating_processes.PROCESSES_VARIABLE] = "2"
estimating_processes.usable_cores = lambda: 2
forked_trace.PATIENCE_S = float(sys.argv[2])
here, depths, original = os.getpid(), [], tracing.trace_layers

def spy(recipe, hf_config, machine, process_index):
    depths.append(hf_config.num_hidden_layers)
    if os.getpid() != here:
        exec(sys.argv[3])
    elif len(sys.argv) > 4:
        exec(sys.argv[4])
    return original(recipe, hf_config, machine, process_index)

tracing.trace_layers = spy
recipe = load_recipe("tiny", [f"model={sys.argv[1]}", "data.max_length=16"])
try:
    result = estimate_memory(recipe, "rtx-4090").to_json()
except KeyboardInterrupt:
    result = {}
print(json.dumps({"depths": depths, "left": len(multiprocessing.active_children()), "result": result}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.LlamaConfig(num_hidden_layers=12, vocab_size=64, **sizes).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, Any]:
    """What an estimate says that is made in one process, which has traced before or not."""
    recipe = load_recipe("tiny", [f"model={model}", "data.max_length=16"])
    return estimate_memory(recipe, "rtx-4090").to_json()


def without_time(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "trace_seconds"}


def run(forks: Any, model: Path, *arguments: str) -> dict[str, Any]:
    done = forks.run(PROGRAM, str(model), *arguments)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_longer_trace_comes_from_the_other_process(forks, model, alone):
    done = run(forks, model, str(LIMIT_SECONDS), "pass")
    assert len(done["depths"]) == 1
    assert without_time(done["result"]) == without_time(alone)


@pytest.mark.parametrize(
    "there",
    [
        "raise RuntimeError('only there')",
        "os._exit(9)",
        pytest.param("time.sleep(60)", marks=pytest.mark.slow),
    ],
)
def test_what_the_other_process_does_not_give_is_traced_here(forks, model, alone, there):
    done = run(forks, model, "0.1", there)
    assert len(done["depths"]) == 2
    assert without_time(done["result"]) == without_time(alone)
    assert not done["left"]


def test_the_other_process_goes_when_this_one_stops(forks, model):
    done = run(forks, model, str(LIMIT_SECONDS), "time.sleep(60)", "raise KeyboardInterrupt")
    assert done == {"depths": [4], "left": 0, "result": {}}


def test_nothing_is_forked_after_a_trace(model, monkeypatch):
    """Torch would let the other process run no backward pass."""
    monkeypatch.setattr(forked_trace, "_is_first", False)
    monkeypatch.setattr(forked_trace, "_start", None)
    monkeypatch.setenv(estimating_processes.PROCESSES_VARIABLE, "2")
    with forked_trace.forked_trace(lambda: None) as take:
        assert take() is None

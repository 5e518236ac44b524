"""A technique that nobody has heard of joins as CONTRIBUTING says: by two files, a field, and an entry in the list.

A copy of the package gets them, and processes of its own import that. The technique then trains, is in the estimate,
and has what its key states in ``effects``: rules, and a place in the search.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from processes import Forks

ROOT = Path(__file__).parents[3]

CONFIG = """
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowmem_ft.foundation.knob import Effect, knob


@dataclass(frozen=True, kw_only=True)
class HalvesConfig:
    kept: Literal["whole", "halves"] = knob(
        "whole",
        "What backward needs of float32 activations.",
        frees="halves: half of the activations",
        costs="halves: they are rounded",
        effects={
            "halves": Effect(fidelity="unbiased rounding", engines=("fsdp2",), traits=("no loss scale",)),
        },
        search_values=("whole", "halves"),
    )
"""

TECHNIQUE = '''
from __future__ import annotations

import torch
from torch import Tensor, nn

from lowmem_ft.techniques.halves.config import HalvesConfig
from lowmem_ft.techniques.modules.model_parts import ModelParts
from lowmem_ft.techniques.modules.patching import wrap_method
from lowmem_ft.techniques.technique import Technique


class HalvedActivations(Technique):
    """What backward needs waits as bfloat16. It has something to ask of a loop, too: how many micro-batches come."""

    num_micro_batches = 0

    def before_forward(self, input_ids_BT, num_label_tokens):
        self.num_micro_batches += 1
        return {}


def enable_halved_activations(model: nn.Module | ModelParts, config: HalvesConfig) -> HalvedActivations:
    def pack(tensor: Tensor) -> Tensor | tuple[Tensor, torch.dtype]:
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if is_weight or tensor.dtype != torch.float32 or tensor.dim() < 2:
            return tensor
        return tensor.to(torch.bfloat16), tensor.dtype

    def unpack(packed) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[0].to(packed[1])

    def halved(forward):
        def with_halves(*args, **kwargs):
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return forward(*args, **kwargs)

        return with_halves

    return HalvedActivations(wrap_method(ModelParts.of(model).model, "forward", halved))
'''

LINES = {
    "recipe/tree.py": (
        "from lowmem_ft.techniques.halves.config import HalvesConfig",
        "    tiling: TilingConfig = ",
        "    halves: HalvesConfig = field(default_factory=HalvesConfig)",
    ),
    "training/step/enabled_techniques.py": (
        "from lowmem_ft.techniques.halves.halved_activations import enable_halved_activations",
        "    Spec(lambda build: build.recipe.offload.parameters == ",
        '    Spec(lambda build: build.recipe.halves.kept == "halves", '
        "lambda build: enable_halved_activations(build.parts, build.recipe.halves)),",
    ),
}
"""For each file an import, the start of the line before which a line goes, and that line."""


@pytest.fixture(scope="module")
def forks_of_copy(tmp_path_factory):
    """Runs programs that import a copy of the package, with the technique in it."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("lowmem_ft", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    room = folder / "lowmem_ft/techniques/halves"
    room.mkdir()
    (room / "config.py").write_text(CONFIG)
    (room / "halved_activations.py").write_text(TECHNIQUE)
    for name, (import_line, place, line) in LINES.items():
        file = folder / "lowmem_ft" / name
        before, found, after = file.read_text().partition(f"\n{place}")
        assert found, f"{name} has no line {place}"
        head, future, rest = before.partition("from __future__ import annotations\n")
        file.write_text(f"{head}{future}{import_line}\n{rest}\n{line}{found}{after}")
    forks = Forks(folder)
    yield forks
    forks.close()


def run(forks, program: str, *arguments: str) -> None:
    done = forks.run(program, f"{ROOT / 'scripts'}", *arguments)
    assert done.returncode == 0, done.stderr


ESTIMATED_AND_MEASURED = """
import sys
from collections import Counter

sys.path.append(sys.argv[1])
from measuring.real_run import run_for_real
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.traces.tracing import NUM_STEPS
from lowmem_ft.recipe import load_recipe
from lowmem_ft.techniques.halves.halved_activations import HalvedActivations

ALLOWED_ERROR = 0.005  # as of runs without it: tests/planning/estimator/test_against_real_steps.py
SETTINGS = [
    "training.use_cpu=true",
    "checkpointing.mode=none",
    "data.eval_size=null",
    "training.eval_steps=null",
    "training.gradient_accumulation_steps=1",
]
called, before_forward = [], HalvedActivations.before_forward

def noted(technique, *args):
    called.append(technique)
    return before_forward(technique, *args)

HalvedActivations.before_forward = noted
recipe = load_recipe("tiny", SETTINGS)
without = max(run_for_real(recipe, num_steps=NUM_STEPS).allocated.values())
assert not called
recipe = load_recipe("tiny", [*SETTINGS, "halves.kept=halves"])
estimated = estimate_memory(recipe, "cpu").allocated_peak_bytes
measured = max(run_for_real(recipe, num_steps=NUM_STEPS).allocated.values())
assert abs(estimated - measured) <= ALLOWED_ERROR * measured, (estimated, measured)
assert measured < 0.9 * without, (measured, without)
assert len(set(called)) >= 2, "traced, and run"
assert set(Counter(called).values()) == {NUM_STEPS}
"""

CONTRADICTED = """
import sys
from lowmem_ft.foundation.errors import RecipeError
from lowmem_ft.recipe import load_recipe

_, _, setting, problem = sys.argv
load_recipe("tiny", [setting])
try:
    load_recipe("tiny", ["halves.kept=halves", setting])
except RecipeError as error:
    assert problem in str(error), error
else:
    sys.exit("it was not refused")
"""

PLANNED = """
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.space.search_space import planned_keys

assert "halves.kept" in {key.path for key in planned_keys(load_recipe("tiny"))}
"""


def test_a_technique_that_joins_a_run_is_estimated_as_it_is_measured(forks_of_copy):
    run(forks_of_copy, ESTIMATED_AND_MEASURED)


@pytest.mark.parametrize(
    "setting, problem",
    [
        (
            "distributed.strategy=ddp",
            "halves.kept=halves works in one process, or with distributed.strategy=fsdp2",
        ),
        (
            "training.mixed_precision=fp16",
            "halves.kept=halves of trained weights needs training.mixed_precision=no",
        ),
    ],
)
def test_rules_know_what_its_effects_state(forks_of_copy, setting, problem):
    run(forks_of_copy, CONTRADICTED, setting, problem)


def test_a_plan_tries_it(forks_of_copy):
    run(forks_of_copy, PLANNED)

"""What an estimate imports: every import is paid each time somebody asks."""

from __future__ import annotations

import subprocess
import sys

from processes import LIMIT_SECONDS

ESTIMATE = """
import sys
from lowmem_ft.estimator import estimate_memory
from lowmem_ft.recipe import load_recipe
estimate_memory(load_recipe("tiny", ["training.lr_scheduler_type=cosine"]), "t4")
print(*{"bitsandbytes", "datasets", "peft", "transformers.trainer_utils"} & set(sys.modules))
"""


def test_an_estimate_imports_no_library_that_its_recipe_does_without():
    done = subprocess.run(
        [sys.executable, "-c", ESTIMATE], capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []

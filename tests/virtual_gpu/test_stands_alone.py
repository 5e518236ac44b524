"""The virtual GPU is a library of its own, which loads nothing but the foundation."""

from __future__ import annotations

import subprocess
import sys

from processes import LIMIT_SECONDS

TRAINING_STEP = """
import sys
import torch
from lowmem_ft.virtual_gpu import VirtualGPU

with VirtualGPU("t4") as gpu:
    model = torch.nn.TransformerEncoderLayer(64, nhead=4, batch_first=True).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(2, 16, 64, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
assert gpu.report().by_category_at_peak["optimizer_state"] > 0
print(*{name.split(".")[1] for name in sys.modules if name.startswith("lowmem_ft.")})
"""


def test_a_training_step_needs_the_foundation_alone():
    done = subprocess.run(
        [sys.executable, "-c", TRAINING_STEP], capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"virtual_gpu", "foundation"}

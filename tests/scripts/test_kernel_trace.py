"""Digest of a profile: what the GPU did, and how long it waited for the host."""

from __future__ import annotations

import pytest
from speed.kernel_trace import digest, kind_of

PRODUCT, FLASH = "nvjet_sm90_tst_128x256", "void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>"


def test_seconds_are_those_of_the_work_and_gaps_those_between():
    """Two kernels that overlap on two streams count once as busy, and each by its kind."""
    events = [
        {"name": FLASH, "ts": 1000, "dur": 100},
        {"name": PRODUCT, "ts": 1050, "dur": 150},
        {"name": "update_chunk", "ts": 1205, "dur": 5},
        {"name": "Memset (Device)", "ts": 1510, "dur": 90},
    ]
    found = digest(reversed(events))
    assert found["kernels"] == 4
    assert found["profiled_seconds"] == pytest.approx(600e-6)
    assert found["busy_seconds"] == pytest.approx((200 + 5 + 90) * 1e-6)
    assert found["idle_seconds"] == pytest.approx({"below 10 us": 5e-6, "longer": 300e-6})
    assert found["seconds_by_kind"] == pytest.approx(
        {"attention": 100e-6, "products": 150e-6, "update": 5e-6, "others": 90e-6}
    )
    assert kind_of("_block_rms_norm_backward_kernel") == "Liger"

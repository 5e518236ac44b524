"""A run says how much memory it took, beside what it was allowed."""

from __future__ import annotations

import logging

import pytest
import torch

from lowmem_ft.budget import Budget
from lowmem_ft.errors import UserError
from lowmem_ft.training.budget_cap import apply_budget, report_budget

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "budget,said",
    [
        (Budget(), ["Peak host memory: "]),
        (Budget(host="1TiB"), [", within budget.host=1TiB."]),
        (Budget(host="1KiB"), [", above budget.host=1KiB."]),
        (Budget(device="1KiB"), [", above budget.device=1KiB.", "Peak host memory: "]),
    ],
)
def test_peaks_stand_beside_the_budget(budget, said, caplog):
    with caplog.at_level(logging.INFO):
        report_budget(budget, CPU)
    assert len(caplog.messages) == len(said)
    assert all(text in message for text, message in zip(said, caplog.messages, strict=True))


@pytest.mark.parametrize("file_bytes,verdict", [(2**50, "within"), (1, "above")])
def test_pages_of_mapped_files_count_for_no_budget(file_bytes, verdict, caplog):
    with caplog.at_level(logging.INFO):
        report_budget(Budget(host="1KiB"), CPU, file_bytes=file_bytes)
    assert "of it pages of files in offload.folder" in caplog.text
    assert f"{verdict} budget.host=1KiB." in caplog.text


@pytest.fixture
def caps(monkeypatch):
    """The caps set on a device of 80 GiB."""
    caps = []
    properties = type("Properties", (), {"total_memory": 80 * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: caps.append(share)
    )
    return caps


def test_the_cap_is_the_budgets_share_of_the_device(caps):
    apply_budget(Budget(device="20GiB"), torch.device("cuda"))
    apply_budget(Budget(device="20GiB", enforce=False), torch.device("cuda"))
    apply_budget(Budget(device="20GiB"), CPU)
    assert caps == [0.25]


def test_a_budget_of_the_size_a_card_is_sold_with_is_all_that_its_driver_leaves(caps):
    apply_budget(Budget(device="84GiB"), torch.device("cuda"))
    assert caps == [1.0]
    with pytest.raises(UserError, match=r"budget.device=85GiB is more than this device has \(80.0 GiB\)"):
        apply_budget(Budget(device="85GiB"), torch.device("cuda"))

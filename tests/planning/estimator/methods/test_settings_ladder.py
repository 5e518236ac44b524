"""The choice of rows and kept activations on a GPU, with answers that follow from a formula."""

from __future__ import annotations

import dataclasses

import pytest

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.memory_estimate import (
    BudgetVerdict,
    DeviceLimit,
    MemoryEstimate,
    ModelSize,
    Processes,
    StepTime,
)
from lowmem_ft.foundation.units import GIB
from lowmem_ft.planning.estimator.estimate import CannotRun
from lowmem_ft.planning.estimator.methods.settings_ladder import QUARTERS, Setting, SettingsLadder

WEIGHTS, OF_A_ROW, OF_ITS_INPUTS = 16, 8, 1
"""GiB of a model, of the activations of a row if all layers keep theirs, and if none does."""


class Model:
    """A model whose memory grows with rows and kept layers, and whose speed with what is not computed again."""

    def __init__(self, host_seconds: float = 0.0) -> None:
        self.host_seconds = host_seconds
        self.asked: list[tuple[str, Setting]] = []

    def gib(self, setting: Setting) -> float:
        rows, kept = setting.rows or 1, (setting.kept or 0) / QUARTERS
        return WEIGHTS + rows * (OF_ITS_INPUTS + kept * (OF_A_ROW - OF_ITS_INPUTS))

    def seconds_of_row(self, setting: Setting) -> tuple[float, float]:
        """Return the seconds of a row, and those that the GPU waits in them."""
        rows, kept = setting.rows or 1, (setting.kept or 0) / QUARTERS
        busy = 4 - kept
        waits = max(0.0, self.host_seconds - busy * rows) / rows
        return busy + waits, waits

    def estimate(self, setting: Setting, gpu: Gpu) -> MemoryEstimate:
        self.asked.append((gpu.name, setting))
        needs, (seconds, waits) = int(self.gib(setting) * GIB), self.seconds_of_row(setting)
        return MemoryEstimate(
            model=ModelSize(name="model", parameters=1, trainable_parameters=1),
            gpu=DeviceLimit(name=gpu.name, memory_bytes=gpu.memory_bytes),
            allocated_peak_bytes=needs,
            reserved_peak_bytes=needs,
            process_peak_bytes=needs,
            host_peak_bytes=0,
            host_pinned_bytes=0,
            by_category_at_peak={"activation": needs - WEIGHTS * GIB},
            by_phase={},
            peak_phase="backward",
            peak_module="",
            step=StepTime(seconds=16 * seconds, tokens=16, bound_by="compute", host_share=waits / seconds),
            budget=BudgetVerdict(device_bytes=gpu.memory_bytes, host_bytes=None),
            fits=needs <= gpu.memory_bytes,
        )

    def ladder(self) -> SettingsLadder:
        return SettingsLadder(
            rows=(1, 2, 4, 8),
            kept=tuple(range(QUARTERS, -1, -1)),
            estimate=self.estimate,
            room_bytes=lambda gpu: gpu.memory_bytes,
        )

    def best_by_hand(self, gpu: Gpu) -> float:
        """Return the seconds of a row with the fastest of all settings that fit with room to spare."""
        all_of_them = [Setting(rows, kept) for rows in (1, 2, 4, 8) for kept in range(QUARTERS + 1)]
        answers = [(self.estimate(setting, gpu), setting) for setting in all_of_them]
        return min(
            self.seconds_of_row(setting)[0] for answer, setting in answers if answer.fits and not answer.tight
        )


def card(gib: float) -> Gpu:
    return dataclasses.replace(find_gpu("rtx-4090"), name=f"card-{gib}", memory_bytes=int(gib * GIB))


CARDS = [card(gib) for gib in (180, 94, 80, 48, 40, 32, 24, 23, 20, 18.5)]


@pytest.mark.parametrize("host_seconds", [0, 1, 3, 4, 6, 10, 40])
def test_the_choice_is_near_the_best_of_all_settings_on_every_card(host_seconds):
    model = Model(host_seconds)
    ladder = model.ladder()
    for gpu in CARDS:
        found = ladder.fastest(gpu)
        assert found.answer.fits
        assert not found.answer.tight
        assert model.seconds_of_row(found.setting)[0] <= 1.1 * model.best_by_hand(gpu), (gpu.name, found)


def test_where_the_host_holds_nothing_back_one_row_with_the_most_kept_layers_is_taken():
    ladder = Model().ladder()
    chosen = {gpu.name: ladder.fastest(gpu).setting for gpu in CARDS}
    assert chosen["card-180"] == chosen["card-32"] == Setting(1, QUARTERS)
    assert chosen["card-24"] == Setting(1, 3)
    assert chosen["card-18.5"] == Setting(1, 0)


def test_where_the_host_sets_the_pace_rows_are_added_while_they_fit():
    ladder = Model(host_seconds=40).ladder()
    assert ladder.fastest(card(180)).setting == Setting(8, QUARTERS)
    assert ladder.fastest(card(58)).setting.rows >= 4


def test_what_others_have_shown_not_to_fit_is_not_estimated():
    model = Model()
    ladder = model.ladder()
    for gpu in CARDS:
        ladder.fastest(gpu)
    small = [setting for name, setting in model.asked if name == "card-18.5"]
    assert small == [Setting(1, 0)]
    assert all(setting.rows in (1, 2) for _, setting in model.asked)  # more rows were no gain


def test_what_would_surely_be_tight_is_not_estimated_next_to_what_has_room_to_spare():
    model = Model()
    assert model.ladder().fastest(card(22)).setting == Setting(1, 2)
    assert [setting for _, setting in model.asked] == [Setting(1, 4), Setting(1, 0), Setting(1, 2)]
    with_more_rows = Model(host_seconds=6)
    assert with_more_rows.ladder().fastest(card(33)).answer.fits
    assert Setting(2, 4) not in [setting for _, setting in with_more_rows.asked]


def test_a_card_on_which_even_the_leanest_is_tight_gets_that():
    model = Model()
    found = model.ladder().fastest(card(17.5))
    assert (found.setting, found.rank) == (Setting(1, 0), 1)


def test_a_card_is_told_what_it_is_told_alone():
    for host_seconds in (0, 6):
        together = Model(host_seconds).ladder()
        for gpu in CARDS:
            alone = Model(host_seconds).ladder().fastest(gpu)
            assert together.fastest(gpu).setting == alone.setting, gpu.name


def test_where_nothing_fits_the_leanest_is_shown():
    found = Model().ladder().fastest(card(12))
    assert found.setting == Setting(1, 0)
    assert not found.answer.fits


def test_settings_that_cannot_run_end_the_search():
    def refuse(setting: Setting, gpu: Gpu) -> CannotRun:
        return CannotRun(gpu=gpu, problems=("no.",))

    ladder = SettingsLadder(rows=(1, 2), kept=(4, 0), estimate=refuse, room_bytes=lambda gpu: 1.0)
    assert isinstance(ladder.fastest(card(24)).answer, CannotRun)


class Sharded(Model):
    """The same, but what the GPU waits for comes from other processes: the weights of each micro-batch."""

    def estimate(self, setting: Setting, gpu: Gpu) -> MemoryEstimate:
        answer = super().estimate(setting, gpu)
        seconds, waits = self.seconds_of_row(setting)
        step = dataclasses.replace(answer.step, host_share=0.0, by_operator={"mm": 16 * (seconds - waits)})
        return dataclasses.replace(answer, step=step, processes=Processes(strategy="fsdp2", num_processes=2))


@pytest.mark.parametrize("gib", [26, 30, 48])
def test_waits_for_other_processes_are_worth_more_rows_as_those_for_the_host_are(gib):
    gpu = dataclasses.replace(find_gpu("rtx-4090"), memory_bytes=gib * GIB)
    sharded, alone = (
        Sharded(host_seconds=20).ladder().fastest(gpu),
        Model(host_seconds=20).ladder().fastest(gpu),
    )
    assert sharded.setting == alone.setting
    assert (sharded.setting.rows or 1) > 1

from __future__ import annotations

import dataclasses

import pytest

from lowmem_ft.catalog.gpus import load_gpus
from lowmem_ft.estimator.methods import METHODS, MethodEstimate
from lowmem_ft.memory.estimate import BudgetVerdict, DeviceLimit
from lowmem_ft.reports.method_table import methods_on_gpu, methods_on_gpus
from lowmem_ft.units import GIB

NEEDS_GIB = {"full": 5, "lora": 18, "qlora": 7.6}
GPUS = {name: load_gpus()[name] for name in ("t4", "rtx-3070", "rtx-4090", "rtx-pro-6000-blackwell")}


@pytest.fixture
def results(estimate) -> list[MethodEstimate]:
    def one(method, gpu) -> MethodEstimate:
        command = (f"recipe={method.recipe}", "model=llama-3.1-8b")
        if method.name == "full" and not gpu.has_bfloat16:
            return MethodEstimate(method=method, gpu=gpu, command=command, problems=("no bfloat16.",))
        needs = int(NEEDS_GIB[method.name] * GIB)
        on_gpu = dataclasses.replace(
            estimate,
            gpu=DeviceLimit(name=gpu.name, memory_bytes=gpu.memory_bytes),
            budget=BudgetVerdict(device_bytes=gpu.memory_bytes, host_bytes=None),
            process_peak_bytes=needs,
            host_peak_bytes=63 * GIB,
            fits=needs <= gpu.memory_bytes,
        )
        return MethodEstimate(method=method, gpu=gpu, command=command, estimate=on_gpu)

    return [one(method, gpu) for method in METHODS for gpu in GPUS.values()]


def test_what_fits_first_by_price_stands_above_with_its_host_memory(results, as_text):
    lines = as_text(methods_on_gpus(results, GPUS)).splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "full rtx-4090 at $0.29 an hour" in text
    assert "QLoRA t4 at $0.15 an hour" in text
    assert "beside 63.0 GiB of host memory" in text


def test_a_line_for_each_gpu_says_what_each_method_needs_and_whether_it_fits(results, as_text):
    lines = as_text(methods_on_gpus(results, GPUS)).splitlines()
    rows = {
        line.split()[0]: line.split()[1:] for line in lines if line.split()[:1] and line.split()[0] in GPUS
    }
    assert list(rows) == ["t4", "rtx-4090", "rtx-pro-6000-blackwell", "rtx-3070"]
    assert rows["t4"] == ["14.6", "0.15", "-", "-", "18.0", "no", "7.60", "2,000"]
    assert rows["rtx-4090"] == ["23.6", "0.29", "5.00", "2,000", "18.0", "2,000", "7.60", "2,000"]
    assert rows["rtx-3070"] == ["7.66", "-", "5.00", "2,000", "18.0", "no", "~7.60", "2,000"]


def test_what_cannot_be_done_says_why_and_what_can_says_how(results, as_text):
    text = as_text(methods_on_gpus(results, GPUS))
    assert "full is not estimated on t4: no bfloat16." in text
    for recipe in ("8b-8gb", "7b-lora", "7b-qlora"):
        assert f"recipe={recipe} model=llama-3.1-8b" in text


def test_what_cards_without_bfloat16_take_is_said_to_be_for_them_in_a_command_of_its_own(results, as_text):
    def lora(result: MethodEstimate) -> MethodEstimate:
        own = () if result.gpu.has_bfloat16 else ("model.dtype=float16", "training.mixed_precision=fp16")
        return dataclasses.replace(result, command=(*result.command, *own))

    both = [lora(result) for result in results if result.method.name == "lora"]
    lines = as_text(methods_on_gpus(both, GPUS)).splitlines()
    after = {line: lines[number + 1].strip() for number, line in enumerate(lines[:-1])}
    assert after["LoRA"] == "lowmem-ft train recipe=7b-lora model=llama-3.1-8b"
    assert after["LoRA, on cards without bfloat16"].endswith("model.dtype=float16 \\")
    on_t4 = [result for result in both if result.gpu.name == "t4"]
    assert "without bfloat16" not in as_text(methods_on_gpu(on_t4, GPUS["t4"]))


def test_a_method_that_fits_nowhere_says_so(results, as_text):
    few = [each for each in results if each.gpu.name in ("t4", "rtx-3070")]
    assert "LoRA   fits on none" in as_text(methods_on_gpus(few, GPUS))


def test_one_gpu_has_a_line_for_each_method(results, as_text):
    for name in GPUS:
        text = as_text(methods_on_gpu([each for each in results if each.gpu.name == name], GPUS[name]))
        assert max(map(len, text.splitlines())) <= 80
    text = as_text(methods_on_gpu([each for each in results if each.gpu.name == "t4"], GPUS["t4"]))
    lines = {line.split()[0]: " ".join(line.split()) for line in reversed(text.splitlines()) if line}
    assert lines["full"] == "full cannot run - - - - -"
    assert lines["LoRA"] == "LoRA 3.44 GiB over 18.0 14.6 63.0 - -"
    assert lines["QLoRA"] == "QLoRA 6.96 GiB free 7.60 14.6 63.0 2,000 0.021"

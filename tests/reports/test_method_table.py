from __future__ import annotations

import dataclasses

import pytest

from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.memory.memory_estimate import BudgetVerdict, DeviceLimit, StepTime
from lowmem_ft.foundation.units import GIB
from lowmem_ft.planning.estimator.method_estimates import MethodEstimate
from lowmem_ft.recipe.shipped.fine_tuning_methods import METHODS
from lowmem_ft.reports.costs import OwnData
from lowmem_ft.reports.method_table import methods_on_gpu, methods_on_gpus

NEEDS_GIB = {"full": 5, "lora": 18, "qlora": 7.6}
GPUS = {name: load_gpus()[name] for name in ("t4", "rtx-3070", "rtx-4090", "rtx-pro-6000-blackwell")}


@pytest.fixture
def results(estimate) -> list[MethodEstimate]:
    def one(method, gpu) -> MethodEstimate:
        command = (f"recipe={method.rungs[-1]}", "model=llama-3.1-8b")
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


def test_the_cheapest_tokens_are_named_above_with_the_host_memory_they_take(results, as_text):
    lines = as_text(methods_on_gpus(results, GPUS)).splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert (
        "full rtx-4090: $0.040 per 1M tokens at $0.29 an hour, 2,000 tokens/s, 63.0 GiB of host memory, by"
        in text
    )
    assert "QLoRA t4: $0.021 per 1M tokens at $0.15 an hour, 2,000 tokens/s, 63.0 GiB of host memory" in text


def test_a_card_with_a_dearer_hour_comes_first_where_its_tokens_are_cheaper(results, as_text):
    """The rtx-3060 was named first by its hour: at three times the price of a token."""

    def faster(result: MethodEstimate) -> MethodEstimate:
        if result.estimate is None or result.gpu.name != "rtx-4090":
            return result
        step = StepTime(seconds=0.1, tokens=1000, bound_by="compute")
        return dataclasses.replace(result, estimate=dataclasses.replace(result.estimate, step=step))

    text = as_text(methods_on_gpus([faster(result) for result in results], GPUS))
    assert "QLoRA  rtx-4090: $0.0081 per 1M tokens" in text
    names = [line.split()[0] for line in text.splitlines() if line.split()[:1] and line.split()[0] in GPUS]
    assert names[0] == "rtx-4090"


def test_where_nothing_that_fits_has_a_price_the_smallest_card_is_named(results, as_text):
    unpriced = [each for each in results if each.gpu.name == "rtx-3070"]
    text = " ".join(as_text(methods_on_gpus(unpriced, GPUS)).split())
    assert "QLoRA rtx-3070 (no known price): 2,000 tokens/s" in text


def test_commands_of_one_method_are_told_apart(results, as_text):
    def by_another(result: MethodEstimate) -> MethodEstimate:
        is_large = result.method.name == "full" and result.gpu.name == "rtx-pro-6000-blackwell"
        return dataclasses.replace(result, command=("recipe=8b-bf16",)) if is_large else result

    text = as_text(methods_on_gpus([by_another(result) for result in results], GPUS))
    assert "A letter after GiB: by which of the commands below." in " ".join(text.split())
    rows = [line.split() for line in text.splitlines() if line.split()[:1] and line.split()[0] in GPUS]
    needs = {row[0]: row[2] for row in rows}
    assert (needs["rtx-4090"], needs["rtx-pro-6000-blackwell"]) == ("5.00b", "5.00a")
    lines = text.splitlines()
    assert lines[lines.index("full a") + 1].strip() == "lowmem-ft train recipe=8b-bf16"
    assert lines[lines.index("full b") + 1].strip().startswith("lowmem-ft train recipe=8b-8gb")
    assert "LoRA" in lines  # one command needs no letter


def test_a_row_whose_host_decides_its_seconds_is_marked(results, as_text):
    def waiting(result: MethodEstimate, share: float) -> MethodEstimate:
        if result.estimate is None or result.gpu.name != "rtx-4090":
            return result
        step = dataclasses.replace(result.estimate.step, host_share=share)
        return dataclasses.replace(result, estimate=dataclasses.replace(result.estimate, step=step))

    marked = as_text(methods_on_gpus([waiting(result, 0.5) for result in results], GPUS))
    assert "2,000h" in next(line for line in marked.splitlines() if line.startswith("rtx-4090 "))
    assert "2,000h" not in next(line for line in marked.splitlines() if line.startswith("t4 "))
    assert "h: the GPU waits for its host" in " ".join(marked.split())
    unmarked = as_text(methods_on_gpus([waiting(result, 0.1) for result in results], GPUS))
    assert "2,000h" not in unmarked
    assert "waits for its host" not in unmarked


def test_hours_and_dollars_of_the_users_data_stand_beside_the_price_of_a_token(results, as_text):
    """At 2,000 tokens a second, 7.2 million tokens are an hour."""
    of_rows = [dataclasses.replace(result, row_tokens=1200) for result in results]
    text = as_text(methods_on_gpus(of_rows, GPUS, OwnData(rows=2000, epochs=3)), width=140)
    line = next(line.split() for line in text.splitlines() if line.startswith("rtx-4090 "))
    assert line[-2:] == ["1.00", "0.29"]
    words = " ".join(text.split())
    assert "1 h" in words or "60 min" in words
    assert "2,000 rows of at most 1,200 tokens, 3 epochs: at most 7,200,000 tokens" in words
    assert "evaluation and saving come on top" in words
    narrow = as_text(methods_on_gpus(of_rows, GPUS, OwnData(rows=2000, epochs=3)))
    assert max(map(len, narrow.splitlines())) <= 80
    on_one = as_text(
        methods_on_gpu([each for each in of_rows if each.gpu.name == "t4"], GPUS["t4"], OwnData(rows=2000))
    )
    assert next(line.split()[-2:] for line in on_one.splitlines() if line.startswith("QLoRA")) == [
        "0.33",
        "0.050",
    ]


def test_kernels_that_need_a_package_are_said_to(results, as_text):
    fused = [
        dataclasses.replace(result, command=(*result.command, "model.kernels=liger")) for result in results
    ]
    assert "needs the package liger-kernel" in " ".join(as_text(methods_on_gpus(fused, GPUS)).split())
    assert "liger" not in as_text(methods_on_gpus(results, GPUS))


def test_a_line_for_each_gpu_says_what_each_method_needs_and_whether_it_fits(results, as_text):
    lines = as_text(methods_on_gpus(results, GPUS)).splitlines()
    rows = {
        line.split()[0]: line.split()[1:] for line in lines if line.split()[:1] and line.split()[0] in GPUS
    }
    assert list(rows) == ["t4", "rtx-4090", "rtx-pro-6000-blackwell", "rtx-3070"]
    assert rows["t4"] == ["14.6", "-", "-", "-", "18.0", "no", "-", "7.60", "2,000", "0.021"]
    assert " ".join(rows["rtx-4090"]) == "23.6 5.00 2,000 0.040 18.0 2,000 0.040 7.60 2,000 0.040"
    assert " ".join(rows["rtx-3070"]) == "7.66 5.00 2,000 - 18.0 no - ~7.60 2,000 -"
    wide = as_text(methods_on_gpus(results, GPUS), width=120)
    assert next(line.split()[:4] for line in wide.splitlines() if "t4 " in line[:3]) == [
        "t4",
        "14.6",
        "0.15",
        "-",
    ]


def test_prices_below_each_other_have_their_points_below_each_other(results, as_text):
    lines = as_text(methods_on_gpus(results, GPUS)).splitlines()
    prices = [line.split()[-1] for line in lines if line.startswith(("t4 ", "rtx-4090 ", "rtx-pro"))]
    assert prices == ["0.021", "0.040", "0.201"]


def test_what_cannot_be_done_says_why_and_what_can_says_how(results, as_text):
    text = as_text(methods_on_gpus(results, GPUS))
    assert "full is not estimated on t4: no bfloat16." in text
    for recipe in ("8b-8gb", "7b-lora", "7b-qlora"):
        assert f"recipe={recipe} model=llama-3.1-8b" in text


def test_what_cards_without_bfloat16_take_is_said_to_be_for_them_in_a_command_of_its_own(results, as_text):
    def qlora(result: MethodEstimate) -> MethodEstimate:
        own = () if result.gpu.has_bfloat16 else ("model.dtype=float16", "training.mixed_precision=fp16")
        return dataclasses.replace(result, command=(*result.command, *own))

    both = [qlora(result) for result in results if result.method.name == "qlora"]
    lines = as_text(methods_on_gpus(both, GPUS)).splitlines()
    after = {line: lines[number + 1].strip() for number, line in enumerate(lines[:-1])}
    assert after["QLoRA a"] == "lowmem-ft train recipe=7b-qlora model=llama-3.1-8b"
    assert after["QLoRA b, on GPUs without bfloat16"].endswith("model.dtype=float16 \\")
    on_t4 = [result for result in both if result.gpu.name == "t4"]
    assert "without bfloat16" not in as_text(methods_on_gpu(on_t4, GPUS["t4"]))


def test_a_method_that_fits_nowhere_says_so(results, as_text):
    few = [each for each in results if each.gpu.name in ("t4", "rtx-3070")]
    assert "LoRA   fits on no GPU" in as_text(methods_on_gpus(few, GPUS))


def test_one_gpu_has_a_line_for_each_method(results, as_text):
    for name in GPUS:
        text = as_text(methods_on_gpu([each for each in results if each.gpu.name == name], GPUS[name]))
        assert max(map(len, text.splitlines())) <= 80
    text = as_text(methods_on_gpu([each for each in results if each.gpu.name == "t4"], GPUS["t4"]))
    lines = {line.split()[0]: " ".join(line.split()) for line in reversed(text.splitlines()) if line}
    assert lines["full"] == "full cannot run - - - - -"
    assert lines["LoRA"] == "LoRA 3.44 GiB over 18.0 14.6 63.0 - -"
    assert lines["QLoRA"] == "QLoRA 6.96 GiB free 7.60 14.6 63.0 2,000 0.021"


def test_only_what_fits_is_offered_for_training(results, as_text):
    """A card that LoRA lacks 3.4 GiB on was told how to train by it."""
    text = as_text(methods_on_gpu([each for each in results if each.gpu.name == "t4"], GPUS["t4"]))
    commands = text[text.index("To train (") :]
    assert "recipe=7b-qlora" in commands
    assert "recipe=7b-lora" not in commands
    lora = [each for each in results if each.gpu.name == "t4" and each.method.name == "lora"]
    assert "To train" not in as_text(methods_on_gpu(lora, GPUS["t4"]))


def test_whose_price_it_is_is_said_where_there_is_one(results, as_text):
    on_t4 = [each for each in results if each.gpu.name == "t4"]
    assert "Prices at $0.15 an hour" in " ".join(as_text(methods_on_gpu(on_t4, GPUS["t4"])).split())
    lora = [each for each in on_t4 if each.method.name == "lora"]
    assert "Prices at" not in as_text(methods_on_gpu(lora, GPUS["t4"]))

"""Programs that ask for values get answers by stated rules: numbers are finite, checks pass, loops end."""

from __future__ import annotations

import math
import unittest

import pytest
import torch
from foreign_frames import call_in
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.foundation.upstream import patches
from lowmem_ft.virtual_gpu.device import registration
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.values import questions
from lowmem_ft.virtual_gpu.values.constant_propagation import MOST_ELEMENTS


@pytest.fixture(autouse=True)
def gpu():
    with VirtualGPU("t4") as gpu:
        yield gpu


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(8, device="cuda")


FINITE = {
    "isfinite": lambda x: torch.isfinite(x).all(),
    "method": lambda x: x.isfinite().all(),
    "not isnan": lambda x: not torch.isnan(x).any(),
    "not isinf": lambda x: not x.isinf().any(),
    "not isposinf": lambda x: not torch.isposinf(x.real).any(),
    "equal to itself": lambda x: (x == x).all(),
    "not different from itself": lambda x: not (x != x).any(),
    "below infinity": lambda x: (x.abs() < math.inf).all(),
    "above minus infinity": lambda x: (torch.tensor(-math.inf) < x.abs()).all(),
    "no NaN counted": lambda x: torch.isnan(x).sum() == 0,
    "all counted": lambda x: torch.isfinite(x).count_nonzero() == x.numel(),
    "neither": lambda x: (torch.isnan(x) | torch.isinf(x)).any().logical_not(),
    "both": lambda x: (~torch.isnan(x) & torch.isfinite(x)).all(),
    "along an axis": lambda x: torch.isfinite(x).all(dim=0),
    "stacked": lambda x: torch.stack([torch.isfinite(x).all(), torch.isfinite(x.sum())]).all(),
    "as integers": lambda x: torch.isfinite(x).int().min() == 1 if x.numel() < 99 else True,
    "one number": lambda x: torch.isfinite(x.sum()).item(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("size", [8, MOST_ELEMENTS + 1])
def test_numbers_are_finite(size, dtype, gpu):
    values = torch.randn(size, device="cuda").to(dtype).requires_grad_()
    answers = {name: bool(asks(values)) for name, asks in FINITE.items()}
    assert all(answers.values()), answers
    assert not any("False" in choice for choice in gpu.choices)


def test_known_numbers_that_are_not_finite_are_known():
    overflow = torch.tensor(math.inf, device="cuda")
    assert torch.isinf(overflow)
    assert not torch.isfinite(overflow * 0 + overflow)
    assert torch.isnan(torch.tensor(math.nan)).item() is True


def test_a_mask_that_something_unknown_is_put_into_is_unknown(hidden):
    finite = torch.isfinite(torch.randn(MOST_ELEMENTS + 1, device="cuda"))
    assert finite.all().item() is True
    finite &= torch.randn(MOST_ELEMENTS + 1, device="cuda") > 0
    assert finite.all().item() is False


def is_large(hidden) -> bool:
    return bool((hidden > 3).any())


def raises_if_any(hidden):
    if (hidden > 3).any():
        raise ValueError(f"values of {hidden.shape} are too large")


def raises_if_not_all(hidden):
    if not (hidden > 3).all().item():
        hidden.add(1)
        raise ValueError


def exits(hidden):
    if not torch.allclose(hidden, hidden + 1):
        raise SystemExit(1)


def raises_if_two(hidden):
    if hidden.dim() == 1 and (hidden > 3).any() and not (hidden < 3).all():
        raise ValueError


def raises_if_either(hidden):
    if (hidden > 3).any() or not (hidden < 3).all():
        raise ValueError


def raises_if_any_of(hidden):
    if any((part > 3).any() for part in hidden):
        raise ValueError


def raises_if_helper_says(hidden):
    if is_large(hidden):
        raise ValueError


def raises_if_nothing_is_found(hidden):
    if (hidden > 3).any():
        return
    raise ValueError


ASSERTS = """
assert (hidden == 0).all()
assert torch.equal(hidden, hidden + 1), "not equal"
assert not (hidden > 3).any()
assert is_large(hidden)
assert not is_large(hidden)
assert (hidden > 3).any() and (hidden < 3).any()
assert (hidden > 3).any() or (hidden < 3).any()
assert all(value > 3 for value in hidden), f"values of {hidden.shape if hidden.dim() else 0} are small"
assert (hidden > 3).sum()
"""


def asserts(hidden):
    exec(ASSERTS, {"hidden": hidden, "torch": torch, "is_large": is_large})


def asserts_in_a_test(hidden):
    """As pytest rewrites it."""
    assert (hidden == 0).all()
    assert not is_large(hidden), "too large"


def compares_in_tests(hidden):
    torch.testing.assert_close(hidden, hidden + 1)
    case = unittest.TestCase()
    case.assertTrue((hidden > 3).all())  # noqa: PT009
    case.assertFalse((hidden > 3).all())  # noqa: PT009


def clips(hidden):
    hidden.requires_grad_().sum().backward()
    nn.utils.clip_grad_norm_([hidden], 1.0, error_if_nonfinite=True)


def detects_anomalies(hidden):
    with torch.autograd.detect_anomaly(check_nan=True):
        hidden.requires_grad_().square().sum().backward()


CHECKS = [
    raises_if_any,
    raises_if_not_all,
    exits,
    raises_if_two,
    raises_if_either,
    raises_if_any_of,
    raises_if_helper_says,
    raises_if_nothing_is_found,
    asserts,
    asserts_in_a_test,
    compares_in_tests,
    clips,
    detects_anomalies,
]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("check", CHECKS)
def test_checks_pass(check, hidden, gpu):
    check(hidden)
    assert not gpu.choices


def test_what_is_no_check_is_answered_no_and_the_report_says_where(hidden, gpu):
    answer = "yes" if (hidden > 3).any() else "no"
    is_equal = torch.equal(hidden, hidden + 1)
    is_same = torch.equal(torch.arange(3), torch.arange(3).cuda().cpu())
    assert (answer, is_equal, is_same) == ("no", False, True)
    first, second = gpu.report().choices
    assert "test_questions.py:" in first
    assert '`answer = "yes" if (hidden > 3).any() else "no"`: a boolean' in first
    assert "`is_equal = torch.equal(hidden, hidden + 1)`" in second


@pytest.mark.parametrize("between", [registration, patches], ids=lambda module: module.__name__)
def test_calls_of_ours_in_between_are_not_the_line_that_asks(hidden, gpu, between):
    call_in(between)(bool, (hidden > 3).any())
    [choice] = gpu.report().choices
    assert "test_questions.py:" in choice
    assert "called from" not in choice


def test_an_early_return_before_a_check_is_not_one(hidden):
    def early(hidden):
        if (hidden > 3).any():
            return "early"
        if hidden.dim() != 1:
            raise ValueError
        return "late"

    assert early(hidden) == "late"


def test_an_integer_that_shapes_may_follow_from_is_told_of(hidden, gpu):
    class Picks(nn.Module):
        def forward(self, hidden):
            return hidden[: (hidden > 3).sum().item()]

    assert int((hidden > 3).sum()) == 1
    assert not gpu.choices
    Picks()(hidden)
    assert "an integer that a trace does not have was read as 1" in gpu.choices[0]


@pytest.mark.parametrize(
    "read", [lambda x: (x > 3).any(), lambda x: x.sum().item() > 1, lambda x: 3 in x.tolist()]
)
def test_a_loop_that_waits_for_values_ends_with_its_line(read, hidden, monkeypatch):
    monkeypatch.setattr(questions, "MOST_ROUNDS", 20)

    def wait():
        while True:
            if read(hidden):
                return

    with pytest.raises(UserError, match=r"test_questions.py:\d+.* 20 times.* `max_new_tokens`"):
        wait()


def test_loops_that_end_may_ask_often(hidden, monkeypatch):
    monkeypatch.setattr(questions, "MOST_ROUNDS", 20)

    def ask_twice():
        rounds = 0
        while rounds < 2 and not (hidden > 3).any():
            rounds += 1

    for _ in range(30):
        if hidden.sum().item() > 3:
            break
        ask_twice()
    rounds = 0
    while rounds < 3:
        assert len(torch.randn(50, device="cuda").tolist()) == 50
        rounds += 1


def test_a_call_without_an_answer_is_refused_with_its_line(hidden):
    with pytest.raises(
        ModelError, match=r"aten.bincount.default, .* at \S*test_questions.py:\d+ `torch.bincount"
    ):
        torch.bincount((hidden > 3).long())


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 5},
        {"max_length": 9, "do_sample": True},
        {"max_new_tokens": 5, "num_beams": 2},
        {"max_length": 9, "num_beams": 3, "num_return_sequences": 2, "early_stopping": True},
        {"max_new_tokens": 5, "num_beams": 2, "do_sample": True, "return_dict_in_generate": True},
    ],
    ids=str,
)
def test_generation_ends_at_its_length(options, gpu):
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    prompt_BT = torch.randint(3, 30, (2, 4), device="cuda")
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    generation = GenerationConfig(eos_token_id=2, pad_token_id=0, **options)
    result = gpu.place(model).generate(
        prompt_BT, attention_mask=torch.ones_like(prompt_BT), generation_config=generation
    )
    assert len(forwards) == 5
    sequences = result if isinstance(result, torch.Tensor) else result.sequences
    assert sequences.shape == (2 * options.get("num_return_sequences", 1), 4 + 5)

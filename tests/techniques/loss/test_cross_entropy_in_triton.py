"""The loss's Triton kernel in Triton's interpreter, beside torch's operations."""

import itertools
import logging
import os

import numpy as np
import pytest
import torch
from sweeps import few_quick

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.tensors import triton_use
from lowmem_ft.techniques.loss import cross_entropy_in_triton
from lowmem_ft.techniques.loss.cross_entropy import CrossEntropy, Head
from lowmem_ft.techniques.loss.cross_entropy_in_triton import CrossEntropyInTriton, cross_entropy_of
from lowmem_ft.techniques.loss.linear_cross_entropy import linear_cross_entropy_sum

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="Triton compiles where tests may need this machine's GPU: run with -m 'not gpu'",
)
pytest.importorskip("triton", reason="there is no Triton for this system")

BLOCK = 64
OPTIONS = (
    {},
    {"logit_softcap": 8.0},
    {"logit_scale": 0.25},
    {"label_smoothing": 0.1},
    {"logit_softcap": 30.0, "logit_scale": 4.0, "label_smoothing": 0.3},
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FACTORS = (1.0, 1 / 3, torch.tensor(1 / 3))


@pytest.fixture(autouse=True)
def _as_on_gpus(monkeypatch):
    """Short blocks, and bfloat16 rounded to nearest, which the interpreter cuts off."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def cast(builder, source, target):
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return stock(builder, source, target)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), target.scalar)

    stock = InterpreterBuilder.cast_impl
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast)
    monkeypatch.setattr(cross_entropy_in_triton.with_kernel, "BLOCK", BLOCK, raising=False)
    monkeypatch.setattr(triton_use, "_works", {})
    monkeypatch.setattr(triton_use, "_told", set())


def head_of(logit_softcap=None, logit_scale=1.0, label_smoothing=0.0, tile_rows=10**6):
    return Head(
        chunk_tokens=8,
        tile_rows=tile_rows,
        logit_softcap=logit_softcap,
        logit_scale=logit_scale,
        label_smoothing=label_smoothing,
        loss_factor=1.0,
    )


def both(vocabulary, factor=1.0, **options):
    head = head_of(**options)
    return CrossEntropyInTriton(head, vocabulary, factor), CrossEntropy(
        head, vocabulary, factor, torch.float32
    )


def drawn(num_tokens, vocabulary, dtype):
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(num_tokens, vocabulary, generator=generator)
    labels = torch.randint(vocabulary, (num_tokens,), generator=generator)
    borders = torch.tensor([0, vocabulary - 1, BLOCK - 1, BLOCK]).clamp(max=vocabulary - 1)
    labels[: len(borders)] = borders[:num_tokens]
    return logits.to(dtype), labels


def assert_near(found, expected):
    """Equal but for float32's roundings, which now and then round a 16-bit number the other way."""
    if expected.dtype != torch.float32:
        assert (found == expected).double().mean() > 0.99
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found, expected, rtol=2 * max(eps, 2**-19), atol=2**-22)


CASES = list(itertools.product(DTYPES, OPTIONS, FACTORS, ((5, 150), (1, 3), (4, 2 * BLOCK))))
MEETING = [case for number, case in enumerate(CASES) if number % 7 == 0]


@pytest.mark.parametrize("dtype, options, factor, shape", few_quick(CASES, MEETING))
def test_losses_and_gradients_are_those_of_the_operations(dtype, options, factor, shape):
    logits, labels = drawn(*shape, dtype)
    answers = []
    for entropy in both(shape[1], factor, **options):
        mine, unwanted = logits.clone(), logits.clone()
        losses = entropy.losses_(mine, labels, gradient=True)
        answers.append((losses, mine, entropy.losses_(unwanted, labels, gradient=False)))
    found, expected = answers
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert_near(one, other)
    assert torch.equal(found[0], found[2])
    if dtype != torch.float32:
        exact = logits.float()
        both(shape[1], factor, **options)[1].losses_(exact, labels, gradient=True)
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(found[1].float(), exact, rtol=0.51 * unit, atol=2**-24)  # one rounding


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_are_those_of_the_operations(dtype, options):
    logits, labels = drawn(7, 200, dtype)
    labels[:5] = torch.tensor([0, 95, 96, 191, 192])
    tiles = {first: logits[:, first : first + 96] for first in (0, 96, 192)}
    for first, tile in tiles.items():
        answers = []
        for entropy in both(200, 0.5, **options):
            log_sum, target = entropy.statistics_(tile.clone(), labels, first)
            gradient = tile.clone()
            entropy.gradient_(gradient, labels, first, log_sum + 1)
            answers.append((log_sum, target, gradient))
        for one, other in zip(*answers, strict=True):
            assert_near(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_of_longer_rows_is_written_and_nothing_beside_it(dtype):
    logits, labels = drawn(5, 100, dtype)
    padded = torch.full((5, 128), 7.0).to(dtype)
    padded[:, 20:120] = logits
    kernel, _ = both(100)
    losses = kernel.losses_(padded[:, 20:120], labels, gradient=True)
    assert torch.equal(losses, kernel.losses_(logits, labels, gradient=True))
    assert torch.equal(padded[:, 20:120], logits)
    assert (padded[:, :20] == 7).all()
    assert (padded[:, 120:] == 7).all()


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, which interprets
def test_logits_that_are_no_numbers_or_minus_infinity_count_as_in_the_operations():
    logits, labels = drawn(5, 200, torch.float32)
    logits[0, :BLOCK] = -torch.inf
    labels[0] = BLOCK
    logits[1, 70] = torch.nan
    logits[2, 70] = torch.inf
    answers = []
    for entropy in both(200):
        mine = logits.clone()
        answers.append((entropy.losses_(mine, labels, gradient=True), mine))
    for one, other in zip(*answers, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-19, atol=2**-22, equal_nan=True)


@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1 / 7, torch.tensor(1 / 7)])
def test_a_head_learns_the_same(tiles, dtype, factor):
    generator = torch.Generator().manual_seed(1)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_()
        for shape in ((7, 16), (200, 16), (200,))
    )
    labels = torch.randint(200, (7,), generator=generator)
    answers = []
    for kernel in ("untried", "eager"):
        loss = linear_cross_entropy_sum(
            hidden,
            weight,
            labels,
            bias_V=bias,
            chunk_tokens=3,
            vocabulary_tiles=tiles,
            loss_factor=factor,
            logit_scale=0.25,
            kernel=kernel,
        )
        answers.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias))))
    for one, other in zip(*answers, strict=True):
        unit = max(torch.finfo(one.dtype).eps, 2**-20)
        assert (one.double() - other.double()).norm() <= unit * other.double().norm()


def chosen(kernel="triton", dtype=torch.bfloat16, vocabulary=160, factor=1.0, **options):
    return cross_entropy_of(
        head_of(**options),
        vocabulary,
        factor,
        compute_dtype=dtype,
        device=torch.device("cpu"),
        kernel=kernel,
    )


@pytest.mark.parametrize("tile_rows", [80, 160])
@pytest.mark.parametrize("vocabulary", [160, 163], ids=["in vectors", "with a tail"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_passes_its_trial(dtype, vocabulary, tile_rows):
    for options, factor in zip((*OPTIONS, {"logit_softcap": 0.5}), 2 * FACTORS, strict=True):
        entropy = chosen(dtype=dtype, vocabulary=vocabulary, tile_rows=tile_rows, factor=factor, **options)
        assert isinstance(entropy, CrossEntropyInTriton)
    assert set(triton_use._works.values()) == {True}


def test_a_cpu_and_double_precision_compute_by_operations_without_a_word(caplog):
    assert isinstance(chosen("auto"), CrossEntropy)
    assert isinstance(chosen("untried", torch.float64), CrossEntropy)
    assert not caplog.text


@pytest.mark.parametrize("part", ["loss", "gradient"])
@pytest.mark.parametrize("tile_rows", [80, 160])
def test_a_kernel_that_computes_something_else_is_not_taken_and_told_once(
    part, tile_rows, monkeypatch, caplog
):
    monkeypatch.setattr(triton_use, "kernels_of", lambda device: "cuda")
    monkeypatch.setattr(triton_use, "_problem_of", lambda device: None)
    launch = cross_entropy_in_triton._cross_entropy_in_triton

    def wrong(logits, labels, log_sum, target, gradient, *others):
        launch(logits, labels, log_sum, target, gradient, *others)
        if part == "loss" and target is not None:
            target += 0.1
        if part == "gradient" and gradient:
            logits *= 1.01

    monkeypatch.setattr(cross_entropy_in_triton, "_cross_entropy_in_triton", wrong)
    with caplog.at_level(logging.WARNING):
        for factor in FACTORS:
            assert isinstance(chosen("auto", tile_rows=tile_rows, factor=factor), CrossEntropy)
    told = "The loss is computed by many small kernels, which takes longer than one Triton kernel: its kernel computes"
    assert caplog.text.count(f"{told} a different {part} from torch's operations") == 1
    with pytest.raises(UserError, match="The Triton cross entropy was requested, but its kernel computes"):
        chosen(tile_rows=tile_rows)

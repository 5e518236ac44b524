"""The chunked cross-entropy equals the plain one, in value and gradients, and keeps no logits."""

import itertools

import pytest
import torch
from sweeps import few_quick
from torch.nn import functional as F

from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.techniques.adapters.trained_rows import TrainedRows
from lowmem_ft.techniques.loss.linear_cross_entropy import linear_cross_entropy_sum

N, H, V = 37, 64, 50


def reference_sum(hidden, weight, labels, bias=None, softcap=None, scale=1.0, smoothing=0.0):
    logits = F.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)),
        labels,
        reduction="sum",
        label_smoothing=smoothing,
    )


def problem(dtype=torch.float32, n=N, h=H, v=V, bias=False):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(n, h, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(v, h, generator=generator) / h**0.5).to(dtype).requires_grad_()
    bias_v = torch.randn(v, generator=generator).to(dtype).requires_grad_() if bias else None
    return hidden, weight, bias_v, torch.randint(v, (n,), generator=generator)


def gradients(loss, *inputs):
    return torch.autograd.grad(loss, [tensor for tensor in inputs if tensor is not None])


CHUNKS, TILES = (1, 5, N - 1, N, 1000), (1, 2, 7, V)
OPTIONS = (
    {},
    {"logit_softcap": 2.0},
    {"logit_scale": 0.25},
    {"label_smoothing": 0.1},
    {"logit_softcap": 3.0, "logit_scale": 4.0, "label_smoothing": 0.3},
)
CASES = list(itertools.product(CHUNKS, TILES, OPTIONS, (False, True)))
MEETING = [
    (chunk_tokens, tiles, OPTIONS[(row + column) % len(OPTIONS)], bias)
    for (row, chunk_tokens), (column, tiles) in itertools.product(enumerate(CHUNKS), enumerate(TILES))
    for bias in (False, True)
]
"""Those of the cases in which any two values meet."""


@pytest.mark.parametrize("chunk_tokens, tiles, options, bias", few_quick(CASES, MEETING))
def test_equals_plain_cross_entropy_in_double(chunk_tokens, tiles, options, bias):
    hidden, weight, bias_v, labels = problem(torch.float64, bias=bias)
    ours = linear_cross_entropy_sum(
        hidden, weight, labels, bias_V=bias_v, chunk_tokens=chunk_tokens, vocabulary_tiles=tiles, **options
    )
    plain = reference_sum(
        hidden,
        weight,
        labels,
        bias_v,
        options.get("logit_softcap"),
        options.get("logit_scale", 1.0),
        options.get("label_smoothing", 0.0),
    )
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=0)
    for mine, theirs in zip(
        gradients(3.5 * ours, hidden, weight, bias_v),
        gradients(3.5 * plain, hidden, weight, bias_v),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_tokens", [64, 512])
@pytest.mark.parametrize("tiles", [1, 4])
def test_half_precision_errs_no_more_than_the_plain_path(dtype, chunk_tokens, tiles):
    hidden, weight, _, labels = problem(dtype, n=512, h=64, v=1000)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact = reference_sum(*exact_inputs, labels)
    exact_gradients = gradients(exact / 512, *exact_inputs)
    ours = linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens, vocabulary_tiles=tiles)
    plain = reference_sum(hidden, weight, labels)
    assert ours.dtype == torch.float32
    # The logits are rounded alike in both; 1.1 leaves room for where chance favours one of them.
    assert abs(ours.item() - exact.item()) <= 1.1 * abs(plain.item() - exact.item()) + 1e-6 * exact.item()
    ours_gradients = gradients(ours / 512, hidden, weight)
    for mine, theirs, truth in zip(
        ours_gradients, gradients(plain / 512, hidden, weight), exact_gradients, strict=True
    ):
        assert mine.dtype == dtype
        # Shares of a gradient (by chunk or by tile) are rounded, and their sum once more: sqrt(2) of one rounding.
        assert (mine.double() - truth).norm() <= 1.5 * (theirs.double() - truth).norm()


def test_weight_gradient_of_many_small_chunks_is_summed_in_fp32():
    hidden, weight, _, labels = problem(torch.bfloat16, n=2048, h=32, v=64)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    (truth,) = gradients(reference_sum(*exact_inputs, labels), exact_inputs[1])
    (mine,) = gradients(linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=8), weight)
    bf16_rounding = 2.0**-8
    assert (mine.double() - truth).norm() / truth.norm() < 1.5 * bf16_rounding


@pytest.mark.parametrize("dtype, factor", [(torch.float16, 2.0**17), (torch.bfloat16, 1 / 3)])
def test_scale_of_the_loss_is_applied_in_fp32(dtype, factor):
    """An fp16 loss scale may be beyond fp16, and one part in three has more digits than bf16."""
    hidden, weight, _, labels = problem(dtype)
    weight = (weight.detach() * 2.0**-8).requires_grad_()
    (unit,) = gradients(linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=8), hidden)
    (scaled,) = gradients(factor * linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=8), hidden)
    assert scaled.isfinite().all()
    assert torch.equal(scaled, (unit.float() * torch.tensor(factor)).to(dtype))


def test_frozen_weight_and_frozen_input_get_no_gradient():
    hidden, weight, _, labels = problem()
    full = gradients(linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=8), hidden, weight)
    weight.requires_grad_(False)
    (alone,) = gradients(linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=8), hidden)
    assert torch.equal(alone, full[0])
    weight.requires_grad_()
    (alone,) = gradients(linear_cross_entropy_sum(hidden.detach(), weight, labels, chunk_tokens=8), weight)
    assert torch.equal(alone, full[1])


def test_second_backward_is_refused():
    hidden, weight, _, labels = problem()
    loss = linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=8)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run the forward pass again"):
        loss.backward()


def test_autocast_computes_in_its_type_and_returns_the_weights_type():
    hidden, weight, bias, labels = problem(n=512, h=64, v=1000, bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy_sum(hidden, weight, labels, bias_V=bias, chunk_tokens=100)
        plain = reference_sum(hidden, weight, labels, bias)
    exact = reference_sum(hidden, weight, labels, bias)
    assert ours.item() == pytest.approx(plain.item(), rel=1e-5)
    assert ours.item() != exact.item(), "computed in fp32"
    truths = gradients(exact, hidden, weight, bias)
    rivals = gradients(plain, hidden, weight, bias)
    for mine, theirs, truth in zip(gradients(ours, hidden, weight, bias), rivals, truths, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - truth).norm() <= 1.1 * (theirs - truth).norm()


def test_only_gradients_are_kept_for_backward():
    n, h, v, chunk = 256, 8, 1024, 16
    hidden, weight, _, labels = problem(n=n, h=h, v=v)
    with StorageTracker() as tracker:
        loss = linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk)
        scalar = 4
        assert tracker.live_bytes == 4 * (n * h + v * h) + scalar
        assert tracker.peak_bytes < 4 * (n * h + v * h) + 1.1 * 4 * chunk * v
        loss.backward()
        assert tracker.live_bytes == 4 * (n * h + v * h) + scalar, "the buffers became the gradients"


@pytest.mark.parametrize("chunk_tokens", [16, 256])
@pytest.mark.parametrize("tiles", [1, 4])
def test_half_precision_gradients_are_finished_in_forward(chunk_tokens, tiles):
    n, h, v = 256, 8, 1024
    hidden, weight, _, labels = problem(torch.bfloat16, n=n, h=h, v=v)
    with StorageTracker() as tracker:
        loss = linear_cross_entropy_sum(
            hidden, weight, labels, chunk_tokens=chunk_tokens, vocabulary_tiles=tiles
        )
        assert tracker.live_bytes == 2 * n * h + 2 * v * h + loss.nbytes
        loss.backward()
        assert tracker.live_bytes == 2 * n * h + 2 * v * h + loss.nbytes


def test_tiles_bound_what_is_held_beside_the_gradients():
    n, h, v, chunk, tiles = 128, 64, 4096, 32, 16
    hidden, weight, _, labels = problem(torch.bfloat16, n=n, h=h, v=v)
    with StorageTracker() as tracker:
        linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk, vocabulary_tiles=tiles)
    gradients_and_sum = 2 * n * h + 2 * v * h + 4 * n * h
    tile = v // tiles
    waiting_and_one_tile = 2 * n * tile + 2 * tile * h
    at_work = max((2 + 4) * chunk * tile, 2 * n * tile)  # a chunk in fp32, or what waited joined together
    slack = 4 * chunk * h + 64 * n  # a product before it is summed; a few numbers for each token
    assert tracker.peak_bytes <= gradients_and_sum + waiting_and_one_tile + at_work + slack


@pytest.mark.parametrize("tiles", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_frozen_weight_have_their_part_of_the_gradient(tiles, dtype):
    hidden, weight, _, labels = problem(dtype, n=64, h=8, v=1024)
    options = {"chunk_tokens": 16, "vocabulary_tiles": tiles}
    of_hidden, whole = gradients(linear_cross_entropy_sum(hidden, weight, labels, **options), hidden, weight)
    frozen = weight.detach()
    rows = TrainedRows(torch.nn.Parameter(frozen[200:600]), range(200, 600))  # the first three of four tiles
    loss = linear_cross_entropy_sum(hidden, frozen, labels, trained_rows=rows, **options)
    mine_of_hidden, mine = gradients(loss, hidden, rows.parameter_RH)
    assert torch.equal(mine_of_hidden, of_hidden)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(mine, whole[200:600], rtol=4 * eps, atol=4 * eps)


def test_what_waits_of_trained_rows_keeps_no_logits():
    n, h, v, num_rows = 96, 64, 4096, 256
    hidden, weight, _, labels = problem(torch.bfloat16, n=n, h=h, v=v)
    frozen = weight.detach()
    peaks = []
    for rows in (None, TrainedRows(torch.nn.Parameter(frozen[:num_rows]), range(num_rows))):
        with StorageTracker() as tracker:
            linear_cross_entropy_sum(hidden, frozen, labels, chunk_tokens=32, trained_rows=rows)
        peaks.append(tracker.peak_bytes)
    waiting = 2 * n * (num_rows + h)
    assert peaks[1] - peaks[0] < 2 * waiting + 4 * num_rows * h


class Served:
    """Head tiles from elsewhere, which write down what is asked of them."""

    def __init__(self, weight):
        self.stored, self.gradient = weight.detach().clone(), torch.zeros_like(weight)
        self.asked, self.given = [], []

    def weight(self, rows):
        self.asked.append((rows.start, rows.stop))
        return self.stored[rows].clone()

    def sum_of(self, rows):
        return None

    def add_gradient(self, rows, d_weight_WH):
        self.given.append((rows.start, rows.stop))
        self.gradient[rows] += d_weight_WH


@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_served_from_elsewhere_gets_the_same_gradient_tile_by_tile(tiles, dtype):
    hidden, weight, _, labels = problem(dtype)
    options = {"chunk_tokens": 8, "vocabulary_tiles": tiles, "loss_factor": 1 / N}
    resident = linear_cross_entropy_sum(hidden, weight, labels, **options)
    expected = gradients(resident, hidden, weight)
    served = Served(weight)
    loss = linear_cross_entropy_sum(
        hidden, weight.detach().zero_().requires_grad_(), labels, head_tiles=served, **options
    )
    (d_hidden,) = gradients(loss, hidden)
    assert torch.equal(loss, resident)
    assert torch.equal(d_hidden, expected[0])
    assert torch.equal(served.gradient, expected[1])
    bounds = [(0, 20), (20, 40), (40, 50)] if tiles == 3 else [(0, V)]
    assert served.given == bounds[::-1]
    assert served.asked == (bounds if tiles == 1 else bounds + bounds[::-1])


@pytest.mark.parametrize("h", [1, 24, 80, 256])
def test_tiles_begin_where_a_block_of_optimizer_state_does(h):
    hidden, weight, _, labels = problem(h=h, v=1000)
    served = Served(weight)
    linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=8, vocabulary_tiles=3, head_tiles=served)
    starts = [start for start, _ in served.given]
    assert len(starts) in (2, 3)
    assert all(start * h % 256 == 0 for start in starts)


def test_a_served_fp32_weight_under_autocast():
    hidden, weight, _, labels = problem()
    options = {"chunk_tokens": 8, "vocabulary_tiles": 3}
    served = Served(weight)
    with torch.autocast("cpu", torch.bfloat16):
        resident = linear_cross_entropy_sum(hidden, weight, labels, **options)
        loss = linear_cross_entropy_sum(hidden, weight, labels, head_tiles=served, **options)
    expected = gradients(resident, hidden, weight)
    (d_hidden,) = gradients(loss, hidden)
    assert torch.equal(d_hidden, expected[0])
    assert torch.equal(served.gradient, expected[1])


def test_a_frozen_or_untrained_weight_from_elsewhere_is_only_read():
    hidden, weight, _, labels = problem()
    frozen = Served(weight)
    linear_cross_entropy_sum(
        hidden, weight.detach(), labels, chunk_tokens=8, vocabulary_tiles=2, head_tiles=frozen
    ).backward()
    evaluated = Served(weight)
    with torch.no_grad():
        linear_cross_entropy_sum(
            hidden, weight, labels, chunk_tokens=8, vocabulary_tiles=2, head_tiles=evaluated
        )
    assert frozen.given == evaluated.given == []
    assert evaluated.asked == [(0, 28), (28, 50)]


def test_a_factor_behind_a_served_weights_gradient_is_refused():
    hidden, weight, _, labels = problem()
    loss = linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=8, head_tiles=Served(weight))
    with pytest.raises(RuntimeError, match="an unscaled loss"):
        (2 * loss).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [0.125, torch.tensor(0.125)])
def test_the_factor_inside_is_the_factor_outside(dtype, factor):
    hidden, weight, _, labels = problem(dtype)
    inside = linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=8, loss_factor=factor)
    outside = factor * linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=8)
    assert torch.equal(inside, outside)
    for ours, theirs in zip(
        gradients(inside, hidden, weight), gradients(outside, hidden, weight), strict=True
    ):
        assert torch.equal(ours, theirs)  # a power of two: nothing rounds


def test_without_grad_nothing_is_kept():
    hidden, weight, _, labels = problem()
    with torch.no_grad(), StorageTracker() as tracker:
        loss = linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=8)
        assert tracker.live_bytes == loss.nbytes
    assert loss.item() == pytest.approx(reference_sum(hidden, weight, labels).item(), rel=1e-6)

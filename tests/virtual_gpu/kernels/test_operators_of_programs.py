"""Operators that programs call, forward and backward: each is traced, or refused in a line of ours."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.virtual_gpu.gpu import VirtualGPU


def real(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", requires_grad=True)


def whole(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(below, shape, device="cuda")


def image() -> torch.Tensor:
    return real(2, 4, 8, 8)


def ctc(input_lengths, target_lengths, **settings):
    return F.ctc_loss(
        real(50, 4, 20).log_softmax(2), whole(19, 4, 10), input_lengths, target_lengths, **settings
    )


def packed(kind, lengths, **settings):
    sequences = pack_padded_sequence(real(5, 3, 8), lengths, **settings)
    return pad_packed_sequence(kind(8, 16, bidirectional=True).cuda()(sequences)[0])[0]


TRACED = {
    "gru": lambda: nn.GRU(8, 16, 2, bidirectional=True).cuda()(real(5, 3, 8))[0],
    "gru in float16": lambda: nn.GRU(8, 16).cuda().half()(real(5, 3, 8).half())[0],
    "gru cell": lambda: nn.GRUCell(8, 16, bias=False).cuda()(real(3, 8)),
    "lstm": lambda: nn.LSTM(8, 16).cuda()(real(5, 3, 8))[0],
    "rnn": lambda: nn.RNN(8, 16).cuda()(real(5, 3, 8))[0],
    "packed gru": lambda: packed(nn.GRU, [5, 3, 2]),
    "packed lstm": lambda: packed(nn.LSTM, torch.tensor([2, 5, 3]), enforce_sorted=False),
    "packed rows": lambda: nn.GRU(8, 16).cuda()(pack_sequence([real(5, 8), real(3, 8)]))[0].data,
    "multi_margin_loss": lambda: F.multi_margin_loss(real(4, 10), whole(10, 4)),
    "multilabel_margin_loss": lambda: F.multilabel_margin_loss(real(4, 10), whole(10, 4, 10)),
    "ctc_loss, lengths on the host": lambda: ctc(torch.full((4,), 50), torch.tensor([10, 10, 9, 8])),
    "ctc_loss, lengths on the device": lambda: ctc(whole(50, 4), whole(10, 4), zero_infinity=True),
    "ctc_loss, lengths as numbers": lambda: ctc((50,) * 4, (10,) * 4, reduction="sum"),
    "embedding_bag": lambda: nn.EmbeddingBag(100, 8).cuda()(whole(100, 4, 10)),
    "conv3d": lambda: nn.Conv3d(4, 8, 3).cuda()(real(2, 4, 8, 8, 8)),
    "conv_transpose": lambda: nn.ConvTranspose2d(4, 8, 3).cuda()(image()),
    "max_pool": lambda: nn.MaxPool2d(2).cuda()(image()),
    "fractional_max_pool": lambda: nn.FractionalMaxPool2d(2, output_size=3).cuda()(image()),
    "adaptive_max_pool": lambda: nn.AdaptiveMaxPool2d(3).cuda()(image()),
    "fractional_max_pool3d": lambda: nn.FractionalMaxPool3d(2, output_size=3)(real(2, 4, 8, 8, 8)),
    "batch_norm": lambda: nn.BatchNorm2d(4).cuda()(image()),
    "instance_norm": lambda: nn.InstanceNorm2d(4).cuda()(image()),
    "interpolate": lambda: F.interpolate(image(), scale_factor=2, mode="bicubic"),
    "grid_sample": lambda: F.grid_sample(image(), real(2, 5, 5, 2)),
    "fold": lambda: F.fold(F.unfold(image(), 3), (8, 8), 3),
    "cdist": lambda: torch.cdist(real(4, 8), real(5, 8)),
    "kl_div": lambda: F.kl_div(real(4, 8).log_softmax(1), real(4, 8).softmax(1)),
    "triplet_margin_loss": lambda: F.triplet_margin_loss(real(4, 8), real(4, 8), real(4, 8)),
    "svd": lambda: torch.linalg.svd(real(6, 6))[1],
    "solve": lambda: torch.linalg.solve(real(4, 4), real(4, 2)),
    "lstsq": lambda: torch.linalg.lstsq(real(2, 6, 4), real(2, 6, 3))[0],
    "fft": lambda: torch.fft.rfft(real(4, 16)).abs(),
    "cumprod": lambda: real(4, 8).cumprod(1),
    "median": lambda: real(4, 8).median(1)[0],
    "scatter_reduce": lambda: real(4, 8).scatter_reduce(1, whole(8, 4, 3), real(4, 3), "amax"),
    "gamma": lambda: torch.distributions.Gamma(real(4).exp(), real(4).exp()).rsample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(real(4).exp()).rsample(),
    "rrelu": lambda: nn.RReLU().cuda()(real(4, 8)),
    "adaptive_softmax": lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10]).cuda()(
        real(6, 8), whole(20, 6)
    )[1],
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).cuda()(real(2, 4)),
}


def per_sample_gradients():
    """As tutorials compute them: a model without state, whose gradient is mapped over the rows."""
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)).cuda()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights, row, label):
        return F.cross_entropy(torch.func.functional_call(model, weights, (row[None],)), label[None])

    of_rows = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, real(6, 8), whole(3, 6))
    assert of_rows["0.weight"].shape == (6, 4, 8)
    return of_rows["0.weight"].mean(0) * real(4, 8)


TRACED["per-sample gradients"] = per_sample_gradients

REFUSED = {
    "dense tensors, and not sparse": lambda: nn.Embedding(100, 8, sparse=True).cuda()(whole(100, 4)),
    "no rule for it": lambda: torch.nested.nested_tensor([torch.randn(3, 4)]).cuda(),
}


@pytest.mark.parametrize("program", TRACED.values(), ids=TRACED)
def test_an_operator_is_traced_with_its_gradient(program):
    with VirtualGPU("t4") as gpu:
        program().float().sum().backward()
    assert gpu.report().allocated_peak_bytes


@pytest.mark.parametrize("shapes", [((6, 4), (6, 3)), ((2, 6, 4), (2, 6)), ((4, 6), (4, 1))], ids=str)
def test_least_squares_have_the_shapes_of_a_real_run(shapes):
    real_ones = torch.linalg.lstsq(*(torch.randn(shape) for shape in shapes), driver="gels")
    with VirtualGPU("t4") as gpu:
        traced = torch.linalg.lstsq(*(torch.randn(shape, device="cuda") for shape in shapes))
    assert [each.shape for each in traced] == [each.shape for each in real_ones]
    assert not gpu.trace().assumed_largest


def test_layers_without_sizes_are_refused_in_a_line():
    with (
        pytest.raises(UserError, match="such as LazyLinear, which makes them at the first batch"),
        VirtualGPU(),
    ):
        nn.LazyLinear(4)


@pytest.mark.parametrize("words, program", REFUSED.items(), ids=REFUSED)
def test_what_a_trace_cannot_follow_is_said_in_one_line_with_its_place(words, program):
    with pytest.raises(ModelError, match=words) as caught, VirtualGPU("t4"):
        program().sum().backward()
    (problem,) = caught.value.problems
    assert __file__.rpartition("/")[2] in problem
    assert "\n" not in problem
    assert "dispatch" not in problem

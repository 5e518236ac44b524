"""Launches by the compiled kernel: the same bits after one look at arguments, Triton's own where that is not safe."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("liger_kernel", reason="Liger needs Triton, which this system has not")

from transcribed_liger import launch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from lowmem_ft.foundation.tensors import prepared_launch
from lowmem_ft.foundation.tensors.prepared_launch import PreparedLaunch
from lowmem_ft.techniques.kernels import liger_functions as ours

KEPT = (ours._norming, ours._norming_backward, ours._gating, ours._turning)


class Compiled:
    """What a launch hands out: it takes all arguments by their places, as Triton's compiled kernel does."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        assert len(grid) == 3
        self.launches.append("compiled")
        return lambda *arguments: launch(self.kernel, *arguments, grid=grid[:1])


@pytest.fixture
def launches():
    """The ways of all launches, in their order."""
    launches = []

    def run(kernel, *arguments, **options):
        launches.append("Triton")
        launch(kernel, *arguments, **options)
        return Compiled(kernel, launches)

    with mock.patch.object(JITFunction, "run", run), mock.patch.object(InterpretedFunction, "run", run):
        for kept in KEPT:
            kept.cache_clear()
        yield launches
    for kept in KEPT:
        kept.cache_clear()


def both_passes(function, inputs):
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    outputs = function(*(leaf * 1 for leaf in leaves))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(
        outputs, [torch.linspace(-1, 1, one.numel()).view(one.shape).to(one) for one in outputs]
    )
    return [one.detach() for one in outputs], [leaf.grad for leaf in leaves]


def norm(settings):
    return lambda x, w: ours._Norm.apply(x, w, *settings)


def turn(q, k):
    angles = torch.linspace(0, 3, 48).view(1, 6, 8)
    return ours.rotary(q.transpose(1, 2), k.transpose(1, 2), angles.cos(), angles.sin())


CASES = {
    "norm": (norm((1e-6, 0.0, "llama", False, None)), [(2, 12, 32), (32,)]),
    "norm in place": (norm((1e-6, 1.0, "gemma", True, None)), [(2, 12, 32), (32,)]),
    "norm of blocks": (norm((1e-6, 0.0, "llama", False, None)), [(4096 * 8 + 8, 8), (8,)]),
    "gate": (ours.SwiGLU.apply, [(2, 5, 40), (2, 5, 40)]),
    "rotary": (turn, [(2, 6, 3, 8), (2, 6, 2, 8)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_kernel_gives_the_same_bits_and_is_looked_up_once(launches, case, dtype):
    function, shapes = CASES[case]
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    first = both_passes(function, inputs)
    assert launches == ["Triton"] * 2, "forward and backward"
    assert_close(both_passes(function, inputs), first, rtol=0, atol=0)
    assert launches[2:] == ["compiled"] * 2
    others = [one.double().to(torch.float16) for one in inputs]
    both_passes(function, others)
    assert launches[4:] == ["Triton"] * 2, "another type needs another variant"


def test_rows_of_another_number_are_another_launch(launches):
    for tokens in (5, 6, 5, 6):
        ours.SwiGLU.apply(torch.ones(2, tokens, 40), torch.ones(2, tokens, 40))
    assert launches == ["Triton", "Triton", "compiled", "compiled"]


def test_an_address_that_is_not_aligned_is_left_to_triton(launches):
    aligned, shifted = torch.ones(40), torch.ones(41)[1:]
    for gate in (shifted, aligned, aligned, shifted):
        ours.SwiGLU.apply(gate, aligned)
    assert launches == ["Triton", "Triton", "compiled", "Triton"]


@pytest.mark.parametrize("hooks", [(), (print,)])
def test_a_hook_in_front_of_launches_sees_all_of_them(hooks):
    kernel = mock.MagicMock(arg_names=["x", "SIZE"], pre_run_hooks=list(hooks))
    launch = PreparedLaunch(kernel, {"SIZE": 4, "num_warps": 2})
    for _ in range(3):
        launch.run(1, (torch.ones(4),), "x")
    seen = kernel.__getitem__.return_value
    assert seen.call_args_list == [mock.call("x", SIZE=4, num_warps=2)] * (3 if hooks else 1)
    compiled = seen.return_value.__getitem__.return_value
    assert compiled.call_args_list == [mock.call("x", 4)] * (0 if hooks else 2)


def test_a_triton_that_hands_out_no_compiled_kernel_is_named_once(caplog):
    caplog.set_level(logging.INFO)
    prepared_launch._say_that_none_came.cache_clear()
    kernel = mock.MagicMock()
    kernel.__getitem__.return_value = lambda *arguments, **options: object()
    for _ in range(2):
        PreparedLaunch(kernel, {}).run(1, (torch.ones(4),), "x")
    assert caplog.text.count("returns no compiled kernel") == 1

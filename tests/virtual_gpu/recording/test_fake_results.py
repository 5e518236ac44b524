"""Results that a trace makes itself are those of torch's own fake mode: shapes, storages, and who shares one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import varlen

from lowmem_ft.foundation.tensors.operator_costs import register_operator_cost
from lowmem_ft.virtual_gpu.calls import fake_results
from lowmem_ft.virtual_gpu.calls.fake_results import FakeResults
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine
from lowmem_ft.virtual_gpu.upstream.fake_tensor_patches import FakeMode

aten = torch.ops.aten


def f32(*shape):
    return torch.empty(shape)


def bf16(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)


def int64(*shape):
    return torch.empty(shape, dtype=torch.int64)


CALLS = {
    "sum": (aten.add.Tensor, lambda: (f32(3, 1), f32(4))),
    "promotion": (aten.mul.Tensor, lambda: (bf16(3), f32(3))),
    "promotion by a number": (aten.mul.Tensor, lambda: (int64(3), 2.0)),
    "not by an integer": (aten.mul.Tensor, lambda: (int64(3), 2)),
    "single number": (aten.mul.Tensor, lambda: (bf16(3), f32())),
    "single integer": (aten.add.Tensor, lambda: (int64(3), torch.empty((), dtype=torch.bool))),
    "strides": (aten.relu.default, lambda: (f32(4, 3).t(),)),
    "channels last": (aten.relu.default, lambda: (f32(2, 3, 4, 5).to(memory_format=torch.channels_last),)),
    "product": (aten.mm.default, lambda: (bf16(2, 3), bf16(3, 4))),
    "several": (aten.native_layer_norm.default, lambda: (bf16(2, 8), [8], None, None, 1e-5)),
    "in place": (aten.mul_.Tensor, lambda: (f32(2, 3)[:, 1:], 2.0)),
    "copy": (aten.copy_.default, lambda: (f32(2, 3)[1], bf16(3))),
    "list in place": (aten._foreach_add_.Scalar, lambda: ([f32(2), f32(3)], 1.0)),
    "list": (aten._foreach_mul.Scalar, lambda: ([f32(2), bf16(3)], 1.0)),
    "slice": (aten.slice.Tensor, lambda: (f32(4, 6), 1, 2, 5)),
    "view": (aten.view.default, lambda: (f32(2, 6)[1:], [3, 2])),
    "bytes": (aten.view.dtype, lambda: (torch.empty(8, dtype=torch.uint8)[4:], torch.float32)),
    "parts": (aten.split.Tensor, lambda: (f32(5, 2), 2)),
    "expanded": (aten.expand.default, lambda: (f32(1, 3), [4, 3])),
    "unsafe view": (aten._unsafe_view.default, lambda: (f32(4, 3), [12])),
    "detached": (aten.detach.default, lambda: (f32(3),)),
    "empty": (aten.empty.memory_format, lambda: ([2, 3],)),
    "resized": (aten.resize_.default, lambda: (f32(2), [5])),
    "squeezed in place": (aten.squeeze_.default, lambda: (f32(1, 3),)),
    "integers of a range": (aten.arange.start_step, lambda: (0, 7, 2)),
    "indexed": (aten.index.Tensor, lambda: (f32(4, 3), [int64(2)])),
}


def facts(value, storages, arguments):
    """Everything of a result but its values."""
    if isinstance(value, (list, tuple)):
        return type(value), [facts(item, storages, arguments) for item in value]
    if not isinstance(value, Tensor):
        return value
    assert type(value) is FakeTensor
    storage = value.untyped_storage()
    passed = next((at for at, argument in enumerate(arguments) if argument is value), None)
    return (
        *(passed, storages.get(storage._cdata), storage.nbytes(), value.storage_offset()),
        *(value.shape, value.stride(), value.dtype, value.device, value.layout),
        *(torch._C._dispatch_keys(value), value.requires_grad),
        sorted(name for name, item in vars(value).items() if item is not None and name != "_known_values"),
    )


def outcome(mode, call, make):
    """The facts of an operator's result and of its arguments afterwards; which storages they share."""
    with mode:
        arguments = make()
        func, calls = call, fake_results_of(mode)
        result, _ = calls.call(func, arguments, {})
        flat = [item for each in arguments for item in (each if isinstance(each, list) else [each])]
        tensors = [item for item in flat if isinstance(item, Tensor)]
        storages = {tensor.untyped_storage()._cdata: at for at, tensor in enumerate(tensors)}
        return facts(result, storages, arguments), [facts(tensor, storages, ()) for tensor in tensors]


def fake_results_of(mode):
    return mode.results if hasattr(mode, "results") else AskTorch()


class AskTorch:
    def call(self, func, args, kwargs):
        return func(*args, **kwargs), None


@pytest.fixture
def mode(monkeypatch):
    monkeypatch.setattr(fake_results, "_SEEN", {})
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.results = FakeResults(mode, "cpu")
    return mode


@pytest.mark.parametrize("name", CALLS)
def test_a_result_made_again_is_torchs_own(mode, name):
    func, make = CALLS[name]
    expected = outcome(FakeTensorMode(), func, make)
    assert [outcome(mode, func, make) for _ in range(3)] == [expected] * 3


def test_calls_that_differ_in_one_thing_do_not_stand_for_each_other(mode):
    """In the order of ``CALLS`` and one after the other: what the first leaves behind would serve the others."""
    variants = [
        lambda: (f32(2, 3), 1),
        lambda: (bf16(2, 3), 1),
        lambda: (int64(2, 3), 1),
        lambda: (int64(2, 3), 1.0),
        lambda: (int64(2, 3), True),
        lambda: (torch.empty((2, 3), dtype=torch.bool), True),
        lambda: (torch.empty((2, 3), dtype=torch.bool), 1),
        lambda: (f32(3, 2).t(), 1),
        lambda: (f32(2, 3), f32()),
        lambda: (bf16(2, 3), f32()),
        lambda: (bf16(2, 3), f32(1)),
    ]
    for make in variants * 2:
        assert outcome(mode, aten.mul.Tensor, make) == outcome(FakeTensorMode(), aten.mul.Tensor, make)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            with mode:
                result, _ = mode.results.call(aten.mul.Tensor, (int64(3), 2.0), {})
        finally:
            torch.set_default_dtype(torch.float32)
        assert result.dtype == dtype


def test_the_result_of_an_out_operator_is_what_was_passed(mode):
    with mode:
        for _ in range(3):
            same = f32(3)  # first, so that it is not said which of the two is passed on
            assert mode.results.call(aten.relu.out, (same,), {"out": same})[0] is same
            other = f32(3)
            assert mode.results.call(aten.relu.out, (same,), {"out": other})[0] is other
            left, out = f32(2, 2), f32(2, 2)
            assert mode.results.call(aten.mul.out, (left, f32(2, 2)), {"out": out})[0] is out
            # The same call but for who is who.
            assert mode.results.call(aten.mul.out, (left, f32(2, 2)), {"out": left})[0] is left
            small = f32(1)
            assert mode.results.call(aten.mul.out, (left, left), {"out": small.resize_(0)})[0] is small
            assert small.shape == (2, 2)


def test_an_operator_is_called_once_and_then_remembered(mode):
    with mode:
        first = mode.results.call(aten.mul.Tensor, (f32(3), 2.0), {})[1]
        assert first is not None
        assert (
            mode.results.call(aten.mul.Tensor, (f32(3), 3.0), {})[1] is first
        )  # which number does not matter
        assert mode.results.call(aten.mul.Tensor, (f32(3), 3), {})[1] is not first
        assert mode.results.call(aten.pow.Tensor_Scalar, (f32(3), 2), {})[1] is not first
        # A number decides how many there are.
        assert mode.results.call(aten.arange.default, (5.0,), {})[0].shape == (5,)
        assert mode.results.call(aten.arange.default, (7.0,), {})[0].shape == (7,)


def test_what_values_decide_is_asked_each_time(mode):
    with mode:
        known = torch.tensor(2.0)  # torch keeps its value
        assert known.constant is not None
        assert mode.results.call(aten.mul.Tensor, (known, known), {})[1] is None
        mask = torch.empty(4, dtype=torch.bool)
        for func, args in (
            (aten.nonzero.default, (mask,)),
            (aten.index.Tensor, (f32(4), [mask])),
            (aten._local_scalar_dense.default, (f32(),)),
            (aten.equal.default, (f32(2), f32(2))),
        ):
            with pytest.raises(RuntimeError):  # torch's word for it
                mode.results.call(func, args, {})


def test_inference_mode_and_real_tensors_are_left_to_torch(mode):
    real = torch.ones(3)
    with mode:
        assert mode.results.call(aten.mul.Tensor, (f32(3), real), {})[1] is None
        with torch.inference_mode():
            assert mode.results.call(aten.relu.default, (f32(3),), {})[0].is_inference()
        assert not mode.results.call(aten.relu.default, (f32(3),), {})[0].is_inference()


def test_memory_of_calls_has_an_end(mode, monkeypatch):
    monkeypatch.setattr(fake_results, "MOST_CALLS", 4)
    with mode:
        for size in range(20):
            assert mode.results.call(aten.relu.default, (f32(size),), {})[0].shape == (size,)
            assert len(fake_results._SEEN["cpu", None]) <= 4


def test_nothing_of_a_trace_is_kept_alive():
    with TracingMachine() as machine:
        hidden = torch.empty(64)
        for _ in range(3):
            (hidden * 2).relu_()
        del hidden
        timeline = machine.recorder.timeline
    born = [index for kind, index in timeline.events if kind == "malloc"]
    assert sorted(index for kind, index in timeline.events if kind == "free") == born


def test_another_machine_remembers_but_has_its_own_device():
    def devices(machine):
        with machine:
            return [(torch.ones(3, device=machine.device) * 2).device for _ in range(2)]

    assert devices(VirtualGPU("t4")) == devices(VirtualGPU("l4")) == [torch.device("vgpu", 0)] * 2
    assert devices(TracingMachine()) == [torch.device("cpu")] * 2


def test_operators_from_elsewhere_are_asked_unless_their_author_says_what_counts():
    asked: list[int] = []

    def fake(tensor, seed):
        asked.append(seed)
        return torch.empty_like(tensor)

    library = torch.library.Library("fake_results_test", "DEF")
    for name in ("untold", "told"):
        library.define(f"{name}(Tensor tensor, int seed) -> Tensor")
        torch.library.register_fake(f"fake_results_test::{name}", fake, lib=library)
    ops = torch.ops.fake_results_test
    register_operator_cost(ops.told.default, moved_bytes=lambda tensor, seed: 7, irrelevant=["seed"])
    with VirtualGPU("t4") as gpu:
        hidden = torch.empty(4, device=gpu.device)
        for seed in range(3):
            ops.untold(hidden, seed)
        assert asked == [0, 1, 2]
        for seed in range(3):
            ops.told(hidden, seed)
        assert asked == [0, 1, 2, 0]
        ops.told(hidden[1:], 0)
        assert asked == [0, 1, 2, 0, 0]
    assert [entry.num_bytes for entry in gpu.work.entries if entry.name == "told"] == [7] * 4


@pytest.fixture
def asked(monkeypatch):
    """The names of operators whose results torch's fake mode was asked for."""
    names: list[str] = []
    ask = FakeMode.__torch_dispatch__

    def spy(self, func, types, args=(), kwargs=None):
        names.append(func.name())
        return ask(self, func, types, args, kwargs)

    monkeypatch.setattr(fake_results, "_SEEN", {})
    monkeypatch.setattr(FakeMode, "__torch_dispatch__", spy)
    return names


def test_attention_over_documents_is_asked_once_for_each_length_of_the_longest(asked):
    with VirtualGPU("a100-80gb") as gpu:
        rows = torch.zeros(16, 2, 16, dtype=torch.bfloat16, device=gpu.device)
        for longest in (8, 8, 12, 8):
            borders = torch.tensor([0, longest, 16], dtype=torch.int32).to(gpu.device)
            varlen.varlen_attn(rows, rows, rows, borders, borders, longest, longest)
    flops = [entry.flops for entry in gpu.work.entries if "_varlen_attn" in entry.name]
    assert flops[0] == flops[1] == flops[3] < flops[2]
    assert asked.count("torch_attn::_varlen_attn") == 2


def test_unpacking_four_bits_is_asked_once_for_each_shape(asked):
    pytest.importorskip("bitsandbytes")
    with VirtualGPU("a100-80gb") as gpu:
        for rows in (8, 8, 4, 8):
            packed = torch.zeros(8 * rows, 1, dtype=torch.uint8, device=gpu.device)
            scales = torch.zeros(rows // 4, device=gpu.device)
            weight = torch.ops.bitsandbytes.dequantize_4bit(
                packed, scales, 64, "nf4", [rows, 16], torch.bfloat16
            )
            assert weight.shape == (rows, 16)
    assert asked.count("bitsandbytes::dequantize_4bit") == 2

"""What the operators say that they take, move and launch, beside what their implementations do."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem_ft.foundation.tensors.operator_costs import registered_cost
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.optimizers.formats.operators import BLOCK, IMPLEMENTATIONS
from lowmem_ft.virtual_gpu.costs.operator_work import work_of
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

N = 64 * BLOCK


def tensors(device="cpu", num_elements=N):
    def zeros(dtype, length=num_elements):
        return torch.zeros(length, dtype=dtype, device=device)

    value, weight, scale = (
        zeros(torch.float32),
        zeros(torch.bfloat16),
        zeros(torch.float32, -(-num_elements // BLOCK)),
    )
    low16, low8, codes, unsigned = map(zeros, (torch.int16, torch.int8, torch.int8, torch.uint8))
    return {
        "read_copy": (weight, value),
        "read_split": (weight, low16),
        "write_split16": (value, weight, low16),
        "write_split24": (value, weight, low8, 5, 0),
        "write_nearest": (value, weight),
        "write_stochastic": (value, weight, 5, 0),
        "read_blocks": (codes, scale, True),
        "write_blocks": (value, codes, scale, True, 5, 0),
        "read_blocks unsigned": (unsigned, scale, False),
        "write_blocks unsigned": (value, unsigned, scale, False, 5, 0),
    }


def operator(case):
    return getattr(torch.ops.lowmem_ft, case.split()[0]).default


class Traffic(TorchDispatchMode):
    """Bytes that the kernels inside read and write, and how many kernels they are on CUDA."""

    num_bytes = 0
    launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        work = work_of(func, args, kwargs or {}, result, device_type="cpu")
        if work is not None:
            self.num_bytes += work.num_bytes
            self.launches += work.num_launches
        return result


def test_every_operator_is_tried():
    assert {case.split()[0] for case in tensors()} == set(IMPLEMENTATIONS)


@pytest.mark.parametrize("case", tensors())
def test_temporaries_on_the_virtual_gpu_are_those_of_the_implementation(case):
    arguments = tensors()[case]
    with StorageTracker() as tracker:
        IMPLEMENTATIONS[case.split()[0]](*arguments)
        taken = tracker.peak_bytes
    gpu = VirtualGPU("a100-80gb")
    with gpu:
        arguments = tensors(gpu.device)[case]
        timeline = gpu.recorder.timeline
        num_events = len(timeline.events)
        result = operator(case)(*arguments)
        new = [index for kind, index in timeline.events[num_events:] if kind == "malloc"]
        traced = sum(timeline.allocations[index].size_bytes for index in new)
    assert result is None or (result.dtype, result.shape) == (torch.float32, (N,))
    assert traced == taken


@pytest.mark.parametrize("case", tensors())
def test_traffic_is_that_of_the_implementation(case):
    arguments = tensors()[case]
    with Traffic() as traffic:
        IMPLEMENTATIONS[case.split()[0]](*arguments)
    stated = registered_cost(operator(case)).moved_bytes(*arguments)
    assert traffic.num_bytes == pytest.approx(stated, rel=0.35 if "unsigned" in case else 0.01)


@pytest.mark.parametrize("num_elements", [N, N - 100], ids=["whole blocks", "a ragged one"])
@pytest.mark.parametrize("case", tensors())
def test_launches_are_those_of_the_implementation(case, num_elements):
    arguments = tensors(num_elements=num_elements)[case]
    with Traffic() as traffic:
        IMPLEMENTATIONS[case.split()[0]](*arguments)
    gpu = VirtualGPU("a100-80gb")
    with gpu:
        operator(case)(*tensors(gpu.device, num_elements)[case])
    assert gpu.recorder.work.entries[-1].launches == traffic.launches > 1

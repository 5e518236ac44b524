"""Values of another type that are written by index are refused as torch refuses them, on a traced CPU and a GPU."""

from __future__ import annotations

import pytest
import torch

from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine

aten = torch.ops.aten
MACHINES = {"cpu": TracingMachine, "cuda": lambda: VirtualGPU("a100-80gb")}


def index(device):
    return torch.zeros(2, dtype=torch.long, device=device)


def set_items(into, values, device):
    into[index(device)] = values


WRITES = {
    "index_add": lambda into, values, device: into.index_add(0, index(device), values),
    "index_add_": lambda into, values, device: into.index_add_(0, index(device), values, alpha=2),
    "index_copy": lambda into, values, device: into.index_copy(0, index(device), values),
    "index_reduce_": lambda into, values, device: into.index_reduce_(0, index(device), values, "prod"),
    "index_put": lambda into, values, device: into.index_put((index(device),), values),
    "index_put_": lambda into, values, device: into.index_put_((index(device),), values, accumulate=True),
    "_index_put_impl_": lambda into, values, device: aten._index_put_impl_(into, [index(device)], values),
    "_unsafe_index_put": lambda into, values, device: aten._unsafe_index_put(into, [index(device)], values),
    "put_": lambda into, values, device: into.put_(index(device), values[:, 0]),
    "setitem": set_items,
}


def said(write, device, dtype):
    """Return torch's words about a write of this type into float32; None: it takes it."""
    into, values = torch.zeros(4, 3, device=device), torch.zeros(2, 3, dtype=dtype, device=device)
    try:
        write(into, values, device)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("device", MACHINES)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_by_index_is_taken_or_refused_as_by_torch(write, device, dtype):
    really = said(write, "cpu", dtype)
    assert (really is None) == (dtype == torch.float32)
    with MACHINES[device]():
        assert said(write, device, dtype) == really

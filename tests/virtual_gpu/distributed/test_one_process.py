"""A program that trains in a process group of one, as scripts for several GPUs do on one."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

WIDTH = 64
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
JOINED_BY = {
    "variables, or none": {},
    "an address": {"init_method": "tcp://127.0.0.1:29555", "rank": 0, "world_size": 1},
    "a device": {"device_id": torch.device("cuda", 0)},
}


@pytest.mark.parametrize("how", JOINED_BY.values(), ids=JOINED_BY)
def test_one_process_exchanges_what_it_has_with_itself(how):
    excepthook = sys.excepthook
    with VirtualGPU("t4"):
        assert dist.is_nccl_available()
        dist.init_process_group("nccl", **how)
        assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("nccl", 0, 1)
        tensor = torch.ones(4, device="cuda", dtype=torch.long)
        dist.all_reduce(tensor, group=dist.new_group([0], backend="gloo"))
        assert tensor.tolist() == [1] * 4
        gathered, objects = [torch.empty_like(tensor)], [None]
        dist.all_gather(gathered, tensor)
        dist.barrier(device_ids=[0])
        dist.all_gather_object(objects, {"score": 3})
        dist.broadcast_object_list(objects, src=0)
        assert objects == [{"score": 3}]
    assert not dist.is_initialized()
    assert not dist.is_nccl_available()
    assert sys.excepthook is excepthook


@pytest.mark.parametrize(
    "settings",
    [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"static_graph": True}],
)
def test_a_model_wrapped_for_one_process_has_buckets_for_its_gradients(settings):
    with VirtualGPU("t4") as gpu:
        dist.init_process_group("nccl")
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).to(0)
        model = DistributedDataParallel(model, device_ids=[0], **settings)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            model(torch.randn(8, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.destroy_process_group()
    assert gpu.report().by_category_at_peak["communication"] >= LAYER_BYTES


def test_a_hook_for_sums_is_left_out_and_said_so():
    with VirtualGPU("t4") as gpu:
        dist.init_process_group("nccl")
        model = DistributedDataParallel(nn.Linear(4, 4).cuda())
        model.register_comm_hook(None, lambda state, bucket: pytest.fail("it is called"))
        model(torch.randn(2, 4, device="cuda")).sum().backward()
    assert any("communication hook is left out" in choice for choice in gpu.choices)


def test_a_group_of_several_is_refused():
    with VirtualGPU("t4"), pytest.raises(UserError, match="one GPU of one process, got a process group of 2"):
        dist.init_process_group("nccl", rank=0, world_size=2, init_method="tcp://127.0.0.1:29556")

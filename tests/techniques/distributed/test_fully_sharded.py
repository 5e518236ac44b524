"""What FSDP2 leaves in a process: its share of what stays, and of a layer what the technique beside it keeps."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from lowmem_ft.techniques.distributed.config import DistributedConfig
from lowmem_ft.techniques.distributed.fully_sharded import enable_fsdp2
from lowmem_ft.virtual_gpu.costs.one_process import one_of_several

SMALL = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=64,
    tie_word_embeddings=True,
)

TECHNIQUES = {
    "none": {},
    "full": {"checkpointing": "full"},
    "selective": {"checkpointing": "selective"},
    "vertical": {"checkpointing": "full", "vertical": True},
    "offloaded": {"checkpointing": "full", "offload": True},
    "tiled": {"checkpointing": "full", "tiles": 4},
}

KEPT = """
import gc, json, os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.optimizers import OptimizerConfig, create_optimizer
from lowmem_ft.foundation.tensors.local_shards import local_part
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.techniques.distributed.config import DistributedConfig
from lowmem_ft.techniques.loss.config import LossConfig
from lowmem_ft.techniques.offload.config import OffloadConfig
from lowmem_ft.techniques.tiling.config import TilingConfig
from lowmem_ft.techniques.offload.activation_offload import enable_activation_offload
from lowmem_ft.techniques.checkpointing import enable_checkpointing
from lowmem_ft.techniques.distributed.fully_sharded import enable_fsdp2
from lowmem_ft.techniques.loss.chunked_loss import enable_chunked_loss
from lowmem_ft.techniques.tiling.tiled_mlp import enable_tiled_mlp
from lowmem_ft.techniques.accumulation.vertical_accumulation import enable_vertical_accumulation

folder, techniques = sys.argv[1], json.loads(sys.argv[2])
world = int(os.environ["WORLD_SIZE"])
shape = LlamaConfig(hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
                    num_key_value_heads=2, vocab_size=128, use_cache=False, attn_implementation="sdpa")

def measured(sharded, checkpointing="none", vertical=False, offload=False, tiles=1):
    torch.manual_seed(0)
    model = LlamaForCausalLM(shape).train()
    enable_tiled_mlp(model, TilingConfig(mlp=tiles))
    enable_checkpointing(model, CheckpointingConfig(mode=checkpointing))
    if offload:
        enable_activation_offload(model, OffloadConfig(activations="inputs"), HostMemory(torch.device("cpu")))
    if vertical:
        enable_vertical_accumulation(model, 1, keeps_inputs_alone=True)
    enable_chunked_loss(model, LossConfig(chunk_tokens=64))
    if sharded:
        enable_fsdp2(model, DistributedConfig(), init_device_mesh("cpu", (world,)))
    optimizer = create_optimizer(model, OptimizerConfig(), learning_rate=1e-3)
    ids = torch.randint(128, (8, 32))
    tracker = StorageTracker()

    def live_bytes():
        if sharded:
            dist.barrier()  # gloo's threads let go of what they have sent, each at its own time
        gc.collect()
        return tracker.live_bytes

    with tracker:
        for _ in range(2):
            gc.collect()
            before = tracker.live_bytes
            loss = model(input_ids=ids, labels=ids).loss
            kept = min(live_bytes() for _ in range(5)) - before
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    weights = sum(local_part(p).untyped_storage().nbytes() for p in model.parameters())
    state = sum(t.nbytes for values in optimizer.state.values() for t in values.values() if torch.is_tensor(t))
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())  # as if it were whole
    return {"kept": kept, "weights": weights, "state": state, "layer": layer}

if sharded := sys.argv[3] != "0":
    dist.init_process_group("gloo")
results = {technique: measured(sharded, **options) for technique, options in techniques.items()}
if os.environ["RANK"] == "0":
    json.dump(results, open(f"{folder}/kept.json", "w"))
"""


@pytest.fixture(scope="module")
def measured_in(forks, tmp_path_factory):
    """Bytes of the first of so many processes that share the model; 0: of one that has it alone."""

    @functools.cache
    def measured(world):
        folder = tmp_path_factory.mktemp("kept")
        for done in forks.run_several(world or 1, KEPT, str(folder), json.dumps(TECHNIQUES), f"{world}"):
            assert done.returncode == 0, done.stderr
        return json.loads((folder / "kept.json").read_text())

    return measured


@pytest.fixture
def measured(measured_in):
    """By the number of processes that share the model, or "alone": bytes of the first."""
    return {"alone": measured_in(0), 3: measured_in(3)}


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", TECHNIQUES)
def test_forward_keeps_for_backward_what_it_keeps_without(measured_in, name, world):
    """Except for gathered weights outside the layers, which stay until backward: here one norm of 64 numbers."""
    beyond = measured_in(world)[name]["kept"] - measured_in(0)[name]["kept"]
    assert 0 <= beyond <= 1024


def test_checkpointing_still_frees_most_of_what_layers_keep(measured):
    """Or the test above would compare nothing."""
    kept = {name: measured[3][name]["kept"] for name in TECHNIQUES}
    assert kept["full"] < kept["selective"] < kept["none"] / 4
    assert kept["vertical"] < kept["none"] / 10


def test_each_process_holds_its_share_of_weights_and_state(measured):
    """Three processes of 64 rows: the first has 22, so that it holds 1/3 and a little."""
    alone, shared = measured["alone"]["full"], measured[3]["full"]
    for part in ("weights", "state"):
        assert shared[part] <= alone[part] / 3 * 66 / 64 + 1
    assert shared["kept"] <= alone["kept"] + alone["layer"]


BESIDE_ADAPTERS = """
import gc, os, sys, weakref, torch, torch.distributed as dist
from pathlib import Path
from typing import Any
from torch.distributed.device_mesh import init_device_mesh
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.lora import enable_lora
from lowmem_ft.techniques.distributed.config import DistributedConfig
from lowmem_ft.techniques.distributed.fully_sharded import enable_fsdp2
folder = Path(sys.argv[1])
sys.path.append(sys.argv[2])
from tiny_models import tiny_llama

dist.init_process_group("gloo")
mesh, is_main = init_device_mesh("cpu", (2,)), dist.get_rank() == 0
model = tiny_llama()
lora = enable_lora(model, AdapterConfig(name="lora", modules_to_save=("embed_tokens", "lm_head")))
names, whole = list(lora.parameters()), [weakref.ref(one) for one in model.parameters()]
(folder / "whole").mkdir(exist_ok=True)
lora.save(folder / "whole", writes=is_main)
enable_fsdp2(model, DistributedConfig(), mesh)
gc.collect()
assert not [one for one in whole if one() is not None]
assert list(lora.parameters()) == names
(folder / "shared").mkdir(exist_ok=True)
lora.save(folder / "shared", writes=is_main)

model = tiny_llama()
enable_lora(model, AdapterConfig(name="lora", train_new_tokens=True), new_rows=range(60, 64))
try:
    enable_fsdp2(model, DistributedConfig(), mesh)
except UserError as error:
    print(error)
"""


def test_modules_trained_whole_beside_adapters_are_shared_and_saved_but_single_rows_refused(forks, tmp_path):
    for done in forks.run_two(BESIDE_ADAPTERS, str(tmp_path), str(Path(__file__).parents[2])):
        assert done.returncode == 0, done.stderr
        assert "Set adapter.train_new_tokens=false" in done.stdout
    whole, shared = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "shared"))
    assert "base_model.model.lm_head.weight" in shared
    assert shared.keys() == whole.keys()
    assert all(torch.equal(shared[name], whole[name]) for name in whole)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_sums_of_processes_are_plain_sums_in_float32_with_nccl_too(backend, monkeypatch):
    """With a divisor torch would take NCCL's mean, or a product before the sum, where gloo has neither."""
    ops, reduced = [], []

    def noted(reduce, *args, **kwargs):
        ops.append(kwargs["op"])
        return reduce(*args, **kwargs)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.c10d._reduce_scatter_base_.default:
                reduced.append((args[1].dtype, args[0].dtype))
            elif func.overloadpacket in (torch.ops.aten.div_, torch.ops.aten.mul_) and reduced:
                reduced.append((args[0].dtype, args[1]))  # a sum that is scaled
            return func(*args, **(kwargs or {}))

    # The later name first; the other calls it, where there are both.
    name = next(name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name))
    monkeypatch.setattr(dist, name, functools.partial(noted, getattr(dist, name)))
    monkeypatch.setattr(dist, "get_backend", lambda *_: backend)
    model: Any = LlamaForCausalLM(SMALL)
    model.to(torch.bfloat16)
    with one_of_several(2, 0):
        enable_fsdp2(model, DistributedConfig(), init_device_mesh("cpu", (2,)))
        ids = torch.randint(64, (1, 8))
        loss = model(input_ids=ids, labels=ids).loss
        with Seen():
            loss.backward()
    assert ops == [dist.ReduceOp.SUM] * 3  # of two layers, and of the rest
    assert reduced == [(torch.float32, torch.float32)] * 3

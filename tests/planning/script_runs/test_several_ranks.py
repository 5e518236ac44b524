"""A script as one of several ranks: it holds the bytes of ranks that train over gloo, and its peers answer it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from measuring.real_ranks import run_ranks_for_real

from lowmem_ft.cli.commands.estimate import main
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.planning.script_runs import estimate_script

SHARE = 0.001
"""What a phase's peak may differ by: numbers that libraries keep for the log, and tensors of a few bytes."""

JOIN = """
    import os
    import torch
    import torch.distributed as dist

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
"""

DDP = (
    JOIN
    + """
    from torch.nn.parallel import DistributedDataParallel

    layers = [torch.nn.Linear(512, 512) for _ in range(8)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(kind), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for rows in (64, 96, 64):
        model(torch.randn(rows, 512, device=kind)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
)

FSDP2 = (
    JOIN
    + """
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=2049))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for length in (48, 64, 48):
        ids = torch.randint(0, 2049, (2, length), device=kind)
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""
)

GLOO_FOR_GPUS = """
    import accelerate.state
    from accelerate.utils import DistributedType

    def init(self, *args, init=accelerate.state.AcceleratorState.__init__, **kwargs):
        state = accelerate.state.PartialState(kwargs.get("cpu", True))
        state.distributed_type = DistributedType.MULTI_GPU  # else Accelerate leaves FSDP out
        init(self, *args, **kwargs)

    if SHARDED:
        accelerate.state.AcceleratorState.__init__ = init
"""

TRAINER = (
    GLOO_FOR_GPUS
    + """
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=2048))
    rows = [{"input_ids": [1] * length, "labels": [1] * length} for length in [48] * 8 + [64] * 24]
    layers = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, train_sampling_strategy="sequential",
        **(dict(fsdp=True, fsdp_config=layers) if SHARDED else {}),
    )
    Trainer(model, arguments, train_dataset=rows).train()
"""
)

SFT = (
    GLOO_FOR_GPUS
    + """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=2048))
    rows = Dataset.from_dict({"text": ["This is a text. " * (4 + number % 3) for number in range(32)]})
    layers = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    arguments = SFTConfig(
        "out", max_length=64, per_device_train_batch_size=2, max_steps=3, report_to="none", save_strategy="no",
        use_cpu=True, bf16=False, disable_tqdm=True, gradient_checkpointing=False,
        **(dict(fsdp=True, fsdp_config=layers) if SHARDED else {}),
    )
    SFTTrainer(
        model, args=arguments, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained("model"),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    ).train()
"""
)

SCRIPTS = {
    "DDP": DDP,
    "FSDP2": FSDP2,
    "Trainer with DDP": TRAINER.replace("SHARDED", "False"),
    "Trainer with FSDP2": TRAINER.replace("SHARDED", "True"),
    "SFT with LoRA and FSDP2": SFT.replace("SHARDED", "True"),
}


@pytest.mark.parametrize(
    "name",
    [name if name in ("DDP", "FSDP2") else pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS],
)
def test_a_rank_takes_on_this_machine_what_its_estimate_says(script, name, monkeypatch):
    monkeypatch.setattr(AcceleratorState, "__init__", AcceleratorState.__init__)  # which some scripts replace
    path = script(SCRIPTS[name])
    found = estimate_script(path, gpu="2xcpu")
    real, other = run_ranks_for_real(2, path)
    assert found.steps == real.steps == other.steps == 3
    assert found.kept_bytes == pytest.approx(real.kept_bytes, rel=SHARE)
    phases = {**found.estimate.by_phase}
    assert {"load", "forward", "backward", "optimizer_step"} <= phases.keys() <= real.by_phase.keys()
    assert phases == pytest.approx({phase: real.by_phase[phase] for phase in phases}, rel=SHARE)
    processes = found.estimate.processes
    assert processes is not None
    assert processes.strategy == ("fsdp2" if "FSDP2" in name else "ddp")
    assert found.to_json()["script"]["num_processes"] == 2


def test_the_last_rank_is_told_where_it_has_fewer_rows(script):
    uneven = estimate_script(script(FSDP2), gpu="2xt4").estimate
    even = estimate_script(script(FSDP2.replace("2049", "2048")), gpu="2xt4").estimate
    assert uneven.processes is not None
    assert even.processes is not None
    assert 0 < uneven.processes.last_peak_bytes <= uneven.process_peak_bytes
    assert even.processes.last_peak_bytes == 0
    assert even.machine_host_bytes == 2 * even.host_peak_bytes


EXCHANGES = (
    JOIN
    + """
    from torch.distributed.fsdp import fully_shard

    assert torch.cuda.device_count() == world == 3
    told = [f"by rank {rank}" if rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    assert told == ["by rank 0"]
    part = [None]
    dist.scatter_object_list(part, ["a", "b", "c"] if rank == 0 else None, src=0)
    assert part == ["abc"[rank]]
    every = [None] * world
    dist.all_gather_object(every, {"of": rank})
    assert every == [{"of": rank}] * world
    own, each = torch.tensor([rank + 4], device=kind), [torch.empty(1, dtype=torch.long, device=kind) for _ in range(3)]
    dist.all_gather(each, own)
    together = torch.empty(3, dtype=torch.long, device=kind)
    dist.all_gather_into_tensor(together, own)
    assert [one.item() for one in each] == together.tolist() == [rank + 4] * world
    assert dist.get_rank(dist.new_group([rank])) == 0
    assert dist.new_group([(rank + 1) % world]) == dist.GroupMember.NON_GROUP_MEMBER
    dist.barrier()
    model = fully_shard(torch.nn.Linear(4, 4).to(kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.ones(2, 4, device=f"{kind}:{rank}")).sum().backward()
        optimizer.step()
"""
)


def test_peers_have_what_a_rank_has_and_the_last_one_receives_what_the_first_has_sent(script):
    """Rows of 4 cut in three: the script runs once more, as rank 2."""
    found = estimate_script(script(EXCHANGES), gpu="3xt4").estimate
    assert found.processes is not None
    assert found.processes.last_peak_bytes
    assert any("one of 3 processes, as torchrun" in choice for choice in found.choices)


def test_each_rank_takes_its_own_gpu_and_groups_are_no_larger_than_the_launch(script):
    with pytest.raises(UserError, match="rank 0 asks for cuda:1"):
        estimate_script(script('import torch; torch.ones(1, device="cuda:1")'), gpu="2xt4")
    larger = 'import torch; torch.distributed.init_process_group("nccl", rank=0, world_size=4, init_method="tcp://a:1")'
    with pytest.raises(UserError, match="There are 2 GPUs with one process each, got a process group of 4"):
        estimate_script(script(larger), gpu="2xt4")


SPAWN = """
    import torch
    import torch.distributed as dist

    def train(rank, world):
        dist.init_process_group("nccl", rank=rank, world_size=world)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).to(rank), device_ids=[rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.randn(4, 64).to(rank)).sum().backward()
            optimizer.step()

    world = torch.cuda.device_count()
    torch.multiprocessing.spawn(train, args=(world,), nprocs=NUMBER)
"""


def test_processes_that_a_script_starts_itself_are_the_ranks(script):
    found = estimate_script(script(SPAWN.replace("NUMBER", "world")), gpu="4xl4").estimate
    assert found.processes is not None
    assert found.processes.strategy == "ddp"
    sums = 4 * (64 * 64 + 64)
    assert found.step is not None
    assert found.step.sent_bytes == 2 * sums * 3 // 4
    with pytest.raises(UserError, match="There are 4 GPUs with one process each, but the script starts 3"):
        estimate_script(script(SPAWN.replace("NUMBER", "3")), gpu="4xl4")


CONFIG = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_cpu_ram_efficient_loading": False,
    },
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 2,
}


@pytest.mark.parametrize("version", [2, 1])
def test_a_config_of_accelerate_decides_how_a_trainer_shards(script, version, capsys):
    config = {**CONFIG, "fsdp_config": {**CONFIG["fsdp_config"], "fsdp_version": version}}
    Path("fsdp.json").write_text(json.dumps(config), encoding="utf-8")
    path = script(TRAINER.replace("SHARDED", "False").replace("use_cpu=True, ", ""))
    assert main(["--script", path, "--gpu", "l4", "--accelerate-config", "fsdp.json", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["processes"]["num_processes"] == found["script"]["num_processes"] == 2
    assert found["processes"]["strategy"] == {2: "fsdp2", 1: "fsdp"}[version]
    words = " ".join(found["choices"])
    assert "one of 2 processes, as accelerate launch --config_file fsdp.json starts them" in words
    assert ("first version is traced" in words) == (version == 1)
    assert found["attach"] is None


REFUSED = {
    "DeepSpeed": ({"distributed_type": "DEEPSPEED"}, None, "DeepSpeed, whose engine cannot be traced"),
    "TPUs": ({"distributed_type": "XLA"}, None, "for TPUs"),
    "processors": ({"use_cpu": True}, None, "for processors"),
    "machines": ({"num_machines": 2}, None, "GPUs of one machine, got num_machines: 2"),
    "another number": ({}, 4, "got 4 GPUs and num_processes: 2"),
    "unknown": ({"no_such_key": 1}, None, "Accelerate does not take config.json: .*no_such_key"),
}


@pytest.mark.parametrize("changes, number, words", REFUSED.values(), ids=REFUSED)
def test_a_config_that_cannot_be_estimated_is_refused_by_name(script, changes, number, words):
    Path("config.json").write_text(json.dumps({**CONFIG, **changes}), encoding="utf-8")
    gpu = "t4" if number is None else f"{number}xt4"
    with pytest.raises(UserError, match=words):
        estimate_script(script("print()"), gpu=gpu, accelerate_config="config.json")


_AXES = "from accelerate.parallelism_config import ParallelismConfig; ParallelismConfig({})"
ENGINES = {
    "DeepSpeed by arguments": (
        """
        import json
        from pathlib import Path
        from transformers import TrainingArguments

        Path("zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
        TrainingArguments("out", deepspeed="zero.json")
        """,
        "DeepSpeed's engine cannot be traced.*FSDP2",
    ),
    "DeepSpeed by its plugin": (
        "from accelerate import DeepSpeedPlugin; DeepSpeedPlugin(zero_stage=3)",
        "DeepSpeed's engine cannot be traced.*FSDP2",
    ),
    "tensor parallel": (
        "from transformers.distributed import DistributedConfig; DistributedConfig(enable_expert_parallel=True)",
        r"spreads over GPUs \(tp_plan, distributed_config\) are not followed.*FSDP2",
    ),
    "context parallel": (_AXES.format("cp_size=2"), "not followed by an estimate, got cp_size=2"),
    "axes": (_AXES.format("dp_shard_size=3"), "got dp_shard_size=3 for 2, one on each GPU"),
}


@pytest.mark.parametrize("text, words", ENGINES.values(), ids=ENGINES)
def test_an_engine_that_cannot_be_followed_is_refused_by_name(script, text, words):
    with pytest.raises(UserError, match=words) as caught:
        estimate_script(script(text), gpu="2xt4")
    assert "(at train.py:" in str(caught.value)


def test_axes_that_multiply_to_the_gpus_are_taken(script):
    text = _AXES.format("dp_shard_size=2") + "; 1/0"
    with pytest.raises(UserError, match="ZeroDivisionError"):
        estimate_script(script(text), gpu="2xt4")


LACKS = {
    "network": (
        'import urllib.request; urllib.request.urlopen("http://nowhere.invalid")',
        r"it needs a network, and reaches none here: .*URLError.* \(at train.py:1\)$",
    ),
    "package": (
        "def go():\n    import no_such_package\ngo()",
        r"needs the package no_such_package.*\(at train.py:2\)$",
    ),
    "part of a package": (
        "import torch.no_such_part",
        r"needs torch.no_such_part, which torch \d\S* does not have \(at train.py:1\)$",
    ),
    "processes": (
        "import os\nif not os.fork():\n    os._exit(0)\nos.wait()",
        r"it starts one at train.py:2\.$",
    ),
}


@pytest.mark.parametrize("text, words", LACKS.values(), ids=LACKS)
def test_what_a_script_lacks_is_a_line(script, text, words):
    with pytest.raises(UserError, match=words) as caught:
        estimate_script(script(text), gpu="t4")
    assert not getattr(caught.value, "own_traceback", "")

"""Models whose weights are loaded to files have the same weights, and little of them in RAM."""

from __future__ import annotations

import os

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from lowmem_ft.foundation.host.mapped_files import MappedFiles, is_in_file
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.units import MIB
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.models.loading import load_model
from lowmem_ft.models.weights_on_disk import weights_in_files

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 96}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 2}
CONFIGS = {
    "tied": LlamaConfig(**SIZES, num_hidden_layers=2, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(**SIZES, **MIXTURE, num_hidden_layers=2),
}


def saved(folder, config):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def host(disk_folder):
    return HostMemory(CPU, files=MappedFiles(disk_folder))


def load(folder, host=None, **options):
    config = ModelConfig(name_or_path=str(folder), **options)
    with weights_in_files(host or HostMemory(CPU)):
        return load_model(config, load_model_config(config), attn_implementation="sdpa", device=CPU, seed=1)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "weights": "random"},
        {"quantization": "nf4"},
        {"quantization": "int8", "quantize_partly": True},
    ],
    ids=lambda options: " ".join(str(value) for value in options.values() if value is not True),
)
def test_every_weight_lies_in_a_file_and_is_what_it_would_be_in_ram(kind, options, host, tmp_path):
    if "quantization" in options:
        pytest.importorskip("bitsandbytes")
    folder = saved(tmp_path / "model", CONFIGS[kind])
    expected, model = load(folder, **options), load(folder, host, **options)
    weights = dict(model.named_parameters())
    assert all(is_in_file(weight) for weight in weights.values())
    assert host.bytes_by_category == {"parameter": sum(weight.nbytes for weight in weights.values())}
    for name, weight in expected.named_parameters():
        assert not is_in_file(weight)
        assert torch.equal(weights[name], weight), name
        assert type(weights[name]) is type(weight)
        assert weights[name].requires_grad == weight.requires_grad
    if options.get("quantization") == "int8":
        assert all(
            weight.CB is None or is_in_file(weight.CB) for weight in weights.values() if hasattr(weight, "CB")
        )
    ids = torch.arange(10).view(1, 10)
    assert torch.equal(model(ids).logits, expected(ids).logits)


def test_tied_weights_share_a_file(host, tmp_path):
    model = load(saved(tmp_path / "model", CONFIGS["tied"]), host)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_without_files_nothing_is_done_otherwise(tmp_path):
    model = load(saved(tmp_path / "model", CONFIGS["tied"]))
    assert not any(is_in_file(weight) for weight in model.parameters())


def test_modules_made_afterwards_are_in_ram_and_the_environment_is_as_before(host, monkeypatch):
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "0")
    with weights_in_files(host):
        assert is_in_file(torch.nn.Linear(2, 3).weight)
    assert not is_in_file(torch.nn.Linear(2, 3).weight)
    assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "0"


# In a process of its own, as one that has loaded other models before has freed memory to use again.
MEASURE_LOAD = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.host.mapped_files import MappedFiles
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.loading import load_model
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.models.weights_on_disk import weights_in_files

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

class Host(HostMemory):
    most = 0
    def allocate(self, *args):
        self.most = max(self.most, anonymous_bytes())
        return super().allocate(*args)

folder, disk = sys.argv[1:]
host = Host(torch.device("cpu"), files=MappedFiles(Path(disk)))
config = ModelConfig(name_or_path=folder, dtype="bfloat16")
hf_config = load_model_config(config)
with torch.device("meta"):
    AutoModelForCausalLM.from_config(hf_config)
before = anonymous_bytes()
with weights_in_files(host):
    load_model(config, hf_config, attn_implementation="sdpa", device=host.device, seed=0)
print(host.peak_file_bytes, max(host.most, anonymous_bytes()) - before)
"""


def test_while_a_model_is_loaded_ram_holds_a_tensor_or_two_of_it(forks, disk_folder, tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 4, "vocab_size": 96}
    folder = saved(tmp_path / "model", LlamaConfig(**sizes, num_hidden_layers=12))
    done = forks.run(MEASURE_LOAD, str(folder), str(disk_folder))
    assert done.returncode == 0, done.stderr
    file_bytes, anonymous_bytes = map(int, done.stdout.split())
    assert file_bytes > 64 * MIB
    assert anonymous_bytes < 24 * MIB

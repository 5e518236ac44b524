"""flash_attention_2 on the virtual GPU, where the package need not be installed."""

import pytest
import torch
import transformers as hf

from lowmem_ft.errors import UserError
from lowmem_ft.virtual_gpu.gpu import VirtualGPU


def llama(**options):
    config = hf.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.device("meta"):
        return hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("documents", [1, 2])
def test_flash_attention_2_runs_without_the_package(documents):
    with VirtualGPU("a100-80gb") as gpu:
        model = gpu.place(llama(attn_implementation="flash_attention_2"))
        ids = torch.zeros(1, 32, dtype=torch.long).to(gpu.device)
        positions = torch.arange(32 // documents).repeat(documents)[None].to(gpu.device)
        model(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert gpu.choices == ["attention: flash-attn 2, which has to be installed where the run is"]
    with pytest.raises(ImportError):
        llama(attn_implementation="flash_attention_2")  # transformers is as it was


def test_flash_attention_2_needs_ampere():
    with VirtualGPU("t4") as gpu:
        model = gpu.place(llama(attn_implementation="flash_attention_2"))
        ids = torch.zeros(1, 32, dtype=torch.long).to(gpu.device)
        with pytest.raises(UserError, match=r"needs compute capability 8\.0 or later \(Ampere\), got"):
            model(input_ids=ids)

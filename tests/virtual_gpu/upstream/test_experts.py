"""Mixtures of experts on the virtual GPU: the way to multiply experts that transformers takes on a real one."""

import pytest
import torch
import transformers as hf

from lowmem_ft.virtual_gpu.gpu import VirtualGPU

TURING, AMPERE = "t4", "a100-80gb"


@pytest.mark.parametrize("gpu_name", [TURING, AMPERE])
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_mixtures_of_experts_train(experts, gpu_name):
    config = hf.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation=experts
        )
    with VirtualGPU(gpu_name) as gpu:
        gpu.place(model)
        ids = torch.zeros(1, 16, dtype=torch.long).to(gpu.device)
        model(input_ids=ids, labels=ids).loss.backward()
        names = {entry.name for entry in gpu.work.entries}
    grouped = {name for name in names if "grouped_mm" in name}
    if experts != "grouped_mm":
        assert not grouped
    elif gpu_name == AMPERE:
        assert grouped == {"_grouped_mm"}
    else:
        assert "grouped_mm_fallback" in grouped
        assert "_grouped_mm" not in grouped

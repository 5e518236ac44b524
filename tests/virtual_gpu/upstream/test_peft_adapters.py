"""PEFT's adapters whose forward asks for values: they stay in, as mostly; sparse ones are refused by name."""

import peft
import pytest
import torch
from tiny_models import tiny_llama

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.virtual_gpu.gpu import VirtualGPU


def adapted(config):
    return peft.get_peft_model(tiny_llama(), config(target_modules=["q_proj"], task_type="CAUSAL_LM"))


@pytest.mark.parametrize("config", [peft.LoHaConfig, peft.LoKrConfig])
def test_an_adapter_that_is_left_out_at_random_is_trained(config):
    """Without a line on the number that it draws."""
    with VirtualGPU("l4") as gpu:
        model = adapted(config).to(gpu.device).train()
        ids = torch.zeros(2, 16, dtype=torch.long, device=gpu.device)
        model(input_ids=ids, labels=ids).loss.backward()
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        assert trained
        assert all(weight.grad is not None for weight in trained)
        assert all(module.training for module in model.modules())
        assert not any("boolean" in line for line in gpu.choices)


def test_sparse_weights_are_refused_by_name():
    with VirtualGPU("l4"), pytest.raises(UserError, match="sparse tensors, which SHiRA's weights are"):
        adapted(peft.ShiraConfig)

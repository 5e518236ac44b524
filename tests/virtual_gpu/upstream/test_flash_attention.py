"""Flash attention on the virtual GPU: the package, which need not be installed, and torch's own over documents."""

import importlib
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch.nn.attention import varlen
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.techniques.attention.varlen_attention import register_varlen_attention
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


IMPORT_IT_IF_IT_IS_THERE = {
    "falcon": hf.FalconConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64),
    "gpt_neo": hf.GPTNeoConfig(
        hidden_size=64, num_layers=1, num_heads=4, vocab_size=64, attention_types=[[["global"], 1]]
    ),
    "gptj": hf.GPTJConfig(n_embd=64, n_layer=1, n_head=4, vocab_size=64, rotary_dim=8),
}
"""Architectures whose module has no name for flash attention where transformers finds no package of it."""


@pytest.mark.parametrize("architecture", IMPORT_IT_IF_IT_IS_THERE)
def test_an_architecture_that_imports_it_only_if_it_is_there_runs_too(architecture):
    config = IMPORT_IT_IF_IT_IS_THERE[architecture]
    modeling = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    before = dict(vars(modeling))
    with VirtualGPU("a100-80gb") as gpu:
        with torch.device("meta"):
            model = hf.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="flash_attention_2"
            )
        model = gpu.place(model)
        ids = torch.zeros(1, 32, dtype=torch.long).to(gpu.device)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert vars(modeling) == before


def test_no_other_architecture_does():
    models = Path(hf.__file__).parent / "models"
    found = {
        path.parent.name
        for path in models.glob("*/modeling_*.py")
        if "\nif is_flash_attn" in path.read_text(encoding="utf-8")
    }
    assert found & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} <= {*IMPORT_IT_IF_IT_IS_THERE}


def test_flash_attention_2_needs_ampere():
    with VirtualGPU("t4") as gpu:
        model = gpu.place(llama(attn_implementation="flash_attention_2"))
        ids = torch.zeros(1, 32, dtype=torch.long).to(gpu.device)
        with pytest.raises(UserError, match=r"needs compute capability 8\.0 or later \(Ampere\), got"):
            model(input_ids=ids)


def test_torchs_kernel_over_documents_has_the_shapes_and_buffers_of_flash_attn():
    """One code: the same floating-point operations, and the same bytes but for a block of borders counted from 0."""
    borders = {"document_borders": [[0, 16, 32]], "longest_document": 16}
    as_flash_attn = {"cu_seq_lens_q": [0, 16, 32], "cu_seq_lens_k": [0, 16, 32]}
    lengths = {"max_length_q": 16, "max_length_k": 16}
    seen = {}
    for attention, inputs in (("varlen_attn", borders), ("flash_attention_2", as_flash_attn | lengths)):
        register_varlen_attention()
        with VirtualGPU("a100-80gb") as gpu:
            model = gpu.place(llama(attn_implementation=attention))
            ids = torch.zeros(1, 32, dtype=torch.long).to(gpu.device)
            placed = {
                name: torch.tensor(value, dtype=torch.int32).to(gpu.device)
                if isinstance(value, list)
                else value
                for name, value in inputs.items()
            }
            positions = torch.arange(16).repeat(2)[None].to(gpu.device)
            model(
                input_ids=ids, labels=ids, position_ids=positions, use_cache=False, **placed
            ).loss.backward()
        flops = sum(work.flops for work in gpu.trace().work if work.kind == "kernel")
        seen[attention] = gpu.report().allocated_peak_bytes - 512 * (attention == "varlen_attn"), flops
    assert seen["varlen_attn"] == seen["flash_attention_2"]


@pytest.mark.parametrize(
    "gpu_name, dtype, message",
    [
        (
            "t4",
            torch.float16,
            r"varlen_attn needs compute capability 8\.0 or later \(Ampere\), got compute capability 7\.5",
        ),
        ("a100-80gb", torch.float32, "varlen_attn needs bfloat16 or float16 computation, got float32"),
    ],
)
def test_torchs_kernel_refuses_what_cuda_would(gpu_name, dtype, message):
    with VirtualGPU(gpu_name) as gpu:
        rows = torch.zeros(8, 2, 16, dtype=dtype, device=gpu.device)
        borders = torch.zeros(2, dtype=torch.int32, device=gpu.device)
        with pytest.raises(UserError, match=message):
            varlen.varlen_attn(rows, rows, rows, borders, borders, 8, 8)

"""Attention by borders equals attention by masks, in outputs and gradients, and waits for no device.

Torch's kernel has no CPU form. In its place stands the same attention, document by document, that checks what the
kernel checks.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from measuring.families import FAMILIES
from torch.nn.attention import varlen

from lowmem_ft.data.batches.batch import LabelledRows
from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.techniques.attention.choose_attention import choose_attention
from lowmem_ft.techniques.attention.varlen_attention import (
    _document_borders,
    border_inputs,
    borders_arrive,
    register_varlen_attention,
)

CPU = torch.device("cpu")
POSITIONS_BT = torch.tensor([[*range(5), *range(3), *range(8)], [*range(16)], [0, *range(14), 0]])


def by_documents(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False
):
    """What flash_api.cpp (mha_varlen_fwd) demands, and what its kernel computes, in float32."""
    assert {operand.dtype for operand in (query, key, value)} <= {torch.bfloat16, torch.float16}
    assert query.ndim == 3
    assert query.size(-1) == value.size(-1)
    assert query.size(-1) % 8 == 0
    assert all(operand.stride(-1) == 1 for operand in (query, key, value))
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert cu_seq_q.is_contiguous()
    assert cu_seq_q[0] == 0
    assert cu_seq_q[-1] == len(query)
    assert (cu_seq_q.diff() >= 0).all()
    assert cu_seq_q.diff().max() <= max_q == max_k
    assert enable_gqa or query.size(1) == key.size(1)
    left, right = window_size
    assert right == 0, "not causal"
    parts = []
    for start, stop in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (operand[start:stop].transpose(0, 1).float() for operand in (query, key, value))
        age = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        mask = (age >= 0) & ((age <= left) if left >= 0 else torch.tensor(True))
        parts.append(
            F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True).transpose(0, 1)
        )
    return torch.cat(parts).to(query.dtype)


@pytest.fixture(autouse=True)
def kernel_on_the_cpu(monkeypatch):
    register_varlen_attention()
    monkeypatch.setattr(varlen, "varlen_attn", by_documents)


def make(config_class=hf.LlamaConfig, implementation="varlen_attn", dtype=torch.bfloat16, **settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = config_class(**sizes | heads | settings, attn_implementation=implementation)
    return hf.AutoModelForCausalLM.from_config(config).to(dtype)


def logits_of(model, position_ids_BT, borders=True):
    ids_BT = torch.arange(position_ids_BT.numel()).reshape(position_ids_BT.shape) * 7 % 64
    implementation = model.config._attn_implementation if borders else "sdpa"
    inputs = {"position_ids": position_ids_BT} | border_inputs(implementation, position_ids_BT, CPU)
    with borders_arrive(inputs):
        return model(input_ids=ids_BT, use_cache=False, **inputs).logits.float()


def logits_and_gradients(model, position_ids_BT=POSITIONS_BT, borders=True):
    logits_BTV = logits_of(model, position_ids_BT, borders)
    logits_BTV.square().mean().backward()
    return logits_BTV.detach(), {name: p.grad.float() for name, p in model.named_parameters()}


def furthest(values, others):
    """Of gradients, relative to the largest of each."""
    return max(
        ((values[name] - other).abs().max() / other.abs().max()).item() for name, other in others.items()
    )


@pytest.mark.parametrize(
    "config_class, settings",
    [
        (hf.LlamaConfig, {}),
        (hf.Qwen3Config, {"head_dim": 12}),  # padded to 16
        (hf.MistralConfig, {"sliding_window": 4}),
        (hf.Qwen2Config, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ],
    ids=["llama", "odd-heads", "windows", "some-windows"],
)
def test_outputs_and_gradients_are_those_of_a_mask(config_class, settings):
    """In bfloat16 it lies no further from float32 than attention with a mask does, up to half as far again."""
    exact_logits, exact = logits_and_gradients(make(config_class, "sdpa", torch.float32, **settings))
    masked_logits, masked = logits_and_gradients(make(config_class, "sdpa", **settings))
    logits, gradients = logits_and_gradients(make(config_class, **settings))
    assert (logits - exact_logits).abs().max() <= 1.5 * (masked_logits - exact_logits).abs().max()
    assert furthest(gradients, exact) <= 1.5 * furthest(masked, exact)


def test_without_borders_documents_would_see_each_other():
    """What the test above would miss if borders changed nothing."""
    kept, _ = logits_and_gradients(make())
    seen, _ = logits_and_gradients(make(), borders=False)
    assert (kept[0, 8:] - seen[0, 8:]).abs().max() > 0.05
    torch.testing.assert_close(kept[0, :5], seen[0, :5], atol=2e-2, rtol=0)


@pytest.mark.parametrize("sliding_window", [None, 4])
def test_rows_of_one_document_are_causal_without_a_mask(sliding_window):
    config_class = hf.LlamaConfig if sliding_window is None else hf.MistralConfig
    settings = {} if sliding_window is None else {"sliding_window": sliding_window}
    alone_BT = torch.arange(16).repeat(2, 1)
    exact, _ = logits_and_gradients(make(config_class, "sdpa", torch.float32, **settings), alone_BT)
    logits, _ = logits_and_gradients(make(config_class, **settings), alone_BT, borders=False)
    torch.testing.assert_close(logits, exact, atol=3e-2, rtol=0)


def test_autocast_reaches_the_kernel():
    """Rotary positions leave queries in float32 beside float32 weights; the kernel takes none."""
    model = make(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = logits_and_gradients(model)
    exact, _ = logits_and_gradients(make(implementation="sdpa", dtype=torch.float32))
    torch.testing.assert_close(logits, exact, atol=3e-2, rtol=0)


def test_borders_count_over_all_rows_and_survive_a_cut():
    borders_BE, longest = _document_borders(POSITIONS_BT)
    assert longest == 16
    assert borders_BE.dtype == torch.int32
    assert borders_BE.tolist() == [[0, 5, 8, 16], [16, 32, 32, 32], [32, 33, 47, 48]]
    whole, _ = logits_and_gradients(make())
    model, rows = make(), slice(1, 3)
    inputs = border_inputs("varlen_attn", POSITIONS_BT, CPU)
    inputs["document_borders"] = inputs["document_borders"][rows]
    ids_BT = torch.arange(48).reshape(3, 16)[rows] * 7 % 64
    part = model(input_ids=ids_BT, position_ids=POSITIONS_BT[rows], use_cache=False, **inputs).logits.float()
    torch.testing.assert_close(part, whole[rows], atol=2e-2, rtol=0)


def test_each_layer_takes_the_borders_of_whole_rows_as_they_are(monkeypatch):
    """No layer computes them again."""
    given = []

    @functools.wraps(by_documents)
    def noted(query, key, value, cu_seq_q, *others, **settings):
        given.append(cu_seq_q.data_ptr())
        return by_documents(query, key, value, cu_seq_q, *others, **settings)

    monkeypatch.setattr(varlen, "varlen_attn", noted)
    inputs = border_inputs("varlen_attn", POSITIONS_BT, CPU)
    make()(input_ids=torch.zeros(3, 16, dtype=torch.int64), use_cache=False, **inputs)
    assert given == 2 * [inputs["document_borders"].data_ptr()]


def test_flash_attn_gets_borders_under_its_own_names():
    row_BT = POSITIONS_BT[:1]
    inputs = border_inputs("flash_attention_2", row_BT, CPU)
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 5, 8, 16]
    assert inputs["max_length_q"] == inputs["max_length_k"] == 8
    assert border_inputs("flash_attention_2", POSITIONS_BT, CPU) == {}, "rows that vertical order cuts"
    assert border_inputs("sdpa", POSITIONS_BT, CPU) == border_inputs("varlen_attn", None, CPU) == {}


def test_a_model_that_keeps_its_arguments_to_itself_is_refused(monkeypatch):
    model = make()
    forward = hf.models.llama.modeling_llama.LlamaModel.forward

    def drops(self, *args, document_borders=None, longest_document=None, **kwargs):
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(hf.models.llama.modeling_llama.LlamaModel, "forward", drops)
    with pytest.raises(ModelError, match="its documents would see each other"):
        logits_and_gradients(model)


def test_what_the_kernel_does_not_have_is_refused():
    model = make()
    with pytest.raises(UserError, match="a cache of keys"):
        model.generate(torch.ones(1, 4, dtype=torch.int64), max_new_tokens=3, do_sample=False)
    with pytest.raises(UserError, match="a mask of the model's own"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64), attention_mask=torch.ones(1, 1, 4, 4).bool())
    model = make(attention_dropout=0.1)
    with pytest.raises(UserError, match=r"dropout of scores \(0.1\)"):
        logits_and_gradients(model)


def test_what_is_saved_names_no_implementation(tmp_path):
    make().save_pretrained(tmp_path)
    assert "varlen" not in (tmp_path / "config.json").read_text()
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_a_piece_of_a_row_has_its_own_borders():
    """A retry cuts rows between documents; positions go along, and borders come from them."""
    rows = LabelledRows(
        input_ids_BT=torch.zeros(1, 16, dtype=torch.int64),
        labels_BT=torch.zeros(1, 16, dtype=torch.int64),
        position_ids_BT=POSITIONS_BT[:1, 5:],
        num_label_tokens=11,
    )
    borders_BE, longest = _document_borders(rows.position_ids_BT)
    assert (borders_BE.tolist(), longest) == ([[0, 3, 11]], 8)


OF_THE_KERNEL = {
    *(
        "llama",
        "qwen2",
        "qwen3",
        "gemma3",
        "mistral",
        "phi",
        "phi3",
        "olmo2",
        "gpt_neox",
        "qwen3_moe",
        "mixtral",
    )
}
"""The others: gemma2 has soft caps, falcon's and gpt2's dropout of scores and ways to attention are their own."""


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_auto_takes_it_for_give_what_a_mask_gives(family):
    """Their layers hand borders on, and do nothing to scores that only a mask could say."""
    positions_BT = torch.tensor([[*range(60), *range(36)], [*range(96)]])
    config = hf.AutoConfig.for_model(**{"model_type": family, **FAMILIES[family]})
    choice = choose_attention(
        "auto",
        config=config,
        device=torch.device("cuda"),
        compute_dtype=torch.bfloat16,
        packing=True,
        compute_capability=(8, 0),
    )
    assert (choice.implementation == "varlen_attn") == (family in OF_THE_KERNEL)
    if family not in OF_THE_KERNEL:
        return

    def logits(attention, dtype):
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).eval()
        with torch.no_grad():
            return logits_of(model, positions_BT)

    exact = logits("sdpa", torch.float32)
    of_mask, of_borders = (
        (logits(name, torch.bfloat16) - exact).abs().mean() for name in ("sdpa", "varlen_attn")
    )
    assert of_borders <= 1.5 * of_mask

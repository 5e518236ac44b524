"""Vertical accumulation reorders the micro-batches' work, and changes no number beyond the order of sums."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from measuring.families import FAMILIES, VOCABULARY
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.techniques.accumulation.vertical_accumulation import (
    check_vertical_accumulation,
    enable_vertical_accumulation,
)
from lowmem_ft.techniques.checkpointing.checkpointed_layers import enable_checkpointing
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig

MICRO_BATCHES, ROWS, TOKENS = 3, 2, 16
TOLERANCE = 1e-6  # of the largest gradient: fp32 sums in another order
NO_DROPOUT = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}


def model_of(family, attn_implementation=None, **fields):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **{"model_type": family, **FAMILIES[family], **NO_DROPOUT.get(family, {}), **fields}
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation).train()
    enable_checkpointing(model, CheckpointingConfig(mode="full"))
    return model


def batch(num_rows=MICRO_BATCHES * ROWS, tokens=TOKENS, packed=False):
    ids_BT = torch.randint(3, VOCABULARY, (num_rows, tokens), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids_BT, "labels": ids_BT}
    if packed:
        cuts = [3 + index for index in range(num_rows)]
        positions = [torch.cat([torch.arange(cut), torch.arange(tokens - cut)]) for cut in cuts]
        inputs["position_ids"] = torch.stack(positions)
    return inputs


def sums(model, inputs):
    """The summed loss and the gradients of one call; gradients add up over calls."""
    loss = model(**inputs, use_cache=False, num_items_in_batch=1).loss
    loss.backward()
    return loss.detach()


def loss_and_gradients(model, *calls):
    model.zero_grad()
    loss = sum(sums(model, inputs) for inputs in calls)
    return [loss, *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def micro_batches(inputs):
    return [{key: tensor[rows : rows + ROWS] for key, tensor in inputs.items()} for rows in range(0, 6, ROWS)]


def assert_close(ours, stock):
    largest = max(tensor.abs().max() for tensor in stock)
    for one, other in zip(ours, stock, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE * float(largest))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("attention", [None, "eager"], ids=["default", "eager"])
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "gemma2", "gemma3", "gpt2", "mixtral", "phi", "gpt_neox", "falcon"]
)
def test_loss_and_gradients_are_those_of_one_micro_batch_after_the_other(family, attention, packed):
    if packed and family == "falcon":
        pytest.skip("Falcon takes no packed rows")
    model, inputs = model_of(family, attention), batch(packed=packed)
    stock = loss_and_gradients(model, *micro_batches(inputs))
    with enable_vertical_accumulation(model, ROWS):
        ours = loss_and_gradients(model, inputs)
    assert_close(ours, stock)


def test_documents_do_not_see_each_other():
    """The packed case above could not fail without this."""
    model = model_of("llama")
    assert not torch.equal(
        loss_and_gradients(model, batch(packed=True))[0], loss_and_gradients(model, batch())[0]
    )


def test_every_gradient_is_finished_before_the_layer_below_begins():
    model, order = model_of("llama"), []
    for index, layer in enumerate(model.model.layers):
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: order.append(index))
    with enable_vertical_accumulation(model, ROWS):
        sums(model, batch())
    per_layer = len(list(model.model.layers[0].parameters()))
    assert order == [1] * per_layer + [0] * per_layer


def rows_seen(model, *calls):
    seen = []
    projection = model.model.layers[0].mlp.up_proj
    hook = projection.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    for inputs in calls:
        model(**inputs, use_cache=False)
    hook.remove()
    return seen


def test_layers_see_a_micro_batch_at_a_time_and_a_smaller_one_at_the_end():
    model = model_of("llama")
    with enable_vertical_accumulation(model, ROWS):
        assert rows_seen(model, batch(5)) == [2, 2, 1]
        assert rows_seen(model, batch(ROWS)) == [ROWS]


def test_evaluation_passes_as_it_is():
    model = model_of("llama")
    with enable_vertical_accumulation(model, ROWS), torch.no_grad():
        assert rows_seen(model.eval(), batch()) == [MICRO_BATCHES * ROWS]


def test_only_the_layers_inputs_of_all_micro_batches_are_kept():
    model = model_of("llama", num_hidden_layers=3)
    kept = {}
    with enable_vertical_accumulation(model, ROWS):
        for num_rows in (4, 6, 8):
            hidden_BTH = torch.zeros(num_rows, TOKENS, 64, requires_grad=True)
            with StorageTracker() as tracker:
                output = model.model(inputs_embeds=hidden_BTH, use_cache=False).last_hidden_state
                kept[num_rows] = tracker.live_bytes
            output.sum().backward()
    hidden_bytes_a_row = TOKENS * 64 * 4
    # The inputs of two layers and of the final norm, and its output; the first layer's was there before.
    assert kept[6] - kept[4] == kept[8] - kept[6] == 2 * 4 * hidden_bytes_a_row


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_one_layer_passes_all_micro_batches_into_one_tensor(direction):
    """A list of their outputs and a tensor of all would be two."""
    num_rows, hidden_bytes = 64, 64 * TOKENS * 64 * 4
    model = model_of("llama", num_hidden_layers=1)
    layer = model.model.layers[0].requires_grad_(False)
    positions_BT = torch.arange(TOKENS)[None]
    with enable_vertical_accumulation(model, 1):
        hidden_BTH = torch.zeros(num_rows, TOKENS, 64, requires_grad=True)
        rotary = model.model.rotary_emb(hidden_BTH, positions_BT)
        with StorageTracker() as tracker:
            output_BTH = layer(hidden_BTH, position_embeddings=rotary)
            if direction == "backward":
                d_output_BTH = torch.ones_like(output_BTH)
                tracker.reset_peak()
                kept = tracker.live_bytes
                output_BTH.backward(d_output_BTH)
            else:
                kept = 0
            assert hidden_bytes <= tracker.peak_bytes - kept < 1.7 * hidden_bytes


def test_backward_may_pass_twice():
    model = model_of("llama")
    with enable_vertical_accumulation(model, ROWS):
        loss = model(**batch(), use_cache=False, num_items_in_batch=1).loss
        loss.backward(retain_graph=True)
        once = [parameter.grad.clone() for parameter in model.parameters()]
        loss.backward()
    for parameter, gradient in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient, rtol=1e-5, atol=1e-6)


def test_a_loss_of_the_routers_is_refused():
    with pytest.raises(ModelError, match=r"output_router_logits.*horizontal"):
        enable_vertical_accumulation(model_of("mixtral", output_router_logits=True), ROWS)


def test_flex_attention_is_refused():
    with pytest.raises(UserError, match=r"flex_attention.*Set model.attn_implementation=sdpa"):
        enable_vertical_accumulation(model_of("llama", "flex_attention"), ROWS)


def test_position_biases_by_head_are_refused_before_a_step():
    """Also where a step that ran out of memory would go over to this order: it is told that it cannot."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    for model in (
        hf.BloomForCausalLM(hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)),
        hf.MptForCausalLM(hf.MptConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=2)),
        hf.FalconForCausalLM(hf.FalconConfig(**sizes, alibi=True)),
    ):
        with pytest.raises(ModelError, match=r"(alibi|position_bias).*Set accumulation.order=horizontal"):
            check_vertical_accumulation(model)
    check_vertical_accumulation(hf.FalconForCausalLM(hf.FalconConfig(**sizes, alibi=False)))


def test_a_model_without_layers_explains_itself():
    with pytest.raises(ModelError, match="decoder layers"):
        enable_vertical_accumulation(nn.Linear(2, 2), ROWS)


@pytest.mark.parametrize(
    "family,fields,dropout",
    [
        ("llama", {"attention_dropout": 0.25}, "0.25"),  # a number that attention is handed
        ("gpt2", {"resid_pdrop": 0.1}, "0.1"),  # a module
        ("llama", {}, None),
    ],
)
def test_dropout_in_another_order_is_said_once(family, fields, dropout, caplog):
    caplog.set_level("INFO")
    enable_vertical_accumulation(model_of(family, **fields), ROWS)
    said = [line for line in caplog.messages if line.startswith("Dropout")]
    assert said == (
        []
        if dropout is None
        else [
            f"Dropout ({dropout}) draws other random numbers in vertical order than in horizontal: their losses "
            "differ as with two seeds."
        ]
    )

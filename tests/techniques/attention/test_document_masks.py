"""Masks of models that do not give positions to transformers' mask functions: documents of a row stay apart."""

from __future__ import annotations

import pytest
import torch
from ground_truth.tiny_configs import tiny_config
from transformers import AutoModelForCausalLM
from transformers.models.falcon import modeling_falcon

from lowmem_ft.techniques.attention.document_masks import masks_keep_documents_apart

FIRST, SECOND = 9, 12
POSITIONS_BT = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None]


@pytest.fixture
def falcon():
    def make(**fields):
        torch.manual_seed(0)
        config = tiny_config("falcon")
        for name, value in fields.items():
            setattr(config, name, value)
        return AutoModelForCausalLM.from_config(config).eval()

    return make


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("alibi", [False, True], ids=["rotary", "alibi"])
def test_a_document_gives_the_logits_that_it_gives_alone(falcon, alibi, attention):
    """Alibi, too: what a bias adds to all keys of a document alike, softmax takes out."""
    model = falcon(alibi=alibi)
    model.set_attn_implementation(attention)
    ids_BT = torch.randint(3, 500, (1, FIRST + SECOND))
    with torch.no_grad(), masks_keep_documents_apart(model, POSITIONS_BT):
        together = model(input_ids=ids_BT, position_ids=POSITIONS_BT, use_cache=False).logits[:, FIRST:]
    with torch.no_grad():
        alone = model(input_ids=ids_BT[:, FIRST:], use_cache=False).logits
        leaking = model(input_ids=ids_BT, position_ids=POSITIONS_BT, use_cache=False).logits[:, FIRST:]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    assert (leaking - alone).abs().max() > 100 * (together - alone).abs().max()


def test_the_mask_functions_are_put_back_and_unpacked_rows_leave_them(falcon):
    model, original = falcon(), modeling_falcon.create_causal_mask
    with masks_keep_documents_apart(model, None):
        assert modeling_falcon.create_causal_mask is original

    def fail():
        with masks_keep_documents_apart(model, POSITIONS_BT):
            assert modeling_falcon.create_causal_mask is not original
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert modeling_falcon.create_causal_mask is original


def test_a_mask_of_other_inputs_than_the_rows_is_left_alone(falcon):
    """A mask for tokens of another length, of a picture for instance, is not the rows'."""
    config, shorter = falcon().config, torch.zeros(1, FIRST + 1, 64)
    with masks_keep_documents_apart(falcon(), POSITIONS_BT):
        mask_BHTT = modeling_falcon.create_causal_mask(
            config=config,
            inputs_embeds=shorter,
            attention_mask=None,
            past_key_values=None,
            allow_is_causal_skip=False,
        )
    assert isinstance(mask_BHTT, torch.Tensor)
    assert mask_BHTT.equal(torch.ones_like(mask_BHTT).tril())

"""Masks of models that do not give positions to transformers' mask functions: documents of a row stay apart."""

from __future__ import annotations

import pytest
import torch
from family_sweep.tiny_configs import tiny_config
from transformers import AutoModelForCausalLM
from transformers.models.bloom import modeling_bloom

from lowmem_ft.techniques.attention.document_masks import masks_keep_documents_apart

FIRST, SECOND = 9, 12
POSITIONS_BT = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None]


def tiny_model(model_type):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(model_type)).eval()


@pytest.mark.parametrize("model_type", ["gpt_oss", "bloom", "opt"])
def test_a_document_gives_the_logits_that_it_gives_alone(model_type):
    """With sinks, with alibi, and with learnt positions.

    What alibi adds to all keys of a document alike, softmax takes out.
    """
    model = tiny_model(model_type)
    ids_BT = torch.randint(3, 500, (1, FIRST + SECOND))
    with torch.no_grad(), masks_keep_documents_apart(model, POSITIONS_BT):
        together = model(input_ids=ids_BT, position_ids=POSITIONS_BT, use_cache=False).logits[:, FIRST:]
    with torch.no_grad():
        alone = model(input_ids=ids_BT[:, FIRST:], use_cache=False).logits
        leaking = model(input_ids=ids_BT, position_ids=POSITIONS_BT, use_cache=False).logits[:, FIRST:]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=2e-5)
    assert (leaking - alone).abs().max() > 100 * (together - alone).abs().max()


def test_the_mask_functions_are_put_back_and_unpacked_rows_leave_them():
    model, original = tiny_model("bloom"), modeling_bloom.create_causal_mask
    with masks_keep_documents_apart(model, None):
        assert modeling_bloom.create_causal_mask is original

    def fail():
        with masks_keep_documents_apart(model, POSITIONS_BT):
            assert modeling_bloom.create_causal_mask is not original
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert modeling_bloom.create_causal_mask is original


def test_a_mask_of_other_inputs_than_the_rows_is_left_alone():
    """A mask for tokens of another length, of a picture for instance, is not the rows'."""
    model, shorter = tiny_model("bloom"), torch.zeros(1, FIRST + 1, 64)
    with masks_keep_documents_apart(model, POSITIONS_BT):
        mask_BHTT = modeling_bloom.create_causal_mask(
            model.config, shorter, None, None, allow_is_causal_skip=False
        )
    assert isinstance(mask_BHTT, torch.Tensor)
    assert (mask_BHTT == 0).equal(torch.ones_like(mask_BHTT, dtype=torch.bool).tril())

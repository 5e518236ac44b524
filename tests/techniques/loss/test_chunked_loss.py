"""A model with the chunked loss trains as the stock model does, without its logits."""

import inspect

import pytest
import torch
import transformers as hf
from roundings import ROUNDING
from tiny_models import FAMILY_SIZES, model_of
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers import modeling_flash_attention_utils as flash_attention

from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.techniques.loss.chunked_loss import LossConfig, enable_chunked_loss
from lowmem_ft.techniques.modules.model_parts import decoder_layers
from lowmem_ft.techniques.tiling.config import TilingConfig

GPU = torch.device("cuda", 0)
VOCABULARY = FAMILY_SIZES["vocab_size"]
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MOE = {**FAMILY_SIZES, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}

CONFIGS = {
    "llama": hf.LlamaConfig(**FAMILY_SIZES),
    "llama_tied": hf.LlamaConfig(**FAMILY_SIZES, tie_word_embeddings=True),
    "qwen2": hf.Qwen2Config(**FAMILY_SIZES),
    "gpt2_tied": hf.GPT2Config(**GPT),
    "gptj_head_bias": hf.GPTJConfig(**GPT, rotary_dim=8),
    "phi_head_bias": hf.PhiConfig(**FAMILY_SIZES),
    "gemma2_softcap": hf.Gemma2Config(**FAMILY_SIZES, head_dim=8, final_logit_softcapping=0.5),
    "gemma3_text": hf.Gemma3TextConfig(**FAMILY_SIZES, head_dim=8, final_logit_softcapping=0.5),
    "granite_divides": hf.GraniteConfig(**FAMILY_SIZES, logits_scaling=0.2),
    "hyperclovax_multiplies": hf.HyperCLOVAXConfig(**FAMILY_SIZES, logits_scaling=4.0),
    "minicpm3_divides_before_the_head": hf.MiniCPM3Config(
        **{**FAMILY_SIZES, "num_key_value_heads": 4}, dim_model_base=8, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    ),
    "cohere_multiplies": hf.CohereConfig(**FAMILY_SIZES, logit_scale=4.0),
    "falcon_h1_multiplies": hf.FalconH1Config(
        **FAMILY_SIZES, lm_head_multiplier=3.0,
        mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8,
    ),
    "mixtral_router_loss": hf.MixtralConfig(**MOE, num_local_experts=4),
    "qwen3_moe_router_loss": hf.Qwen3MoeConfig(**MOE, num_experts=4, moe_intermediate_size=16, head_dim=8),
    "jetmoe_router_loss": hf.JetMoeConfig(
        **{k: v for k, v in MOE.items() if k not in ("num_attention_heads", "router_aux_loss_coef")},
        num_local_experts=4, kv_channels=8, aux_loss_coef=0.1,
    ),
    "opt_no_bias": hf.OPTConfig(**FAMILY_SIZES, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
}  # fmt: skip


def tiny_model(name="llama"):
    model = model_of(CONFIGS[name], attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn_like(parameter) * 0.1
            )  # fresh weights give logits too small to tell apart
    model.config.use_cache = False
    return model


def batch(rows=3, tokens=11):
    generator = torch.Generator().manual_seed(2)
    input_ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
    labels = torch.where(torch.rand(rows, tokens, generator=generator) < 0.4, -100, input_ids)
    labels[:, 0] = -100
    return {"input_ids": input_ids, "labels": labels}


def loss_and_gradients(model, **inputs):
    model.zero_grad()
    torch.manual_seed(3)
    outputs = model(**inputs)
    outputs.loss.backward()
    trained = (named for named in model.named_parameters() if named[1].requires_grad)
    return outputs, {name: parameter.grad.clone() for name, parameter in trained}


@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_every_gradient_equal_the_stock_models(name, tiles):
    model = tiny_model(name)
    inputs = batch()
    stock, stock_gradients = loss_and_gradients(model, **inputs)
    with enable_chunked_loss(model, LossConfig(chunk_tokens=5), TilingConfig(head=tiles)):
        ours, our_gradients = loss_and_gradients(model, **inputs)
    assert ours.logits is None
    assert type(ours) is type(stock)
    assert ours.loss.item() == pytest.approx(stock.loss.item(), rel=1e-6)
    largest = max(gradient.abs().max() for gradient in stock_gradients.values())
    for parameter, gradient in stock_gradients.items():
        # Only the order of fp32 sums differs: some 2**12 terms, over tokens, vocabulary and layers.
        off = 2**6 * ROUNDING * largest.item()
        torch.testing.assert_close(our_gradients[parameter], gradient, rtol=1e-5, atol=off)


def test_normalised_by_the_count_of_the_whole_window():
    model, inputs = tiny_model(), batch()
    for count in (7, torch.tensor(7)):
        stock = model(**inputs, num_items_in_batch=count).loss
        with enable_chunked_loss(model, LossConfig()):
            ours = model(**inputs, num_items_in_batch=count).loss
        torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize("tiles", [1, 4])
def test_labels_are_smoothed_as_cross_entropy_does_and_only_in_training(tiles):
    model, inputs = tiny_model("gemma2_softcap"), batch()
    logits = model(inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
    smoothed = F.cross_entropy(logits, inputs["labels"][:, 1:].flatten(), label_smoothing=0.2)
    expected = torch.autograd.grad(smoothed, list(model.parameters()))
    config = LossConfig(chunk_tokens=5, label_smoothing_factor=0.2)
    with enable_chunked_loss(model, config, TilingConfig(head=tiles)):
        ours, gradients = loss_and_gradients(model, **inputs)
        model.eval()
        evaluated = model(**inputs).loss
    torch.testing.assert_close(ours.loss, smoothed)
    for gradient, truth in zip(gradients.values(), expected, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(evaluated, model(**inputs).loss)


@pytest.mark.parametrize("tiles", [1, 4])
def test_hooks_on_a_tied_weight_fire_once(tiles):
    model, inputs = tiny_model("llama_tied"), batch()
    fired = []
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(parameter))
    with enable_chunked_loss(model, LossConfig(chunk_tokens=5), TilingConfig(head=tiles)):
        model(**inputs).loss.backward()
    assert len(fired) == 1


def test_shift_labels_are_honoured():
    model, inputs = tiny_model(), batch()
    shifted = F.pad(inputs["labels"], (0, 2), value=-100)[:, 2:].contiguous()
    stock = model(**inputs, shift_labels=shifted).loss
    with enable_chunked_loss(model, LossConfig()):
        torch.testing.assert_close(model(**inputs, shift_labels=shifted).loss, stock)


def test_return_dict_left_open_is_the_configs():
    """PEFT's models pass ``return_dict=None`` on where nobody has said it."""
    model, inputs = tiny_model(), batch()
    stock = model(**inputs, return_dict=None)
    with enable_chunked_loss(model, LossConfig()):
        torch.testing.assert_close(model(**inputs, return_dict=None).loss, stock.loss)


def test_positional_arguments_and_tuples():
    model, inputs = tiny_model(), batch()
    stock = model(**inputs).loss
    with enable_chunked_loss(model, LossConfig()):
        outputs = model(inputs["input_ids"], None, labels=inputs["labels"], return_dict=False)
        positional = model(inputs["input_ids"], None, None, None, None, inputs["labels"])
    assert isinstance(outputs, tuple)
    torch.testing.assert_close(outputs[0], stock)
    torch.testing.assert_close(positional.loss, stock)
    assert positional.logits is None


def test_count_given_by_the_host_picks_the_same_rows():
    model, inputs = tiny_model(), batch()
    count = int((inputs["labels"] != -100).sum())
    with enable_chunked_loss(model, LossConfig(chunk_tokens=4)):
        expected, gradients = loss_and_gradients(model, **inputs)
        ours, our_gradients = loss_and_gradients(model, **inputs, num_label_tokens=count)
        assert torch.equal(ours.loss, expected.loss)
        assert all(torch.equal(gradients[name], our_gradients[name]) for name in gradients)
        with pytest.raises(RuntimeError, match="num_label_tokens is not the number"):
            model(**inputs, num_label_tokens=count - 1)


@pytest.mark.parametrize("tiles", [1, 4])
def test_batch_without_labels_to_learn_gives_zero_and_zero_gradients(tiles):
    model, inputs = tiny_model(), batch()
    inputs["labels"][:] = -100
    with enable_chunked_loss(model, LossConfig(label_smoothing_factor=0.1), TilingConfig(head=tiles)):
        for extra in ({}, {"num_items_in_batch": 5}, {"num_label_tokens": 0}):
            outputs, gradients = loss_and_gradients(model, **inputs, **extra)
            assert outputs.loss.item() == 0
            assert all(gradient.abs().sum() == 0 for gradient in gradients.values())


def test_tokens_without_a_label_do_not_reach_the_head(monkeypatch):
    seen = []
    model, inputs = tiny_model(), batch()
    with enable_chunked_loss(model, LossConfig(chunk_tokens=1000)):
        linear = F.linear
        monkeypatch.setattr(
            F, "linear", lambda x, w, b=None: (seen.append((len(x), len(w))), linear(x, w, b))[1]
        )
        model(**inputs)
    at_the_head = [rows for rows, width in seen if width == VOCABULARY]
    assert at_the_head == [int((inputs["labels"] != -100).sum())]


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_logit_costs_the_bytes_that_the_knob_says(dtype, autocast):
    """12 at the peak of a step that drops the outputs before backward, and 6 or 4 if it is one of a chunk."""
    vocabulary, tokens, more = 20_000, 32, 32
    sizes = {"vocab_size": vocabulary, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    config = hf.LlamaConfig(**{**FAMILY_SIZES, **sizes, **heads})

    def peak_bytes(num_tokens, chunk_tokens):
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        ids = torch.arange(num_tokens).reshape(1, num_tokens)
        enable_chunked_loss(model, LossConfig(chunk_tokens=chunk_tokens))
        with StorageTracker() as tracker, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        return tracker.peak_bytes

    a_logit = (peak_bytes(tokens + more, None) - peak_bytes(tokens, None)) / (more * vocabulary)
    assert a_logit == pytest.approx(12, rel=0.01)
    in_a_chunk = (peak_bytes(256, 64 + more) - peak_bytes(256, 64)) / (more * vocabulary)
    assert in_a_chunk == pytest.approx(4 if dtype == torch.float32 and not autocast else 6, rel=0.01)
    frees = recipe_keys()["loss.chunk_tokens"].frees
    assert frees.startswith(
        "12 bytes * tokens * vocabulary at the peak become 2 (float32: 4; 16 bits without Triton: 6)"
    )


def test_remove_restores_the_stock_forward_and_generation_works_throughout():
    model, inputs = tiny_model(), batch()
    before = dict(vars(model))
    prompt = inputs["input_ids"][:1, :4]
    generated = model.generate(prompt, max_new_tokens=4, do_sample=False)
    handle = enable_chunked_loss(model, LossConfig())
    assert "forward" not in vars(model.get_output_embeddings())
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), generated)
    assert model(inputs["input_ids"]).logits.shape == (3, 11, VOCABULARY)
    handle.remove()
    assert vars(model).keys() == before.keys()
    assert model(**inputs).logits is not None


def test_enabling_leaves_the_layout_of_4_bit_weights_alone():
    """On some processors bitsandbytes packs a weight that is evaluated for a kernel that hands no gradient down."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model, inputs = tiny_model(), batch()
    for layer in model.model.layers:
        original = layer.mlp.down_proj
        quantised = bitsandbytes.nn.Linear4bit(48, 32, bias=False, quant_type="nf4")
        quantised.weight = bitsandbytes.nn.Params4bit(
            original.weight.data, requires_grad=False, quant_type="nf4"
        )
        quantised.support_avx512bf16_for_cpu = True
        layer.mlp.down_proj = quantised.to("cpu")
    model.train()
    with enable_chunked_loss(model, LossConfig()):
        packed = [getattr(layer.mlp.down_proj.weight.quant_state, "packing_format_for_cpu", False)
                  for layer in model.model.layers]  # fmt: skip
        assert packed == [False, False]
        _, gradients = loss_and_gradients(model, **inputs)
    _, stock_gradients = loss_and_gradients(model, **inputs)
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        torch.testing.assert_close(gradients[name], stock_gradients[name])


def test_bad_chunk_size_explains_itself():
    with pytest.raises(UserError, match=r"loss.chunk_tokens must be at least 1, got 0. Set it to 1024"):
        enable_chunked_loss(tiny_model(), LossConfig(chunk_tokens=0))


def test_bad_smoothing_and_tiles_explain_themselves_at_once():
    config = LossConfig(label_smoothing_factor=1.0)
    with pytest.raises(UserError) as error:
        enable_chunked_loss(tiny_model(), config, TilingConfig(head=0))
    assert len(error.value.problems) == 2
    assert "loss.label_smoothing_factor is from 0 to below 1, got 1.0" in str(error.value)
    assert "tiling.head must be at least 1, got 0" in str(error.value)
    with pytest.raises(UserError, match=rf"at most the vocabulary's {VOCABULARY} rows, got 121"):
        enable_chunked_loss(tiny_model(), LossConfig(), TilingConfig(head=VOCABULARY + 1))
    with pytest.raises(UserError, match=r"needs loss.chunk_tokens, got null"):
        enable_chunked_loss(tiny_model(), LossConfig(chunk_tokens=None, label_smoothing_factor=0.1))


@pytest.mark.parametrize("device", [None, GPU])
def test_head_that_does_something_unknown_is_refused(device):
    model = tiny_model()
    stock_forward = type(model).forward

    class Odd(type(model)):
        def forward(self, *args, labels=None, **kwargs):
            outputs = stock_forward(self, *args, **kwargs)
            outputs.logits = outputs.logits * 1.01
            if labels is not None:
                outputs.loss = self.loss_function(outputs.logits, labels, VOCABULARY)
            return outputs

    model.__class__ = Odd
    with pytest.raises(ModelError, match=r"Odd computes something else.*loss.chunk_tokens=null"):
        enable_chunked_loss(model, LossConfig(), device=device)
    assert "forward" not in vars(model)
    assert len(model.model.layers) == 2


@pytest.mark.parametrize("device", [None, GPU])
def test_loss_of_routers_that_is_weighed_otherwise_is_refused(device):
    model = tiny_model("mixtral_router_loss")
    stock_forward = type(model).forward

    class Odd(type(model)):
        def forward(self, *args, **kwargs):
            outputs = stock_forward(self, *args, **kwargs)
            if outputs.loss is not None:
                outputs.loss = outputs.loss + 0.3 * outputs.aux_loss
            return outputs

    model.__class__ = Odd
    with pytest.raises(ModelError, match="Odd computes something else"):
        enable_chunked_loss(model, LossConfig(), device=device)


@pytest.mark.parametrize("device", [None, GPU])
def test_loss_that_is_not_shifted_is_refused(device):
    model = AutoModelForCausalLM.from_config(
        hf.BartConfig(vocab_size=VOCABULARY, d_model=32, decoder_layers=1, decoder_attention_heads=2,
                      decoder_ffn_dim=32, encoder_layers=1, encoder_ffn_dim=32, encoder_attention_heads=2,
                      is_decoder=True, is_encoder_decoder=False)
    )  # fmt: skip
    with pytest.raises(ModelError, match="computes something else"):
        enable_chunked_loss(model, LossConfig(), device=device)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    raise AssertionError(f"flash-attn has no kernel for {q.device}")


@pytest.fixture
def flash_attn(monkeypatch):
    """The package flash-attn behind transformers' own code, with kernels for a GPU alone."""
    kernels = (
        flash_attn_func,
        flash_attn_func,
        None,
        flash_attention._pad_input,
        flash_attention._unpad_input,
    )
    monkeypatch.setattr(flash_attention, "_lazy_imports", lambda *_, **__: kernels)
    monkeypatch.setattr(flash_attention, "_loaded_implementation", None)
    monkeypatch.setattr(hf.PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)


class Runs:
    """Counts the calls of layers."""

    def __init__(self, layers):
        self.of = [0] * len(layers)
        for index, layer in enumerate(layers):
            layer.register_forward_hook(lambda *_, index=index: self.count(index))

    def count(self, index):
        self.of[index] += 1


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_waits_for_its_gpu_is_checked_around_its_layers(name):
    model = tiny_model(name)
    layers = decoder_layers(model)
    names, stack = list(dict(model.named_parameters())), list(layers)
    if type(model)._supports_flash_attn:
        model.config._attn_implementation = "flash_attention_2"
    attention = model.config._attn_implementation
    runs = Runs(layers)
    with enable_chunked_loss(model, LossConfig(chunk_tokens=5), device=GPU):
        last_alone = [0] * (len(stack) - 1) + [2]  # it has a router, whose loss is checked, too
        assert runs.of == (last_alone if "router" in name else [0] * len(stack))
        assert list(layers) == stack
        assert list(dict(model.named_parameters())) == names
        assert model.config._attn_implementation == attention


def test_head_that_is_not_linear_is_refused():
    model = tiny_model()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ModelError, match=r"head is an nn.Linear; that of LlamaForCausalLM is Sequential"):
        enable_chunked_loss(model, LossConfig())


def test_peft_model_trains_through_it():
    peft = pytest.importorskip("peft")
    model, inputs = tiny_model(), batch()
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    stock = wrapped(**inputs).loss
    with enable_chunked_loss(wrapped, LossConfig(chunk_tokens=5)):
        outputs = wrapped(**inputs, num_label_tokens=int((inputs["labels"] != -100).sum()))
        outputs.loss.backward()
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, stock)


def test_signature_is_the_stock_models():
    model = tiny_model()
    stock = inspect.signature(model.forward)
    with enable_chunked_loss(model, LossConfig()):
        assert inspect.signature(model.forward) == stock

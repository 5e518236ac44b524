"""The attention kernel is the leanest that can train here, and a request that cannot be met says why."""

import pytest
import torch
import transformers as hf

from lowmem_ft.foundation.errors import MissingPackageError, ModelError, UserError
from lowmem_ft.techniques.attention import choose_attention as attention
from lowmem_ft.techniques.attention.choose_attention import choose_attention
from lowmem_ft.virtual_gpu import VirtualGPU

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
AMPERE, TURING = (8, 0), (7, 5)


def choose(requested, *, device=CUDA, dtype=torch.bfloat16, capability=AMPERE, config=None, packing=False):
    return choose_attention(
        requested,
        config=config or hf.LlamaConfig(),
        device=device,
        compute_dtype=dtype,
        packing=packing,
        compute_capability=capability,
    )


@pytest.fixture
def flash_attn_installed(monkeypatch):
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: True)


@pytest.fixture
def flash_attn_missing(monkeypatch):
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: False)


@pytest.mark.usefixtures("flash_attn_installed")
def test_auto_takes_torchs_flash_attention_where_it_runs():
    choice = choose("auto", packing=True)
    assert choice.implementation == "varlen_attn"
    assert choice.reason == "auto: torch's flash kernel separates packed documents"


def test_rows_of_one_document_need_no_kernel_of_their_own():
    choice = choose("auto", capability=TURING, dtype=torch.float16)
    assert choice.implementation == "varlen_attn"
    assert choice.reason == "auto: rows need no mask with this kernel"


@pytest.mark.usefixtures("flash_attn_missing")
@pytest.mark.parametrize(
    "config",
    [
        hf.Gemma2Config(),  # soft caps
        hf.LlamaConfig(attention_dropout=0.1),
        hf.LlamaConfig(head_dim=200),
        hf.GptOssConfig(),  # sinks
        hf.FalconConfig(alibi=True),
        hf.GPTNeoConfig(),  # no attention functions
    ],
    ids=lambda config: config.model_type,
)
def test_auto_leaves_to_others_what_the_kernel_does_not_have(config):
    assert choose("auto", config=config, packing=True).implementation != "varlen_attn"
    with pytest.raises(ModelError, match=r"model\.attn_implementation=varlen_attn needs"):
        choose("varlen_attn", config=config, packing=True)


@pytest.mark.usefixtures("flash_attn_installed")
def test_auto_takes_the_package_for_what_torchs_kernel_does_not_have():
    choice = choose("auto", config=hf.Gemma2Config(), packing=True)
    assert choice.implementation == "flash_attention_2"
    assert choice.reason == "auto: packed rows need no mask with this kernel"


def test_somebody_elses_batches_may_have_masks():
    """Which transformers would drop without a word."""
    facts = {"device": CUDA, "compute_dtype": torch.bfloat16, "compute_capability": AMPERE}
    choice = choose_attention("auto", config=hf.LlamaConfig(), makes_batches=False, **facts)
    assert choice.implementation != "varlen_attn"
    with pytest.raises(UserError, match="takes batches without padding masks"):
        choose_attention("varlen_attn", config=hf.LlamaConfig(), makes_batches=False, **facts)


@pytest.mark.usefixtures("flash_attn_installed")
@pytest.mark.parametrize(
    "where, reason",
    [
        ({"device": CPU}, "got device cpu"),
        ({"dtype": torch.float32}, "got float32"),
        ({"capability": TURING}, "got 7.5"),
    ],
)
def test_auto_falls_to_sdpa_and_says_why(where, reason):
    choice = choose("auto", packing=True, **where)
    assert choice.implementation == "sdpa"
    assert reason in choice.reason


@pytest.mark.usefixtures("flash_attn_missing")
def test_auto_without_the_package_says_so_and_what_packing_costs():
    choice = choose("auto", packing=True, config=hf.LlamaConfig(attention_dropout=0.1))
    assert choice.implementation == "sdpa"
    assert "flash-attn, which is not installed" in choice.reason
    assert "mask of tokens x tokens" in choice.reason


@pytest.mark.usefixtures("flash_attn_installed")
def test_auto_takes_eager_where_the_architecture_has_nothing_else():
    choice = choose("auto", config=hf.XLNetConfig())
    assert choice.implementation == "eager"
    assert "xlnet" in choice.reason


@pytest.mark.usefixtures("flash_attn_installed")
@pytest.mark.parametrize("requested", ["varlen_attn", "sdpa", "flash_attention_2", "flex_attention", "eager"])
def test_a_request_that_can_be_met_is_met(requested):
    choice = choose(requested)
    assert choice.implementation == requested
    assert choice.reason == "requested by model.attn_implementation"


@pytest.mark.usefixtures("flash_attn_missing")
def test_missing_package_gives_the_install_line():
    with pytest.raises(MissingPackageError, match="pip install flash-attn --no-build-isolation"):
        choose("flash_attention_2")


def test_unsupported_by_the_architecture_lists_what_is():
    with pytest.raises(ModelError, match=r"xlnet supports eager\. Set"):
        choose("sdpa", config=hf.XLNetConfig())


@pytest.mark.usefixtures("flash_attn_missing")
def test_a_soft_cap_is_nothing_for_sdpa_whatever_the_class_says(monkeypatch):
    """In transformers 5.20 Gemma 2 says that it supports sdpa, whose function leaves the cap out."""
    monkeypatch.setattr(hf.Gemma2PreTrainedModel, "_supports_sdpa", True)
    capped, uncapped = hf.Gemma2Config(), hf.Gemma2Config(attn_logit_softcapping=None)
    assert choose("auto", device=CPU, config=capped).implementation == "eager"
    assert choose("auto", device=CPU, config=uncapped).implementation == "sdpa"
    with pytest.raises(ModelError, match="sdpa needs an architecture that supports it"):
        choose("sdpa", config=capped)


@pytest.mark.usefixtures("flash_attn_installed")
def test_biases_by_distance_are_nothing_for_flash_attention():
    """Falcon's class supports it, and its forward raises where alibi takes the place of rotary positions."""
    with pytest.raises(ModelError, match=r"falcon supports sdpa, eager\. Set"):
        choose("flash_attention_2", config=hf.FalconConfig(alibi=True))
    assert choose("auto", config=hf.FalconConfig(alibi=True)).implementation == "sdpa"
    assert choose("auto", config=hf.FalconConfig(alibi=False)).implementation == "flash_attention_2"


def test_an_architecture_unknown_to_transformers_is_not_second_guessed():
    class RemoteConfig(hf.PreTrainedConfig):
        model_type = "remote"

    assert choose("eager", config=RemoteConfig()).implementation == "eager"
    assert choose("auto", config=RemoteConfig(), device=CPU).implementation == "sdpa"


def test_auto_takes_sdpa_on_a_virtual_gpu_and_says_how_to_count_on_flash_attn():
    """A model with dropout of scores, which flash-attn has and torch's kernel has not."""
    config = hf.LlamaConfig(attention_dropout=0.1)
    with VirtualGPU("a100-80gb") as gpu:
        choice = choose_attention(
            "auto", config=config, device=gpu.device, compute_dtype=torch.bfloat16, packing=True
        )
    assert choice.implementation == "sdpa"
    assert "may not have; set model.attn_implementation" in choice.reason


def test_requests_are_checked_against_the_virtual_gpu():
    ask = {"config": hf.LlamaConfig(), "compute_dtype": torch.float16}
    with VirtualGPU("a100-80gb") as gpu:
        assert choose_attention("flash_attention_2", device=gpu.device, **ask).implementation
        with pytest.raises(UserError, match="flex_attention compiles a kernel"):
            choose_attention("flex_attention", device=gpu.device, **ask)
    with VirtualGPU("t4") as gpu, pytest.raises(UserError, match=r"8\.0 or later \(Ampere\), got 7\.5"):
        choose_attention("flash_attention_2", device=gpu.device, **ask)

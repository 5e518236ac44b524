"""Generation in scripts: a few tokens are decoded, memory is that of a real ``generate``, seconds are of all tokens."""

from __future__ import annotations

import pytest
from measuring.real_script import run_for_real

from lowmem_ft.planning.script_runs import estimate_script
from lowmem_ft.virtual_gpu.upstream import coarse_decoding
from lowmem_ft.virtual_gpu.upstream.coarse_decoding import FEWEST_TOKENS, schedule

SHARE = 0.001
"""What the bytes of a phase may differ by, as in ``test_truth.py``."""

SCRATCH_BYTES = 10.5 * 2**10
"""What the processor's attention kernel allocates within itself in these scripts."""

GENERATE = """
import sys

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

torch.manual_seed(0)
new, window, more = int(sys.argv[1]), int(sys.argv[2]), eval(sys.argv[3])
sliding = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0} if window else {}
config = Qwen3Config(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, **sliding,
)
# Eager: the processor's own attention kernels allocate scratch that no allocator reports to a trace.
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
ids = torch.randint(3, 500, (4, 24))
mask = torch.ones_like(ids)
ids[0, :9] = mask[0, :9] = 0  # two prompts of different length
for step in range(2):
    found = model.generate(
        input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=new, min_new_tokens=new,
        pad_token_id=0, eos_token_id=2, **more,
    )
    if not torch.is_tensor(found):
        assert found.scores is None or len(found.scores) == new
        found = found.sequences
    assert found.shape == (4, 24 + new)
    model(input_ids=found[:, :8], labels=found[:, :8]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

OWN_CACHE = """
from transformers.cache_utils import DynamicCache, DynamicLayer

class OwnLayer(DynamicLayer):
    pass

class Own(DynamicCache):
    def __init__(self):
        super().__init__()
        self.layers = [OwnLayer(), OwnLayer()]
"""

SCORES = "{'output_scores': True, 'return_dict_in_generate': True, 'do_sample': True}"
STATIC = "{'cache_implementation': 'static'}"


def words_of(found):
    return [choice for choice in found.estimate.choices if choice.startswith("generation:")]


@pytest.mark.parametrize("num_tokens", [1, FEWEST_TOKENS, FEWEST_TOKENS + 1, 64, 257])
def test_the_traced_tokens_stand_for_all(num_tokens):
    tokens = schedule(num_tokens)
    assert sum(tokens.values()) == num_tokens
    assert list(tokens) == sorted(tokens)
    assert {0, num_tokens - 1} <= tokens.keys()
    assert len(tokens) <= FEWEST_TOKENS
    # The middle of what each stands for: costs that grow evenly are then those of all.
    assert sum(number * times for number, times in tokens.items()) == pytest.approx(
        sum(range(num_tokens)), rel=0.02
    )


@pytest.mark.parametrize(
    "new, window, more",
    [
        ("256", "0", "{}"),
        pytest.param("64", "0", SCORES, marks=pytest.mark.slow),
        pytest.param("100", "48", "{}", marks=pytest.mark.slow),
        pytest.param("100", "48", STATIC, marks=pytest.mark.slow),
        pytest.param("64", "0", STATIC, marks=pytest.mark.slow),
        pytest.param("64", "0", "{'use_cache': False}", marks=pytest.mark.slow),
    ],
)
def test_generation_takes_the_bytes_of_a_real_one(script, new, window, more):
    name, arguments = script(GENERATE), [new, window, more]
    found, real = estimate_script(name, arguments, gpu="cpu", steps=2), run_for_real(name, arguments)
    assert found.estimate.by_phase["generate"] == pytest.approx(real.by_phase["generate"], rel=SHARE)
    assert found.estimate.allocated_peak_bytes == pytest.approx(real.peak_bytes, rel=SHARE)
    assert any(f"gets all {new} tokens" in words for words in words_of(found))


@pytest.mark.parametrize(
    "more",
    [
        "{}",
        *(pytest.param(more, marks=pytest.mark.slow) for more in (SCORES, STATIC, "{'use_cache': False}")),
    ],
)
@pytest.mark.parametrize("window", ["0", "20"])
def test_few_tokens_cost_what_all_of_them_do(script, monkeypatch, window, more):
    name, arguments = script(GENERATE), ["40", window, more]

    def estimated():
        return estimate_script(name, arguments, gpu="l4", steps=2)

    few = estimated()
    monkeypatch.setattr(coarse_decoding, "FEWEST_TOKENS", 1000)
    every = estimated()
    assert len(few.estimate.timeline.events) < 0.4 * len(every.estimate.timeline.events)
    assert few.estimate.step.seconds == pytest.approx(every.estimate.step.seconds, rel=0.01)
    assert few.host_waits_per_step == every.host_waits_per_step > 40
    assert few.estimate.by_phase == pytest.approx(every.estimate.by_phase, rel=SHARE)
    assert few.kept_bytes == every.kept_bytes
    # A real cache leaves gaps behind, as it is made anew for each token: the range tells.
    assert few.estimate.process_range.low_bytes <= every.estimate.process_peak_bytes
    assert every.estimate.process_peak_bytes <= few.estimate.process_range.high_bytes


@pytest.mark.parametrize(
    "more, obstacle",
    [
        ("{'output_hidden_states': True, 'return_dict_in_generate': True}", "output_hidden_states"),
        ("{'past_key_values': Own()}", "OwnLayer"),
    ],
)
def test_tokens_are_all_traced_where_it_is_not_known_what_each_keeps(script, more, obstacle):
    name = script(OWN_CACHE + GENERATE)
    found = estimate_script(name, ["12", "0", more], gpu="cpu", steps=2)
    assert any(words.endswith(f"each is traced, because of {obstacle}") for words in words_of(found))


TRAINERS = """
import sys

import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

kind, new = sys.argv[1], int(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained("model")
prompts = ["What is this? ", "And what, then, would you say is that, if I may ask?"] * 16
rows = Dataset.from_dict({"prompt": prompts})
shared = dict(
    output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=3, use_cpu=True,
    bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
)
whole = {"generation_kwargs": {"min_new_tokens": new}}

def reward(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

if kind == "GRPO":
    arguments = trl.GRPOConfig(num_generations=4, max_completion_length=new, beta=0.1, **whole, **shared)
    trainer = trl.GRPOTrainer("model", reward, arguments, rows)
elif kind == "RLOO":
    arguments = trl.RLOOConfig(num_generations=4, max_completion_length=new, **whole, **shared)
    trainer = trl.RLOOTrainer("model", reward, arguments, rows)
elif kind == "Distillation":
    arguments = trl.DistillationConfig(max_completion_length=new, **whole, **shared)
    trainer = trl.DistillationTrainer("model", teacher_model="model", args=arguments, train_dataset=rows)
elif kind == "GKD":
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    messages = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": "This. " * 9}] for prompt in prompts
    ]
    arguments = GKDConfig(max_new_tokens=new, lmbda=1.0, max_length=64, **shared)
    rows = Dataset.from_dict({"messages": messages})
    trainer = GKDTrainer("model", "model", arguments, train_dataset=rows, processing_class=tokenizer)
else:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    arguments = OnlineDPOConfig(max_new_tokens=new, max_length=256, **whole, **shared)
    trainer = OnlineDPOTrainer(
        AutoModelForCausalLM.from_pretrained("model"), reward_funcs=lambda prompts, **given: reward(**given),
        args=arguments, train_dataset=rows, processing_class=tokenizer,
    )
trainer.train()
"""

KINDS = ["GRPO", "RLOO", "Distillation", "GKD", "online DPO"]


@pytest.mark.parametrize("kind", KINDS)
def test_trainers_generate_in_a_phase_of_its_own(script, kind):
    found = estimate_script(script(TRAINERS), [kind, "40"], gpu="cpu")
    assert found.steps == 3
    assert {"generate", "forward", "backward", "optimizer_step"} <= found.estimate.by_phase.keys()
    assert ("score" in found.estimate.by_phase) == (
        kind != "Distillation"
    )  # whose teacher scores in the loss itself
    assert [words for words in words_of(found) if "gets all 40 tokens" in words] == words_of(found) != []


# Online DPO has a training step of its own, which hides the phases of a real run.
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_trainers_take_the_bytes_of_a_real_run(with_weights, kind):
    name = with_weights(TRAINERS)
    found, real = estimate_script(name, [kind, "40"], gpu="cpu"), run_for_real(name, [kind, "40"])
    phases = {phase: size for phase, size in found.estimate.by_phase.items() if phase != "load"}
    measured = {phase: real.by_phase[phase] for phase in phases}
    assert phases == pytest.approx(measured, rel=SHARE, abs=SCRATCH_BYTES)


SEQ2SEQ = """
import sys

from datasets import Dataset
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

config = T5Config(
    vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
)
ids = [[5, 6, 7, 8, 9, 10, 11, 1]] * 16
rows = Dataset.from_dict({"input_ids": ids, "labels": ids, "attention_mask": [[1] * 8] * 16})
arguments = Seq2SeqTrainingArguments(
    "out", per_device_train_batch_size=4, per_device_eval_batch_size=8, max_steps=3, predict_with_generate=True,
    generation_max_length=64, generation_num_beams=int(sys.argv[1]), eval_strategy="steps", eval_steps=3,
    report_to="none", use_cpu=True, disable_tqdm=True,
)
Seq2SeqTrainer(
    T5ForConditionalGeneration(config), arguments, train_dataset=rows, eval_dataset=rows,
    compute_metrics=lambda found: {"rows": len(found.predictions)},
).train()
"""


@pytest.mark.parametrize("beams", ["1", pytest.param("3", marks=pytest.mark.slow)])
def test_an_evaluation_generates(script, beams):
    name = script(SEQ2SEQ)
    found, real = estimate_script(name, [beams], gpu="cpu"), run_for_real(name, [beams])
    for phase in ("generate", "evaluation"):
        assert found.estimate.by_phase[phase] == pytest.approx(real.by_phase[phase], rel=SHARE)
    assert any("gets all 63 tokens" in words for words in words_of(found)) == (beams == "1")
    assert not any("gathers the logits" in choice for choice in found.estimate.choices)


WITH_VLLM = """
import sys

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from trl import GRPOConfig, GRPOTrainer

tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForCausalLM.from_config(
    LlamaConfig(vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4)
)
arguments = GRPOConfig(
    "out", max_completion_length=24, num_generations=2, per_device_train_batch_size=2, max_steps=2, use_vllm=True,
    **eval(sys.argv[1]),
)
rows = Dataset.from_dict({"prompt": ["What?"] * 8})
GRPOTrainer(
    model, lambda completions, **kwargs: [1.0] * len(completions), arguments, rows, processing_class=tokenizer,
    peft_config=LoraConfig(target_modules="all-linear") if sys.argv[2] == "lora" else None,
).train()
"""


def with_vllm(script, options, adapter="none"):
    return estimate_script(script(WITH_VLLM), [options, adapter], gpu="l4", steps=2)


def test_vllm_takes_its_share_of_the_gpu(script):
    found = with_vllm(script, "{'vllm_gpu_memory_utilization': 0.25}").estimate
    assert found.gpu.held_by_others_bytes == int(0.25 * found.gpu.memory_bytes)
    assert found.budget.device_bytes == found.gpu.memory_bytes - found.gpu.held_by_others_bytes
    assert found.fits
    assert any("generation: not run, as vLLM does it" in choice for choice in found.choices)
    assert any("vllm_gpu_memory_utilization=0.25 says, all the time" in choice for choice in found.choices)
    assert not with_vllm(script, "{'vllm_gpu_memory_utilization': 0.97}").estimate.fits


def test_vllm_that_sleeps_counts_while_it_is_awake(script):
    awake = with_vllm(script, "{'vllm_gpu_memory_utilization': 0.25}").estimate
    sleeps = with_vllm(
        script, "{'vllm_gpu_memory_utilization': 0.25, 'vllm_enable_sleep_mode': True}"
    ).estimate
    assert sleeps.allocated_peak_bytes == awake.allocated_peak_bytes
    # The gradients and activations of training come while it sleeps.
    assert 0 < sleeps.gpu.held_by_others_bytes < awake.gpu.held_by_others_bytes - 200 * 2**20
    assert any("sleeps at level 2, which leaves nothing" in choice for choice in sleeps.choices)
    most = "{'vllm_gpu_memory_utilization': 0.99, 'vllm_enable_sleep_mode': True}"
    assert not with_vllm(script, most).estimate.fits


def test_vllm_on_a_server_takes_nothing_here(script):
    found = with_vllm(script, "{'vllm_mode': 'server'}", "lora").estimate
    assert found.gpu.held_by_others_bytes == 0
    assert any(
        "on a server (vllm_mode=server), with nothing on this GPU" in choice for choice in found.choices
    )

"""Scripts that run on this machine's processor hold the bytes that their estimates say."""

from __future__ import annotations

import pytest
import torch
from measuring.real_script import run_for_real

from lowmem_ft.planning.script_runs import estimate_script

SHARE = 0.001
"""What they may differ by: numbers that libraries keep for the log, and tensors of a few bytes."""

LOOP = """
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        ids = torch.randint(0, 512, (4, 48)).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())
"""

TRAINER = """
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments
    )

    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.pad_token = tokenizer.eos_token
    rows = Dataset.from_dict({"text": ["This is a text to learn from. " * 5] * 64})
    rows = rows.map(lambda row: tokenizer(row["text"]), batched=True, remove_columns=["text"])
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=3, logging_steps=1,
        use_cpu=True, report_to="none", save_strategy="no", eval_strategy="steps", eval_steps=3, disable_tqdm=True,
    )
    Trainer(
        AutoModelForCausalLM.from_pretrained("model"), arguments, train_dataset=rows,
        eval_dataset=rows.select(range(8)),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    ).train()
"""

SFT = """
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    rows = [
        {"messages": [{"role": "user", "content": "What? " * 4}, {"role": "assistant", "content": "This. " * 9}]}
    ] * 24
    arguments = SFTConfig(
        "out", max_length=48, per_device_train_batch_size=4, max_steps=3, report_to="none", save_strategy="no",
        use_cpu=True, bf16=False, disable_tqdm=True,
    )
    SFTTrainer(
        "model", args=arguments, train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    ).train()
"""


@pytest.mark.parametrize("text", [LOOP, TRAINER, SFT], ids=["loop", "Trainer", "SFT with LoRA"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_script_takes_on_this_machine_what_its_estimate_says(with_weights, text):
    name = with_weights(text)
    found, real = estimate_script(name, gpu="cpu"), run_for_real(name)
    assert found.steps == real.steps == 3
    assert found.kept_bytes == pytest.approx(real.kept_bytes, rel=SHARE)
    phases = {**found.estimate.by_phase}
    del phases["load"]
    assert {"forward", "backward", "optimizer_step"} <= phases.keys() <= real.by_phase.keys()
    assert phases == pytest.approx({phase: real.by_phase[phase] for phase in phases}, rel=SHARE)
    assert torch.get_default_dtype() == torch.float32

"""What a script saves by its trainer and loads again while it is estimated, files that it moves, and its end."""

from __future__ import annotations

import pytest

from lowmem_ft.planning.script_runs import estimate_script

IMPORTS = """
    import gc, os, sys
    import torch
    from datasets import Dataset
    from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel
    from transformers import (
        AutoConfig, AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, EarlyStoppingCallback,
        Trainer, TrainerCallback, TrainingArguments, pipeline,
    )

    tokenizer = AutoTokenizer.from_pretrained("model")
    rows = Dataset.from_dict({"input_ids": [[1] * 16] * 64})

    class BestModelIsLoaded(TrainerCallback):
        def __init__(self, model, load):
            self.calls = []
            original = getattr(model, load)
            setattr(model, load, lambda *args, **kwargs: self.calls.append(args) or original(*args, **kwargs))

        def on_train_end(self, args, state, control, **kwargs):
            assert state.best_global_step == min(3, state.max_steps), state
            assert len(self.calls) == 1
"""

WHOLE_MODEL = """
    model = AutoModelForCausalLM.from_pretrained("model")
    is_loaded = BestModelIsLoaded(model, "load_state_dict")
    args = TrainingArguments(
        "out", max_steps=int(sys.argv[1]), per_device_train_batch_size=4, eval_strategy="steps", eval_steps=1,
        save_steps=50, load_best_model_at_end=True, metric_for_best_model="loss", save_total_limit=1,
    )
    trainer = Trainer(
        model, args, DataCollatorForLanguageModeling(tokenizer, mlm=False), rows, rows, processing_class=tokenizer,
        callbacks=[EarlyStoppingCallback(1), is_loaded],
    )
    result = trainer.train(resume_from_checkpoint=True)
    for split, metrics in (("train", result.metrics), ("eval", trainer.evaluate())):
        trainer.log_metrics(split, metrics)
        trainer.save_metrics(split, metrics)
    trainer.save_state()
    trainer.save_model()
    trainer.push_to_hub()
    assert {"all_results.json", "trainer_state.json", "model.safetensors"} <= set(os.listdir("out"))
    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(
        "parts", state_dict=trainer.accelerator.get_state_dict(trainer.model), max_shard_size="50KB"
    )
    assert os.path.exists("parts/model.safetensors.index.json")
    print(pipeline("text-generation", model=trainer.model, tokenizer=tokenizer)("Hello", max_new_tokens=2))
    best = trainer.state.best_model_checkpoint
    del is_loaded, model, trainer
    for folder in ("out", "parts", best):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.lm_head.weight is model.model.embed_tokens.weight
    assert AutoConfig.from_pretrained("out").architectures == ["LlamaForCausalLM"]
    assert len(AutoTokenizer.from_pretrained("out")) == len(tokenizer)
    print(pipeline("text-generation", model="out")("Hello", max_new_tokens=2))
"""

ADAPTER = """
    from trl import SFTConfig, SFTTrainer

    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16)
    trainer = SFTTrainer(
        model, eval_dataset=rows, train_dataset=rows, processing_class=tokenizer,
        args=SFTConfig(
            "out", max_steps=int(sys.argv[1]), eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True
        ),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.add_callback(BestModelIsLoaded(trainer.model, "load_adapter"))
    trainer.train()
    trainer.save_model("adapter")
    trainer.model.save_pretrained("beside", safe_serialization=False)
    sizes = {name: weight.shape for name, weight in trainer.model.named_parameters() if "lora" in name}
    del model, trainer
    gc.collect()
    torch.cuda.empty_cache()

    base = AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16, device_map="auto")
    model = PeftModel.from_pretrained(base, "adapter")
    assert {name: weight.shape for name, weight in model.named_parameters() if "lora" in name} == sizes
    merged = model.merge_and_unload()
    merged.save_pretrained("merged")
    AutoTokenizer.from_pretrained("adapter").save_pretrained("merged")
    for folder in ("adapter", "beside"):
        AutoPeftModelForCausalLM.from_pretrained(folder)
    assert any("lora" in name for name, _ in AutoModelForCausalLM.from_pretrained("adapter").named_parameters())
    model = AutoModelForCausalLM.from_pretrained("merged", device_map="auto")
    assert model.dtype == torch.bfloat16
    print(pipeline("text-generation", model=model, tokenizer=tokenizer)("Hello", max_new_tokens=2))
"""


@pytest.mark.parametrize("text", [WHOLE_MODEL, ADAPTER], ids=["whole model", "adapter"])
def test_what_a_trainer_saves_is_loaded_again_and_the_best_model_at_its_end(script, tmp_path, text):
    name = script(IMPORTS + text)
    found = estimate_script(name, ["2"], gpu="l4")
    assert "steps: the script ended after 2 of 3 requested" in found.estimate.choices
    assert found.estimate.by_phase["evaluation"] > 0
    found = estimate_script(name, ["9"], gpu="l4")
    assert found.steps == 3
    assert [choice for choice in found.estimate.choices if choice.startswith("after training")] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "train.py"]


def test_a_model_that_is_loaded_beside_the_trained_one_counts(script):
    text = (
        IMPORTS
        + """
    model = AutoModelForCausalLM.from_pretrained("model")
    args = TrainingArguments("out", max_steps=9, per_device_train_batch_size=1)
    trainer = Trainer(model, args, DataCollatorForLanguageModeling(tokenizer, mlm=False), rows)
    trainer.train()
    trainer.save_model("saved")
    copies = [AutoModelForCausalLM.from_pretrained("saved").cuda() for _ in range(int(sys.argv[1]))]
    """
    )
    none, many = (estimate_script(script(text), [number], gpu="l4").estimate for number in ("0", "40"))
    assert many.allocated_peak_bytes > none.allocated_peak_bytes + 20 * 4 * 41_120


MOVES = """
    import json, os, pathlib, shutil, tempfile
    import pandas
    import pyarrow.parquet
    import pytest
    import torch
    from datasets import load_dataset
    from safetensors import safe_open
    from safetensors.torch import load_model, save_model

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).cuda()
    model[1].weight = model[0].weight
    torch.save(model.state_dict(), "weights.tmp")
    os.replace("weights.tmp", "weights.pt")
    assert not os.path.exists("weights.tmp") and len(torch.load("weights.pt")) == 4

    os.makedirs("checkpoint.tmp")
    save_model(model, "checkpoint.tmp/model.safetensors")
    pathlib.Path("checkpoint.tmp").rename("checkpoint")
    os.symlink("checkpoint", "latest")
    assert load_model(model, "latest/model.safetensors") == (set(), [])
    with safe_open("checkpoint/model.safetensors", framework="pt", device=0) as file:
        assert len(file.keys()) == 3
        assert file.get_tensor("0.bias").device == model[0].bias.device
    shutil.copytree("checkpoint", "copied")
    shutil.rmtree("checkpoint")
    assert os.listdir("copied") == ["model.safetensors"] and not os.path.exists("checkpoint")
    try:
        os.remove("missing")
        raise AssertionError
    except FileNotFoundError:
        pass

    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write("new")
    os.replace(file.name, "kept.txt")
    assert open("kept.txt").read() == "new"
    shutil.move(tempfile.mkdtemp(), "moved")

    shutil.copy("train.py", "copied.py")
    shutil.rmtree("model")
    assert {"train.py", "copied.py", "kept.txt"} <= {*os.listdir()}
    assert "model" not in os.listdir()
    assert sorted(entry.path for entry in os.scandir("copied")) == ["copied/model.safetensors"]
    with pytest.raises(FileNotFoundError):
        os.listdir("model")

    os.makedirs("tables", exist_ok=True)
    pandas.DataFrame({"a": [1, 2]}).to_parquet("tables/one.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"a": [3]}), os.path.abspath("tables/two.parquet"))
    assert [*pandas.read_parquet("tables/one.parquet").a] == [1, 2]
    assert pyarrow.parquet.read_table("tables/two.parquet").num_rows == 1
    assert load_dataset("tables", split="train")["a"][:] == [1, 2, 3]
    pathlib.Path("rows.jsonl").write_text(json.dumps({"a": 4}))
    assert load_dataset("json", data_files="*.jsonl", split="train")["a"][:] == [4]
    os.utime("train.py", (0, 0))

    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(1, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_files_that_a_script_has_written_are_moved_and_deleted_and_no_others(script, tmp_path):
    (tmp_path / "kept.txt").write_text("old")
    assert estimate_script(script(MOVES), gpu="l4").steps == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.txt", "model", "train.py"]
    assert (tmp_path / "kept.txt").read_text() == "old"
    assert (tmp_path / "train.py").stat().st_mtime > 0


TRAINED = """
    import os, subprocess, sys, time, urllib.request
    import torch
    from http.server import HTTPServer, BaseHTTPRequestHandler
    from transformers import Trainer, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x, labels=None):
            y = self.layer(x)
            return {"loss": (y - labels).square().mean(), "logits": y}

    rows = [{"x": torch.ones(8), "labels": torch.ones(8)}] * 1000
    trainer = Trainer(Net(), TrainingArguments("out", per_device_eval_batch_size=4), train_dataset=rows)
    trainer.train()
    assert len(trainer.predict(rows).predictions) == 8
    trainer.evaluate(eval_dataset=rows)
    {after}
    torch.zeros(2**28, device="cuda")
"""
LARGE = (
    "from transformers import AutoConfig, AutoModelForCausalLM; large = AutoConfig.from_pretrained('model'); "
    "large.intermediate_size, large.num_hidden_layers, large.hidden_size = 65536, 12, 4096; "
    "AutoModelForCausalLM.from_pretrained('model', config=large, dtype=torch.float32, device_map='auto')"
)
AFTER = {
    "pass": "needs more than while it trains, which takes ",
    "subprocess.run(['touch', 'ran'])": "is seen up to where it starts another process",
    "os.system('touch ran')": "is seen up to where it starts another process",
    "urllib.request.urlopen('http://127.0.0.1:9')": "is seen up to where it sends a request",
    "HTTPServer(('127.0.0.1', 0), BaseHTTPRequestHandler)": "is seen up to where it waits for connections",
    "while True: time.sleep(60)": "is seen up to where it waits",
    "os._exit(0)": "is seen up to where it ends its process",
    LARGE: 'is seen up to where it loads a model of which device_map="auto" leaves a part on the host',
    "trainer.train()": "is seen up to where it trains again",
    "while True: trainer.model(torch.ones(1, 8).cuda(), 0)": "is seen up to where it calls a model for the 17th time",
    "raise ValueError('mine')": "is seen up to an error (at train.py:21): ValueError: mine",
    "input()": "is seen up to an error (at train.py:21): A script that is estimated gets no input",
}


@pytest.mark.parametrize("after, words", AFTER.items(), ids=AFTER.keys())
def test_a_script_ends_after_its_training_before_it_concerns_others_or_goes_on_for_long(
    script, tmp_path, after, words
):
    found = estimate_script(script(TRAINED.replace("{after}", after)), gpu="l4")
    said = [choice for choice in found.estimate.choices if choice.startswith("after training:")]
    assert found.steps == 3
    assert not (tmp_path / "ran").exists()
    assert len(said) == 1
    assert said[0].startswith(f"after training: the script {words}")
    assert (found.estimate.allocated_peak_bytes >= 2**30) == (after == "pass")

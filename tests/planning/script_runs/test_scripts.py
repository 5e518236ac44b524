"""What becomes of somebody's script while it is estimated: what it sees, what it leaves, and what is said of it."""

from __future__ import annotations

import builtins
import os
import sys
from pathlib import Path

import pytest
import torch
from packed_checkpoints import packed_checkpoint

from lowmem_ft.foundation.errors import Interrupted, UserError
from lowmem_ft.foundation.units import MIB
from lowmem_ft.foundation.upstream import patches
from lowmem_ft.planning.script_runs import ScriptError, estimate_script, temporary_files
from lowmem_ft.virtual_gpu.device import registration

PARAMETERS = 64 * 64 + 64

STEPS = """
    import torch

    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        loss = model(torch.randn(8, 64, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
"""


def test_a_step_is_as_long_with_an_optimizer_for_each_parameter(script):
    each = """
    import torch

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).cuda()
    optimizers = {}
    for parameter in model.parameters():
        optimizers[parameter] = torch.optim.AdamW([parameter])
        parameter.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
    while True:
        model(torch.randn(8, 64, device="cuda")).sum().backward()
    """
    one = """
    import torch

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    while True:
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()
    """
    in_backward, after = (
        estimate_script(script(text), gpu="t4").estimate.step.seconds for text in (each, one)
    )
    assert in_backward == pytest.approx(after, rel=0.2)


def test_a_loop_is_ended_after_the_steps_and_its_peak_is_a_line_of_it(script):
    seen = []
    name = script(STEPS + "\n    while True:\n        step().item()\n        torch.cuda.synchronize()\n")
    found = estimate_script(name, gpu="t4", steps=4, on_step=seen.append)
    assert seen == [1, 2, 3, 4]
    assert found.steps == 4
    assert found.estimate.by_category_at_peak["optimizer_state"] >= 2 * 4 * PARAMETERS
    assert found.peak.own is not None
    assert Path(name).read_text().splitlines()[found.peak.own.line - 1].strip() == "optimizer.step()"
    assert found.peak.own.function == "step"
    assert found.host_waits_per_step == 2
    assert found.tokens_per_step == 0
    assert found.to_json()["script"]["peak_in_code"]["own"]["file"] == name


def test_the_main_optimizer_counts_and_tokens_are_those_that_are_learnt_from(script):
    name = script(
        """
        import torch
        from torch import nn

        table, small = nn.Embedding(100, 32).cuda(), nn.Embedding(4, 32).cuda()
        main, other = torch.optim.SGD(table.parameters()), torch.optim.SGD(small.parameters())
        for step in range(9):
            for batch in range(2):
                ids = torch.randint(0, 4, (3, 5), device="cuda")
                with torch.no_grad():
                    table(ids)
                (table(ids) + small(ids)).sum().backward()
                other.step()
            main.step()
        """
    )
    found = estimate_script(name, gpu="t4", steps=3)
    assert found.steps == 3
    assert found.tokens_per_step == 2 * 3 * 5


@pytest.mark.parametrize("end, said", [("7", " by sys.exit(7)"), ("'no more data'", ": no more data")])
def test_a_script_that_gives_up_after_a_step_is_quoted(script, end, said):
    found = estimate_script(script(STEPS + f"\n    step()\n    import sys\n    sys.exit({end})\n"), gpu="t4")
    assert f"the script exited after step 1{said}" in found.estimate.choices


def test_nothing_is_left_of_a_script_but_its_estimate(script, tmp_path):
    (tmp_path / "kept.txt").write_text("old")
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    before = (
        sorted(path.name for path in tmp_path.rglob("*")),
        dict(os.environ),
        builtins.open,
        sys.stdin,
        sys.argv,
    )
    name = script(
        STEPS
        + """
    import json, os, pathlib, shutil, sys, tempfile
    import beside

    assert sys.argv[1:] == ["--lr", "1e-4"], sys.argv
    os.environ["MINE"] = "1"
    os.makedirs("made/deep", exist_ok=True)
    with open("made/deep/log.json", "w") as file:
        json.dump([1], file)
    assert json.load(open("made/deep/log.json")) == [1]
    with open("kept.txt", "a") as file:
        file.write(" and new")
    assert pathlib.Path("kept.txt").read_text() == "old and new"
    pathlib.Path("touched").touch()
    pathlib.Path("kept.txt").write_text("mine")
    pathlib.Path("kept.txt").chmod(0)
    pathlib.Path("beside.py").unlink()
    pathlib.Path("folder").mkdir()
    os.remove("kept.txt")
    shutil.rmtree("model", ignore_errors=True)
    tempfile.NamedTemporaryFile().write(b"x")
    torch.save(model.state_dict(), "weights.pt")
    print("loss", step())
    step()
    sys.exit(0)
    """
    )
    found = estimate_script(name, ["--lr", "1e-4"], gpu="t4")
    assert found.steps == 2
    assert "steps: the script ended after 2 of 3 requested" in found.estimate.choices
    names = sorted(path.name for path in tmp_path.rglob("*") if path.name != name)
    assert (names, dict(os.environ), builtins.open, sys.stdin, sys.argv) == before
    assert (tmp_path / "kept.txt").read_text() == "old"
    assert (tmp_path / "kept.txt").stat().st_mode & 0o400
    assert "beside" not in sys.modules
    assert torch.cuda.is_available() == (torch.version.cuda is not None and os.path.exists("/dev/nvidia0"))


def test_a_folder_is_made_anew_by_a_script_that_deletes_the_one_of_its_last_run(script, tmp_path):
    last = tmp_path / "out" / "last.txt"
    last.parent.mkdir()
    last.write_text("of the last run")
    name = script(
        STEPS
        + """
    import os, pathlib, shutil

    if os.path.exists("out"):
        shutil.rmtree("out")
    assert not os.path.exists("out") and not pathlib.Path("out/last.txt").is_file()
    os.makedirs("out")
    with open("out/new.txt", "w") as file:
        file.write("new")
    assert os.listdir("out") == ["new.txt"]
    os.remove("out/new.txt")
    assert not pathlib.Path("out/new.txt").exists()
    step()
    step()
    """
    )
    assert estimate_script(name, gpu="t4").steps == 2
    assert last.read_text() == "of the last run"


ENDINGS = {
    "never steps": ("print(1)", "ended without an optimizer step"),
    "input": ("input('name? ')", r"gets no input, but it called input\(\) or read stdin.*\(at train.py:2\)"),
    "spawn": ("import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)", "one process, on one GPU"),
    "second GPU": (
        "import torch\ntorch.zeros(1, device='cuda:1')",
        r"one device, cuda:0, got cuda:1.*train.py:3",
    ),
    "exit": (
        "import sys\nprint('usage: no', file=sys.stderr)\nsys.exit(2)",
        r"exited by sys.exit\(2\).*usage: no",
    ),
    "gguf": (
        "from transformers import AutoModelForCausalLM as A, LlamaConfig\n"
        "A.from_pretrained('model', gguf_file='x.gguf', config=LlamaConfig())",
        "without its weights, got gguf_file|gguf",
    ),
}


@pytest.mark.parametrize("text, words", ENDINGS.values(), ids=ENDINGS.keys())
def test_what_cannot_be_estimated_is_said(script, text, words):
    with pytest.raises(UserError, match=words):
        estimate_script(script("\n" + text), gpu="t4")


def test_an_error_of_the_script_is_shown_with_its_own_frames(script):
    name = script(
        STEPS + "\n    def train():\n        step()\n        torch.zeros(2).view(3)\n\n    train()\n"
    )
    with pytest.raises(
        ScriptError, match=r"train.py ended in an error in step 2: RuntimeError: shape"
    ) as raised:
        estimate_script(name, gpu="t4")
    shown = raised.value.own_traceback
    assert 'train.py", line 18, in <module>' in shown
    assert "torch.zeros(2).view(3)" in shown
    assert "runpy" not in shown
    assert type(torch.zeros(1)) is torch.Tensor


def test_an_error_in_code_of_ours_shows_where_and_is_not_called_the_scripts(script):
    name = script("from lowmem_ft.recipe.gpu_count import on_gpus\n\non_gpus('7b-lora', None)\n")
    with pytest.raises(
        ScriptError, match="before the end of its first step, in code of lowmem_ft: Attr"
    ) as raised:
        estimate_script(name, gpu="t4")
    shown = raised.value.own_traceback
    assert "of its own code and lowmem_ft" in shown
    assert "/lowmem_ft/recipe/" in shown
    assert "on_gpus('7b-lora', None)" in shown


@pytest.mark.parametrize("stand_in", [registration, patches, temporary_files], ids=lambda m: m.__name__)
def test_an_error_in_what_stands_for_others_is_not_called_ours(script, stand_in):
    raises = f"exec(compile('1 / 0', {stand_in.__file__!r}, 'exec'))\n"
    with pytest.raises(ScriptError, match="before the end of its first step: ZeroDivisionError"):
        estimate_script(script(raises), gpu="t4")


def test_a_frame_of_a_library_is_not_called_the_scripts_own(script):
    with pytest.raises(ScriptError) as raised:
        estimate_script(script("import json\n\njson.loads('{')\n"), gpu="t4")
    shown = raised.value.own_traceback
    assert shown.startswith("The frames of its own code, and the last:\n")
    assert "json/decoder.py" in shown
    with pytest.raises(ScriptError) as raised:
        estimate_script(script("raise ValueError('mine')\n"), gpu="t4")
    assert raised.value.own_traceback.startswith("The frames of its own code:\n")


PANIC = """
from tokenizers import Tokenizer, models

Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[("a", "b")]))
"""


def test_a_panic_of_a_library_in_rust_is_an_error_of_the_script(script):
    with pytest.raises(ScriptError, match=r"train.py ended in an error.*PanicException: range end") as raised:
        estimate_script(script(PANIC), gpu="t4")
    assert 'train.py", line 4, in <module>' in raised.value.own_traceback


@pytest.mark.parametrize("signal", [KeyboardInterrupt, Interrupted(2)], ids=["Ctrl-C", "a run's own"])
def test_what_stops_a_script_from_outside_is_no_error_of_it(script, signal, monkeypatch):
    monkeypatch.setattr(torch, "stopped", signal, raising=False)
    with pytest.raises(type(signal) if isinstance(signal, BaseException) else signal):
        estimate_script(script("import torch\nraise torch.stopped"), gpu="t4")


SAVES = """
    import io, os
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    def step(model, optimizer):
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    with open("model.pt", "wb") as file:
        torch.save(model, file)
    assert os.path.exists("model.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, "all.pt")
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer)["a.bias"].shape == (64,)

    saved = torch.load("all.pt", map_location="cpu", weights_only=True)
    assert saved["epoch"] == 3
    assert {tensor.device.type for tensor in saved["model"].values()} == {"cpu"}
    assert saved["model"]["a.weight"].data_ptr() == saved["model"]["b.weight"].data_ptr()
    assert saved["optimizer"]["state"][0]["step"].item() == 1
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])

    save_file({"x": torch.ones(3, 4)}, "x.safetensors", metadata={"format": "pt"})
    assert load_file("x.safetensors")["x"].shape == (3, 4)
    causal_lm = AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16)
    causal_lm.save_pretrained("saved")
    AutoTokenizer.from_pretrained("model").save_pretrained("saved")
    assert {"config.json", "tokenizer.json"} <= set(os.listdir("saved"))
    assert AutoConfig.from_pretrained("saved").architectures == ["LlamaForCausalLM"]
    assert AutoModelForCausalLM.from_pretrained("saved", dtype="auto").dtype == torch.bfloat16
    assert len(AutoTokenizer.from_pretrained("saved")) == len(AutoTokenizer.from_pretrained("model"))

    loaded = torch.load("model.pt", weights_only=False)
    assert type(loaded) is Net and loaded.a.weight.device == model.a.weight.device
    assert isinstance(loaded.a.weight, torch.nn.Parameter) and loaded.a.weight.requires_grad
    del model
    optimizer = torch.optim.AdamW(loaded.parameters())
    step(loaded, optimizer)
    step(loaded, optimizer)
"""


def test_what_a_script_saves_it_reads_again_and_nobody_else(script, tmp_path):
    found = estimate_script(script(SAVES), gpu="t4", steps=2)
    assert found.estimate.by_category_at_peak["parameter"] >= 4 * (64 * 64 + 2 * 64)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "train.py"]


STATES = """
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in range(3):
        accelerator.backward(model(torch.randn(2, 8, device=accelerator.device)).sum())
        optimizer.step()
        accelerator.save_state("state")
        accelerator.load_state("state")
"""


def test_states_of_accelerate_are_saved_and_loaded(script, tmp_path):
    assert estimate_script(script(STATES), gpu="t4", steps=2).steps == 2
    assert not (tmp_path / "state").exists()


BY_HAND = """
    import torch

    embedding, layer = torch.nn.Embedding(100, 64).cuda(), torch.nn.Linear(64, 64).cuda()
    weights = [*embedding.parameters(), *layer.parameters()]
    for batch in range(5):
        loss = layer(embedding(torch.randint(0, 100, (4, 16), device="cuda"))).sum()
        loss.backward()
        for weight in weights:
            weight.data.add_(weight.grad, alpha=-0.1)
            weight.grad = None
"""


def test_a_script_that_changes_its_weights_by_hand_is_told_what_was_not_seen(script):
    found = estimate_script(script(BY_HAND), gpu="t4")
    assert found.steps == 0
    assert found.tokens_per_step == 4 * 16
    assert found.estimate.by_category_at_peak["gradient"] >= 4 * 64 * 64
    (said,) = [choice for choice in found.estimate.choices if choice.startswith("steps:")]
    assert "no optimizer step was seen. The estimate covers the script up to backward pass 5" in said


def test_a_script_that_goes_on_without_an_optimizer_is_ended(script, monkeypatch):
    monkeypatch.setattr("lowmem_ft.planning.script_runs.steps.MOST_BACKWARDS", 7)
    name = script(BY_HAND.replace("range(5)", "iter(int, 1)"))
    assert any(
        "up to backward pass 7" in choice for choice in estimate_script(name, gpu="t4").estimate.choices
    )


TRAINING = """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

    seen = []
    rows = Dataset.from_dict({"text": ["a"] * 6000})
    rows = rows.map(lambda row: seen.append(1) or {"input_ids": [1] * 16, "labels": [1] * 16}, remove_columns=["text"])
    assert len(seen) < 1000, len(seen)
    parts = rows.train_test_split(test_size=2000)
    train = parts["train"].shuffle(seed=1).select(range(3000))
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=2, gradient_accumulation_steps=6, num_train_epochs=2, bf16=True,
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, push_to_hub=True, report_to="all",
    )
    model = AutoModelForCausalLM.from_pretrained("model", dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    trainer = Trainer(
        model, arguments, train_dataset=train, eval_dataset=parts["test"], data_collator=default_data_collator
    )
    trainer.train(resume_from_checkpoint="nowhere")
    raise AssertionError("it was to be stopped")
"""


def test_a_trainer_takes_few_rows_and_micro_batches_and_evaluates(script, tmp_path):
    found = estimate_script(script(TRAINING), gpu="l4")
    estimate = found.estimate
    assert found.steps == 3
    assert "evaluation" in estimate.by_phase
    assert found.tokens_per_step == 2 * 6 * 16
    assert estimate.step is not None
    assert estimate.step.tokens == found.tokens_per_step
    assert "micro-batches: 2 of the 6 of a step are traced" in estimate.choices
    assert any(choice.startswith("data: 5,488 rows were left out") for choice in estimate.choices)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "train.py"]
    of_two = estimate_script(script(TRAINING.replace("steps=6", "steps=2")), gpu="l4").estimate
    assert of_two.step is not None
    assert 2 * of_two.step.seconds < estimate.step.seconds < 3 * of_two.step.seconds
    assert not any(choice.startswith("evaluation:") for choice in estimate.choices)
    with_metrics = TRAINING.replace("data_collator=", "compute_metrics=lambda found: {}, data_collator=")
    of_five = estimate_script(script(with_metrics.replace("steps=6", "steps=5")), gpu="l4")
    assert of_five.tokens_per_step == 2 * 5 * 16
    assert any("logits of all held-out rows" in choice for choice in of_five.estimate.choices)


def test_weights_are_of_the_type_and_the_kind_that_a_real_load_gives(script):
    name = script(
        """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM

        def types(**kwargs):
            return {parameter.dtype for parameter in LlamaForCausalLM.from_pretrained("model", **kwargs).parameters()}

        assert types() == {torch.float32}
        assert types(dtype=torch.float16) == {torch.float16}
        config = AutoConfig.from_pretrained("model")
        config.dtype = torch.bfloat16
        assert types(config=config) == {torch.bfloat16}
        config.tie_word_embeddings = True
        tied = AutoModelForCausalLM.from_pretrained("model", config=config)
        assert tied.lm_head.weight is tied.model.embed_tokens.weight

        bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        model = AutoModelForCausalLM.from_pretrained("model", quantization_config=bits)
        weight = model.model.layers[0].mlp.up_proj.weight
        assert weight.quant_state.quant_type == "nf4" and weight.dtype == torch.uint8
        assert weight.device.type == "vgpu"
        norm = torch.nn.Parameter(torch.zeros(2, device="cuda"))
        optimizer = torch.optim.SGD([norm])
        for step in range(4):
            (norm * model(torch.ones(2, 8, dtype=torch.long, device="cuda")).logits.sum()).sum().backward()
            optimizer.step()
        """
    )
    found = estimate_script(name, gpu="l4")
    assert (
        "weights: float32, because the model's config names no type and its weights are not read"
        in found.estimate.choices
    )
    assert found.estimate.model.parameters == 41120


@pytest.mark.parametrize("asks", ["the script", "trl"])
def test_weights_in_float32_are_said_with_who_asks_for_them(script, asks):
    text = """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from trl.trainer.utils import create_model_from_path

        config = AutoConfig.from_pretrained("model")
        config.dtype = torch.bfloat16
        config.save_pretrained("published")
        LOAD
        optimizer = torch.optim.SGD(model.parameters())
        for step in range(3):
            model(torch.ones(1, 8, dtype=torch.long)).logits.sum().backward()
            optimizer.step()
        """
    line = 'model = create_model_from_path("published", device_map=None)'
    if asks == "the script":
        line = 'model = AutoModelForCausalLM.from_pretrained("published", dtype=torch.float32)'
    found = estimate_script(script(text.replace("LOAD", line)), gpu="cpu")
    who = "train.py:9" if asks == "the script" else "trl"
    assert any(
        f"weights: float32, as {who} asks for; the model is published in bfloat16" in choice
        for choice in found.estimate.choices
    ), found.estimate.choices


def test_mixtures_are_packed_as_stock_transformers_packs_them(script, tmp_path):
    """Experts stay in 16 bits under bitsandbytes, and MXFP4 is unpacked where the package ``kernels`` is missing."""
    packed_checkpoint("gpt_oss", tmp_path / "mxfp4")
    packed_checkpoint("qwen3_moe", tmp_path / "fp8")
    text = """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

        def load(name, **kwargs):
            return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, device_map={"": 0}, **kwargs)

        config = AutoConfig.from_pretrained("fp8")
        del config.quantization_config
        for bits in (BitsAndBytesConfig(load_in_4bit=True), BitsAndBytesConfig(load_in_8bit=True)):
            layer = load("fp8", config=config, quantization_config=bits).model.layers[0]
            assert not layer.self_attn.q_proj.weight.is_floating_point()
            assert layer.mlp.experts.down_proj.dtype == torch.bfloat16
        model = load("mxfp4")
        assert model.model.layers[0].mlp.experts.down_proj.dtype == torch.bfloat16
        if FP8:
            load("fp8")
        optimizer = torch.optim.SGD(model.model.norm.parameters())
        for step in range(3):
            model(torch.ones(1, 8, dtype=torch.long, device="cuda")).logits.sum().backward()
            optimizer.step()
        """
    found = estimate_script(script(text.replace("FP8", "False")), gpu="rtx-4090")
    assert any("weights: unpacked from mxfp4" in choice for choice in found.estimate.choices)
    assert any("weights: the experts' " in choice for choice in found.estimate.choices)
    with pytest.raises(
        UserError, match=r"multiply fp8 by kernels of its own\. Estimate the script with the model"
    ):
        estimate_script(script(text.replace("FP8", "True")), gpu="rtx-4090")


def test_a_model_that_a_device_map_would_leave_in_part_on_the_host_is_placed_whole(script):
    name = script(
        """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained("model")
        config.intermediate_size, config.num_hidden_layers, config.hidden_size = 65536, 8, 4096
        config.dtype = torch.float32
        model = AutoModelForCausalLM.from_pretrained("model", config=config, device_map="auto")
        optimizer = torch.optim.SGD(model.model.norm.parameters())
        for step in range(3):
            model(torch.ones(1, 8, dtype=torch.long, device="cuda")).logits.sum().backward()
            optimizer.step()
        """
    )
    found = estimate_script(name, gpu="t4", steps=2)
    assert not found.estimate.fits
    assert found.estimate.by_category_at_peak["parameter"] > 16 * 2**30
    assert any(
        choice.startswith("device_map: the whole model on the GPU") for choice in found.estimate.choices
    )


READS = """
import torch
from datasets import load_dataset

rows = load_dataset("json", data_files="rows.jsonl", split="train")
model = torch.nn.Linear(4, 4, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for row in rows:
    model(torch.ones(1, 4, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_a_script_that_reads_its_data_says_so_before(script, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n' * 4, encoding="utf-8")
    heard = []
    estimate_script(
        script(READS),
        gpu="t4",
        steps=2,
        on_step=heard.append,
        on_reading=lambda: heard.append("reading"),
    )
    assert heard == ["reading", 1, 2]


MODEL = """
    import contextlib, copy, sys
    import torch
    from torch.utils.data import DataLoader
    from transformers import AutoConfig, AutoModelForCausalLM

    mixed = sys.argv[1] == "bf16-mixed"
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("model"))
    data = DataLoader(torch.randint(0, 100, (64, 128)), batch_size=8)
"""
PLAIN = """
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in data:
        batch = batch.cuda()
        with torch.autocast("cuda", torch.bfloat16) if mixed else contextlib.nullcontext():
            loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
AS_LIGHTNING = """
    class Metric:
        def __init__(self):
            self.default = torch.tensor(0.0)
            self.value = copy.deepcopy(self.default).cuda()

        def update(self, value):
            self.value += value.detach()

    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    metric = Metric()

    def closure():
        with torch.autocast("cuda", torch.bfloat16) if mixed else contextlib.nullcontext():
            loss = model(input_ids=batch, labels=batch).loss
        metric.update(loss)
        optimizer.zero_grad()
        loss.backward()
        return loss

    for batch in data:
        batch = batch.cuda()
        optimizer.step(closure)
        print(f"{metric.value.item():.3f}")
"""


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_trainer_of_closures_and_metrics_needs_what_the_plain_loop_needs(script, precision, capfd):
    plain = estimate_script(script(MODEL + PLAIN, "plain.py"), [precision], gpu="rtx-4090")
    other = script(MODEL + AS_LIGHTNING, "other.py")
    found = estimate_script(other, [precision], gpu="rtx-4090")
    assert capfd.readouterr().out == ""
    of_metrics = 8 * 512  # a few single numbers, each in a block of its own
    for name, num_bytes in plain.estimate.by_category_at_peak.items():
        assert abs(found.estimate.by_category_at_peak[name] - num_bytes) <= of_metrics, name
    a_segment = 2 * MIB  # of small blocks, among which a metric may be the one too many
    assert abs(found.estimate.reserved_peak_bytes - plain.estimate.reserved_peak_bytes) <= a_segment
    assert abs(found.kept_bytes - plain.kept_bytes) <= of_metrics
    assert found.steps == plain.steps == 3


@pytest.mark.usefixtures("llama_as_it_was")
def test_a_stock_trainer_with_ligers_kernels_is_estimated_and_takes_less(script):
    pytest.importorskip("liger_kernel", reason="Liger needs Triton, which this system has not")
    name = script(
        """
        import sys
        from datasets import Dataset
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

        sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_hidden_layers=1)
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=8000))
        rows = Dataset.from_list([{"input_ids": [1] * 256, "labels": [1] * 256}] * 24)
        args = TrainingArguments("out", bf16=True, report_to=[], use_liger_kernel=sys.argv[1] == "fused")
        Trainer(model, args, train_dataset=rows).train()
        """
    )
    fused, stock = (estimate_script(name, [way], gpu="a100-80gb").estimate for way in ("fused", "stock"))
    logits = 8 * 256 * 8000 * 4
    assert fused.allocated_peak_bytes < stock.allocated_peak_bytes - 2 * logits


@pytest.mark.parametrize(
    "allow",
    [
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.set_float32_matmul_precision('high')",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "from transformers import TrainingArguments; TrainingArguments('out', tf32=True)",
    ],
    ids=["allow_tf32", "precision", "fp32_precision", "TrainingArguments"],
)
def test_products_that_a_script_allows_tf32_take_its_rate_and_the_setting_is_taken_back(script, allow):
    products = """
    weight = torch.ones(4096, 4096, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    for _ in range(4):
        (weight @ weight @ weight).sum().backward()
        optimizer.step()
    """
    before = torch.backends.cuda.matmul.fp32_precision, torch.get_float32_matmul_precision()
    seconds = {
        first: estimate_script(
            script(f"\n    import torch\n    {first}\n{products}"), gpu="a100-80gb"
        ).estimate.step.seconds
        for first in ("pass", allow)
    }
    assert seconds["pass"] > 4 * seconds[allow]
    assert (torch.backends.cuda.matmul.fp32_precision, torch.get_float32_matmul_precision()) == before


def test_a_gpu_without_tf32_refuses_it_as_the_real_one_does(script):
    name = script("from transformers import TrainingArguments; TrainingArguments('out', tf32=True)")
    with pytest.raises(ScriptError, match="--tf32 requires Ampere or a newer GPU arch"):
        estimate_script(name, gpu="t4")


def test_a_script_for_a_launcher_runs_as_its_only_process(script):
    name = script(
        """
        import os
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            model(torch.randn(2, 8, device="cuda")).sum().backward()
            optimizer.step()
        """
    )
    found = estimate_script(name, gpu="t4")
    assert found.steps == 3
    assert any("torchrun" in choice for choice in found.estimate.choices)
    assert "LOCAL_RANK" not in os.environ

"""Answers at a run's evaluations: the same on every rung, and of no effect on what is trained."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem_ft.cli import main
from lowmem_ft.foundation.errors import DataError, RecipeError
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.checks.path_checks import check_paths_of_run
from lowmem_ft.reports.run_record import read_run
from lowmem_ft.training.evaluation import run_evaluations
from lowmem_ft.training.evaluation.held_out_loss import EvaluationResult
from lowmem_ft.training.evaluation.run_generations import RunGenerations
from lowmem_ft.training.folder.generations_file import before_and_after, read_generations
from lowmem_ft.training.run.loop import train

SHORT = ("training.max_steps=2", "training.save_steps=1", "training.eval_steps=1", "budget.preflight=false")
ANSWERING = ("training.eval_generations=2", "training.max_new_tokens=6")

RUNGS = {
    "the lowest rung": (
        *("offload.parameters=stream", "optimizer.in_backward=true", "offload.optimizer=host"),
        *("accumulation.order=vertical", "tiling.mlp=2", "tiling.head=2"),
    ),
    "lora in 4 bits": ("adapter.name=lora", "adapter.lora_dropout=0.1", "model.quantization=nf4"),
    "packed, on the host": (
        *("data.packing=true", "data.max_length=64", "training.mixed_precision=bf16"),
        *("offload.optimizer=host", "offload.activations=inputs"),
    ),
}


def everything(folder):
    """What a run left of its training: losses, norms and weights."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {key: record.get(key) for key in ("step", "loss", "grad_norm", "eval_loss")}
        for record in records
        if "loss" in record or "eval_loss" in record
    ]
    (file,) = (folder / "model").glob("*.safetensors")
    return kept, file.read_bytes()


@pytest.mark.parametrize("rung", RUNGS)
def test_answers_change_no_bit_of_the_training(rung, tiny, tmp_path):
    """Dropout is drawn after the answers, too; the optimizer's updates are deferred over them."""
    train(tiny(*SHORT, *RUNGS[rung], output_dir=tmp_path / "without"))
    train(tiny(*SHORT, *RUNGS[rung], *ANSWERING, output_dir=tmp_path / "with"))
    assert everything(tmp_path / "with") == everything(tmp_path / "without")
    answers = read_generations(tmp_path / "with")
    assert [(one.step, one.index) for one in answers] == [(s, i) for s in (0, 1, 2) for i in (0, 1)]
    assert all(one.answer is not None and one.reference for one in answers)


def test_the_last_answers_are_the_finished_models(tiny, tmp_path):
    """transformers' generate gives them, on the model folder alone; the first step has those of the weights before."""
    result = train(
        tiny("training.max_steps=14", "training.save_steps=null", *ANSWERING, output_dir=tmp_path / "run")
    )
    model: Any = AutoModelForCausalLM.from_pretrained(result.model_folder)
    tokenizer = AutoTokenizer.from_pretrained(result.model_folder)
    answers = read_generations(tmp_path / "run")
    for one in answers[-2:]:
        ids = tokenizer(one.prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        answered = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        said = tokenizer.decode(answered[0, ids.shape[1] :]).removesuffix(tokenizer.eos_token).strip()
        assert one.answer == said
    assert [one.steps for one in before_and_after(answers)] == [(0, 14)] * 2
    assert any(one.before != one.after for one in before_and_after(answers))


def test_a_resumed_run_gives_the_same_answers_once(tiny, tmp_path):
    train(tiny(*SHORT, *ANSWERING, output_dir=tmp_path / "whole"))
    train(tiny(*SHORT, *ANSWERING, "training.save_total_limit=null", output_dir=tmp_path / "again"))
    (tmp_path / "again" / "checkpoint-2" / "checkpoint.json").unlink()  # as if it had been killed before
    with (tmp_path / "again" / "generations.jsonl").open("a") as lines:
        lines.write('{"step": 2, "ind')
    train(
        tiny(
            *(*SHORT, *ANSWERING, "training.resume_from_checkpoint=auto"),
            output_dir=tmp_path / "again",
        )
    )
    assert read_generations(tmp_path / "again") == read_generations(tmp_path / "whole")
    assert everything(tmp_path / "again") == everything(tmp_path / "whole")


def test_answers_of_the_last_step_are_dropped_by_a_run_that_takes_more(tiny, tmp_path):
    """They came after the step's checkpoint: to the run that goes on from it the step was never evaluated."""
    settings = (*ANSWERING, "training.save_steps=2", "training.eval_steps=3", "budget.preflight=false")
    folder = tmp_path / "run"
    train(tiny(*settings, "training.max_steps=2", output_dir=folder))
    assert {one.step for one in read_generations(folder)} == {0, 2}
    more = ("training.max_steps=3", "training.resume_from_checkpoint=auto")
    train(tiny(*settings, *more, output_dir=folder))
    assert [(one.step, one.index) for one in read_generations(folder)] == [
        (s, i) for s in (0, 3) for i in (0, 1)
    ]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "eval_loss" in record] == [3]


def test_the_answers_shown_are_the_finished_models_where_an_earlier_step_is_the_best(
    tiny, tmp_path, monkeypatch, capsys
):
    losses = iter((3.0, 1.0, 2.0))
    monkeypatch.setattr(run_evaluations, "evaluate", lambda *_, **__: EvaluationResult(next(losses), 10))
    best = ("training.load_best_model_at_end=true", "training.save_total_limit=1", *ANSWERING)
    result = train(tiny(*SHORT, "training.max_steps=3", *best, output_dir=tmp_path / "run"))
    answers = read_generations(tmp_path / "run")
    assert (result.best_step, answers[-1].step) == (2, 3)
    shown = read_run(tmp_path / "run")
    assert [one.steps for one in shown.generations] == [(0, 2)] * 2
    assert [one.after for one in shown.generations] == [one.answer for one in answers if one.step == 2]
    assert main(["report", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "at step 2" in said
    assert "at step 3" not in said
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "| prompt | at step 0 | at step 2 |" in card


def test_prompts_of_a_file_need_no_held_out_rows(tiny, tmp_path):
    """A line is what a user says; messages end before the answer; a prompt that is a string is read as it is."""
    rows = [
        {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]},
    ]
    files = {
        "prompts.jsonl": "".join(f"{json.dumps(row)}\n" for row in rows),
        "plain.jsonl": '{"prompt": "The capital"}\n',
        "lines.txt": "Hello\nWho?\n",
    }
    seen = {}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        folder = tmp_path / name.partition(".")[0]
        train(
            tiny(
                *(
                    "training.max_steps=1",
                    "training.eval_steps=null",
                    "data.eval_size=null",
                    "training.max_new_tokens=2",
                ),
                *(f"training.generation_prompts={tmp_path / name}", "budget.preflight=false"),
                output_dir=folder,
            )
        )
        seen[name] = [one.prompt for one in read_generations(folder) if one.step == 1]
    turn = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert seen["prompts.jsonl"] == [turn, f"<|im_start|>system\nBe brief.<|im_end|>\n{turn}"]
    assert seen["plain.jsonl"] == ["The capital"]
    assert seen["lines.txt"] == [turn, turn.replace("Hello", "Who?")]


@pytest.mark.parametrize(
    "rows, problem",
    [
        ('{"question": "Who?"}\n', "needs a column of prompts"),
        ('{"prompt": " "}\n', "Example 0 of .*: a prompt is text, got an empty one"),
        ('{"messages": [{"role": "assistant", "content": "Hi"}]}\n', "only assistant turns"),
        (json.dumps({"prompt": "long " * 200}), "less than data.max_length=128 tokens"),
    ],
)
def test_bad_prompts_are_told_before_weights_are_read(rows, problem, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "lowmem_ft.training.run.run_parts.build_session", lambda *_, **__: pytest.fail("weights were read")
    )
    (tmp_path / "bad.jsonl").write_text(rows)
    with pytest.raises(DataError, match=problem):
        train(tiny(f"training.generation_prompts={tmp_path / 'bad.jsonl'}", "budget.preflight=false"))


def test_more_answers_than_held_out_rows_are_refused(tiny):
    with pytest.raises(DataError, match="as many held-out examples, but there are 8"):
        train(tiny("training.eval_generations=9", "budget.preflight=false"))


def test_settings_that_answer_nothing_are_refused(tiny):
    with pytest.raises(RecipeError, match=r"training\.eval_generations needs held-out data"):
        tiny("data.eval_size=null", "training.eval_steps=null", *ANSWERING)
    with pytest.raises(RecipeError, match=r"training\.max_new_tokens=9 limits answers"):
        tiny("training.max_new_tokens=9")
    with pytest.raises(RecipeError, match=r"distributed\.strategy=zero3.*fsdp2 or ddp"):
        tiny("distributed.strategy=zero3", "training.eval_generations=2")


def test_memory_that_runs_out_leaves_a_prompt_unanswered_and_the_run_as_it_was(
    tiny, tmp_path, monkeypatch, caplog
):
    train(tiny(*SHORT, output_dir=tmp_path / "without"))
    answer, asked = RunGenerations._answer, []

    def fails_once(self, session, *args, **kwargs):
        asked.append(1)
        if len(asked) == 2:
            monkeypatch.setattr(session.unwrapped_model, "generate", fails)
        result = answer(self, session, *args, **kwargs)
        if len(asked) == 2:
            monkeypatch.undo()
            monkeypatch.setattr(RunGenerations, "_answer", fails_once)
        return result

    def fails(**_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(RunGenerations, "_answer", fails_once)
    train(tiny(*SHORT, *ANSWERING, output_dir=tmp_path / "with"))
    assert everything(tmp_path / "with") == everything(tmp_path / "without")
    assert [one.answer is None for one in read_generations(tmp_path / "with")] == [False, True] + [False] * 4
    assert "stays without an answer" in caplog.text


def test_trackers_log_and_model_card_show_the_answers(tiny, tmp_path, monkeypatch, caplog):
    seen = []
    monkeypatch.setattr(
        "lowmem_ft.training.runtimes.accelerate_runtime.AccelerateFiles.log",
        lambda self, record: seen.append(record),
    )
    with caplog.at_level("INFO", "lowmem_ft"):
        train(tiny(*SHORT, *ANSWERING, output_dir=tmp_path / "run"))
    answers = read_generations(tmp_path / "run")
    shown = [record for record in seen if "generation/0" in record]
    assert [record["step"] for record in shown] == [0, 1, 2]
    assert all(one.prompt in shown[0][f"generation/{one.index}"] for one in answers[:2])
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "| prompt | at step 0 | at step 2 |" in card
    assert "generation_prompts" not in card


def test_answers_go_with_the_held_out_rows_that_other_data_replaces(tmp_path):
    file = tmp_path / "mine.yaml"
    lines = ["base: tiny", "data: {eval_size: null, eval_path: held.jsonl}"]
    lines += ["training: {eval_generations: 2, max_new_tokens: 9}"]
    file.write_text("\n".join(lines))
    assert load_recipe(str(file)).training.eval_generations == 2
    assert not load_recipe(str(file), ["data=other.jsonl"]).training.generates
    kept = load_recipe(str(file), ["data=other.jsonl", "training.generation_prompts=prompts.txt"])
    assert (kept.training.eval_generations, kept.training.max_new_tokens) == (2, 9)


def test_a_file_of_prompts_is_looked_for_at_once(tiny):
    with pytest.raises(DataError, match=r"training\.generation_prompts names a file that does not exist"):
        check_paths_of_run(tiny("training.generation_prompts=missing.txt"))

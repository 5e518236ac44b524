"""A runtime of another class takes the place of Accelerate's, from loading to saving, without a patch."""

from __future__ import annotations

import contextlib

import pytest
import torch
from safetensors.torch import load_file

from lowmem_ft.foundation.errors import DoesNotFitError
from lowmem_ft.host.pinned_memory import HostMemory
from lowmem_ft.models import load_master_weights, load_model, load_model_config
from lowmem_ft.optimizers import OptimizerState, export_optimizer_state, import_optimizer_state
from lowmem_ft.techniques.gradients.norm import clip_grad_norm
from lowmem_ft.training import train
from lowmem_ft.training.checkpoints.session_files import save_trained
from lowmem_ft.training.distributed import process_group
from lowmem_ft.training.out_of_memory import diagnosis
from lowmem_ft.training.out_of_memory.budget_cap import ThisHost
from lowmem_ft.training.random_state import import_random_state
from lowmem_ft.training.schedule import create_scheduler

SHORT = ("training.max_steps=4", "training.save_steps=2", "training.eval_steps=2", "data.max_length=64")


class PlainRuntime:
    """One process on a CPU in plain torch, which keeps the optimizer's state in a file of its own."""

    device = torch.device("cpu")
    num_processes, num_processes_here, process_index, is_main = 1, 1, 0, True
    host, progress_console = ThisHost(), None

    def __init__(self):
        self.logged = []

    def load_config(self, config):
        return load_model_config(config)

    def load_model(self, config, hf_config, *, attn_implementation, seed, host=None):
        return load_model(
            config,
            hf_config,
            attn_implementation=attn_implementation,
            device=self.device,
            seed=seed,
            mixed_precision="no",
        )

    def master_weights(self, config, hf_config):
        return load_master_weights(config, hf_config)

    def host_memory(self, budget, folder):
        return HostMemory(self.device)

    def schedule(self, optimizer, config, num_training_steps):
        return create_scheduler(optimizer, config, num_training_steps)

    def shard(self, model, config):
        return None

    def prepare(self, model, optimizer):
        return model, optimizer

    def reduce_gradients(self, parameters):
        pass

    def autocast(self):
        return contextlib.nullcontext()

    def micro_batch(self, model, *, is_last):
        return contextlib.nullcontext()

    def backward(self, loss):
        loss.backward()

    def clip_grad_norm(self, optimizer, max_norm):
        return clip_grad_norm((p for group in optimizer.param_groups for p in group["params"]), max_norm)

    def unscale(self, values):
        pass

    def sum_over_processes(self, value):
        return value

    def fetch(self, *values):
        return tuple(float(value) for value in values)

    def loss_scale_may_overflow(self):
        return False

    def update_weights(self, optimizer, *, finite):
        if finite:
            optimizer.step()

    def update_loss_scale(self):
        pass

    def take_step(self, window, step):
        return step(window)

    def to_evaluate(self, batches):
        return batches

    def save_trained(self, session, tokenizer, folder):
        save_trained(session, tokenizer, folder)

    def save_session(self, session, tokenizer, folder, identity):
        self.save_trained(session, tokenizer, folder)
        named_parameters = session.unwrapped_model.named_parameters()
        state = export_optimizer_state(session.optimizer, named_parameters)
        torch.save(dict(state.tensors), folder / "state.pt")
        return state.scalars

    def load_session(self, session, folder, optimizer_scalars):
        state = OptimizerState(tensors=torch.load(folder / "state.pt"), scalars=optimizer_scalars)
        named_parameters = session.unwrapped_model.named_parameters()
        import_optimizer_state(session.optimizer, named_parameters, state)

    def load_random_state(self, state):
        import_random_state(state, self.device)

    def loss_scale_state(self):
        return None

    def load_loss_scale_state(self, state):
        pass

    def any_process(self, flag):
        return flag

    def max_over_processes(self, value):
        return value

    def failing_together(self):
        return contextlib.nullcontext()

    def gather(self, value):
        return value

    def wait_for_everyone(self):
        pass

    def start_trackers(self, recipe):
        pass

    def log(self, record):
        self.logged.append(record)

    def end_trackers(self):
        pass


def test_a_run_on_another_runtime_is_the_same_run_and_goes_on_from_its_own_files(
    tiny, tmp_path, metrics, monkeypatch
):
    train(tiny(*SHORT, output_dir=tmp_path / "accelerate"))
    monkeypatch.delattr(process_group, "AccelerateRuntime")
    runtime = PlainRuntime()
    train(tiny(*SHORT, output_dir=tmp_path / "plain"), runtime=runtime)
    assert [record["step"] for record in runtime.logged if "eval_loss" in record] == [2, 4]
    checkpoint = tmp_path / "plain" / "checkpoint-2"
    assert (checkpoint / "state.pt").exists()
    assert not list(checkpoint.glob("optimizer*"))
    goes_on = f"training.resume_from_checkpoint={checkpoint}"
    train(tiny(*SHORT, goes_on, output_dir=tmp_path / "resumed"), runtime=PlainRuntime())
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "accelerate")
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "accelerate")[2:]
    for run in ("plain", "resumed"):
        assert_same_model(tmp_path / run, tmp_path / "accelerate")


def assert_same_model(run, other):
    own, stock = (load_file(folder / "model" / "model.safetensors") for folder in (run, other))
    torch.testing.assert_close(own, stock, rtol=0, atol=0)


def test_memory_that_runs_out_while_loading_is_that_of_the_runtime(tiny, monkeypatch):
    class Full(PlainRuntime):
        num_processes = 3

        def load_model(self, *args, **kwargs):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    known = {}
    refuse = diagnosis.does_not_fit
    monkeypatch.setattr(
        diagnosis,
        "does_not_fit",
        lambda *args, **told: known.update(told) or refuse(*args, **told),
    )
    with pytest.raises(DoesNotFitError, match="while the model was loaded"):
        train(tiny(*SHORT), runtime=Full())
    assert known["num_processes"] == 3

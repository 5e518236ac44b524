"""Runs that make every kind of copy: each rung of the memory ladder, on a model that reuses each slot."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from ladder_rungs import RUNGS, settings_of
from torch import Tensor
from transformers import AutoConfig

from lowmem_ft.data.batches.batch import Batch
from lowmem_ft.host import copy_engine
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.optimizers import chunked_optimizer
from lowmem_ft.recipe import load_recipe
from lowmem_ft.techniques import optimizer_in_backward
from lowmem_ft.techniques.offload import activation_offload
from lowmem_ft.techniques.streaming import embedding as streamed_embedding
from lowmem_ft.training.accelerate_runtime import AccelerateRuntime
from lowmem_ft.training.build import build_session, plan_session
from lowmem_ft.training.session import Session
from lowmem_ft.training.step import evaluation_loss, train_step

VOCABULARY = 128


@dataclass(frozen=True, kw_only=True)
class CopyCase:
    """A run.

    Args:
        settings: settings of its recipe.
        pins: whether the driver pins memory.
        in_files: whether offloaded tensors are stored in files.
        is_tied: whether the head's weight is the embedding's.
        num_layers: number of the model's layers. Two would each have a slot to themselves.
    """

    settings: tuple[str, ...]
    pins: bool = True
    in_files: bool = False
    is_tied: bool = True
    num_layers: int = 7


CLIPPED, NOT_CLIPPED = "training.max_grad_norm=1.0", "training.max_grad_norm=null"
_ON_HOST, _STREAMED, _TILED = (settings_of(rung) for rung in RUNGS[-3:])
_LORA = (*settings_of(RUNGS[1]), "adapter.name=lora", "adapter.r=4", "offload.parameters=stream")

CASES = (
    {rung.name: CopyCase(settings=(*settings_of(rung), CLIPPED)) for rung in RUNGS}
    | {
        f"{rung.name}, not clipped": CopyCase(settings=(*settings_of(rung), NOT_CLIPPED), is_tied=False)
        for rung in RUNGS[-4:]
    }
    | {
        "tied, not clipped": CopyCase(settings=(*_TILED, NOT_CLIPPED)),
        "untied, clipped": CopyCase(settings=(*_TILED, CLIPPED), is_tied=False),
        "own head, clipped": CopyCase(settings=(*_ON_HOST, CLIPPED), is_tied=False),
        "lost updates are counted": CopyCase(settings=(*_ON_HOST, CLIPPED, "optimizer.master=none")),
        "all logits": CopyCase(settings=(*_STREAMED, NOT_CLIPPED, "loss.chunk_tokens=null"), is_tied=False),
        "two layers stay": CopyCase(settings=(*_STREAMED, NOT_CLIPPED, "offload.resident_layers=2")),
        "all activations": CopyCase(settings=(*_ON_HOST, CLIPPED, "offload.activations=all")),
        "all activations of stored layers": CopyCase(
            settings=(*settings_of(RUNGS[0]), "offload.activations=all", "offload.optimizer=host")
        ),
        "horizontal": CopyCase(
            settings=(*settings_of(RUNGS[3]), "offload.optimizer=host", "offload.activations=inputs")
        ),
        "pageable, clipped": CopyCase(settings=(*_TILED, CLIPPED), pins=False),
        "pageable, not clipped": CopyCase(settings=(*_TILED, NOT_CLIPPED), pins=False, is_tied=False),
        "in files": CopyCase(settings=(*_STREAMED, CLIPPED), in_files=True),
        "adapters": CopyCase(settings=(*_LORA, "offload.activations=inputs")),
        "adapters over 4 bits": CopyCase(
            settings=(*_LORA, "model.quantization=nf4", "offload.optimizer=host")
        ),
    }
)


_BY_TWO = ("distributed.strategy=fsdp2", "distributed.num_processes=2", "checkpointing.mode=full")
_IN_BACKWARD = ("optimizer.in_backward=true", "accumulation.order=vertical")

SHARED_CASES = {
    f"fsdp2{name}": CopyCase(settings=(*_BY_TWO, *settings), is_tied=False, num_layers=3)
    for name, settings in {
        "": (CLIPPED,),
        ", weights on the host": (CLIPPED, "distributed.cpu_offload=true"),
        ", in backward, clipped": (*_IN_BACKWARD, CLIPPED),
        ", in backward, not clipped": (*_IN_BACKWARD, NOT_CLIPPED),
        ", in backward, state on the host, clipped": (*_IN_BACKWARD, CLIPPED, "offload.optimizer=host"),
        ", in backward, state on the host, not clipped": (
            *_IN_BACKWARD,
            NOT_CLIPPED,
            "offload.optimizer=host",
        ),
    }.items()
}
"""Cases for virtual GPUs only: one of two processes, whose updates in backward are on FSDP2's reduction stream."""


def make_model(folder: Path, case: CopyCase) -> Path:
    """Write a Llama's config; return its folder."""
    path = folder / f"model-{case.num_layers}-{'tied' if case.is_tied else 'untied'}"
    AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=case.num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=case.is_tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ).save_pretrained(path)
    return path


@contextlib.contextmanager
def in_small_pieces() -> Iterator[None]:
    """Split tensors as small as these like large ones."""
    with (
        mock.patch.object(copy_engine, "STAGING_BYTES", 1024),
        mock.patch.object(chunked_optimizer, "CPU_CHUNK_ELEMENTS", 2048),
        mock.patch.object(streamed_embedding, "_CHUNK_ELEMENTS", 2048),
        mock.patch.object(optimizer_in_backward, "_ELEMENTS_AT_ONCE", 1024),
        mock.patch.object(activation_offload, "SMALLEST_OFFLOADED_BYTES", 256),
    ):
        yield


def build(case: CopyCase, folder: Path, disk_folder: Path) -> Session:
    """Build the case's session, with random weights that are the same each time."""
    model = make_model(folder, case)
    recipe = load_recipe(
        None,
        [
            "data=any",
            f"model={model}",
            "model.weights=random",
            "training.use_cpu=true",
            "training.gradient_accumulation_steps=2",
            "training.per_device_train_batch_size=2",
            "training.learning_rate=1e-2",
            "training.warmup_steps=0",
            "training.lr_scheduler_type=constant",
            *case.settings,
            *([f"offload.folder={disk_folder}"] if case.in_files else []),
        ],
    )
    runtime = AccelerateRuntime.create(recipe.training, folder)
    plan = plan_session(recipe, runtime, load_model_config(recipe.model))
    torch.manual_seed(0)
    return build_session(recipe, runtime, plan, num_training_steps=8)


def batch(seed: int, num_tokens: int = 12) -> Batch:
    """Return two rows of random tokens, with this many each."""
    ids_BT = torch.randint(3, VOCABULARY, (2, num_tokens), generator=torch.Generator().manual_seed(seed))
    labels_BT = torch.cat([torch.full((2, 1), -100), ids_BT[:, 1:]], dim=1)
    return Batch(
        input_ids_BT=ids_BT,
        labels_BT=labels_BT,
        position_ids_BT=None,
        sample_ids=(0, 1),
        num_label_tokens=2 * (num_tokens - 1),
        num_tokens=2 * num_tokens,
    )


def steady(case: CopyCase) -> CopyCase:
    """Return the case with the fewest operators that show each ordering: two layers for each slot, and few tiles."""
    fewer = {"tiling.mlp=8": "tiling.mlp=2", "tiling.head=8": "tiling.head=4"}
    settings = tuple(fewer.get(setting, setting) for setting in case.settings)
    return dataclasses.replace(case, settings=settings, num_layers=4)


def step(session: Session, number: int) -> float:
    """Take one step; return its loss."""
    return train_step(session, [batch(2 * number), batch(2 * number + 1)]).loss


def evaluate(session: Session) -> float:
    """Return the loss on other rows, as ``training.evaluation.held_out_loss`` computes it."""
    session.techniques.flush()
    session.model.eval()
    loss_sum, _ = evaluation_loss(session, [batch(100)])
    session.model.train()
    return float(loss_sum)


def read_all(session: Session) -> dict[str, Tensor]:
    """Return every weight and all of the optimizer's state, as a checkpoint reads them."""
    tensors = {}
    with session.techniques.at_rest():
        for name, parameter in session.unwrapped_model.named_parameters():
            tensors[name] = parameter.detach().clone()
            for key, value in session.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{name}.{key}"] = value.clone()
    return tensors


def write_all(session: Session) -> None:
    """Set every weight and all state, as loading a checkpoint does: trained weights to half of their values."""
    with session.techniques.at_rest(), torch.no_grad():
        for parameter in session.unwrapped_model.parameters():
            parameter.copy_(parameter / 2 if parameter.requires_grad else parameter.clone())
            for value in session.optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor):
                    value.copy_(value.clone())


@dataclass(frozen=True)
class Outcome:
    """Results of a run: losses of steps and evaluations, and all that a checkpoint would hold."""

    losses: list[float]
    tensors: dict[str, Tensor]


def outcome_of(session: Session) -> Outcome:
    """Take steps, evaluate and save between steps, then close the session; return the outcome."""
    losses = [step(session, 0), step(session, 1), evaluate(session)]
    saved = read_all(session)
    write_all(session)
    losses.append(step(session, 2))
    session.close()
    left = {name: weight.clone() for name, weight in session.unwrapped_model.state_dict().items()}
    return Outcome(losses, saved | {f"left {name}": weight for name, weight in left.items()})

"""Tries of a technique on a tiny model of a family: its losses against stock transformers' or a plain run's."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from family_sweep.stock_spread import why_losses_differ
from family_sweep.tiny_configs import tiny_config
from measuring.families import VOCABULARY
from torch.nn import functional
from transformers import AutoModelForCausalLM

from lowmem_ft.data.batches.batch import Batch
from lowmem_ft.data.row import IGNORED_LABEL
from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.training.processes.launch import as_launched, read_launch
from lowmem_ft.training.runtimes.accelerate_runtime import launched_runtime
from lowmem_ft.training.runtimes.build import build_session, plan_session
from lowmem_ft.training.step.causality_check import refuse_bidirectional_weights, refuse_leaking_documents
from lowmem_ft.training.step.step import train_step

NUM_STEPS, ROWS, LENGTH = 2, 2, 32
TOLERANCE = 1e-5
"""Relative difference of a loss up to which two orders of sums are the same mathematics."""

CHOICES = 5e-5
"""Likewise in tiles and packed rows, where rounding may change what sparse attention chooses, and large biases of
positions round more."""

_MORE_THAN_ROUNDING = 1e-3
"""Difference of logits, relative to the largest."""

Losses = list[float]

_EPS = 1e-4
"""Larger than usual: with 1e-8, the first update of AdamW is the sign of a gradient, be it no more than rounding."""

_COMMON = (
    *("model.weights=random", "training.use_cpu=true", "data=any", f"data.max_length={LENGTH}"),
    *("training.gradient_accumulation_steps=2", f"training.per_device_train_batch_size={ROWS}"),
    *("training.learning_rate=1e-3", "training.lr_scheduler_type=constant", "training.max_grad_norm=null"),
    *("optimizer.weight_decay=0", "checkpointing.mode=none"),
    *("optimizer.betas=[0.9,0.95]", f"optimizer.eps={_EPS}"),
)
_OWN_LOSS, _CHUNKED = "loss.chunk_tokens=null", "loss.chunk_tokens=24"
_LOWEST = (
    *("checkpointing.mode=full", "offload.activations=inputs", "accumulation.order=vertical", _CHUNKED),
    *("tiling.head=2", "optimizer.in_backward=true", "offload.optimizer=host", "offload.parameters=stream"),
)
_FROZEN = ("checkpointing.mode=full", _CHUNKED, "offload.parameters=stream")
_LORA = ("adapter.name=lora", "adapter.r=4")
_QLORA = (*_LORA, "model.quantization=nf4")
_ONE_DOCUMENT, _SEVERAL = "data.packing=false", "data.packing=true"
_CUT = 20
"""First token of the second document of a packed row."""


def try_technique(model_type: str, technique: str) -> str:
    """Try a technique on a family.

    Args:
        model_type: a type of transformers' causal LMs.
        technique: one of :data:`TECHNIQUES`.

    Returns:
        ``ok``; the relative difference of the losses if it is not 0; ``varies: `` if it is large, and why stock
        transformers' own losses differ as much; ``refused: `` and our own error; or ``FAILED: `` and the error of
        another library.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            tiny_config(model_type).save_pretrained(folder)
            limit = CHOICES if technique in ("tiles", "packing") else TOLERANCE
            return _cell(TECHNIQUES[technique](Path(folder)), limit, model_type)
        except UserError as error:
            return f"refused: {error}".replace(folder, model_type)
        except Exception as error:  # whatever a family does
            place = traceback.extract_tb(error.__traceback__)[-1]
            return f"FAILED: {type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"


def _cell(difference: float, limit: float, model_type: str) -> str:
    if difference == 0:
        return "ok"
    if difference <= limit:
        return f"{difference:.0e}"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    ids_BT = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    reasons = why_losses_differ(model, ids_BT, _MORE_THAN_ROUNDING)
    if reasons:
        return (
            f"varies: {difference:.0e}; stock transformers' {type(model).__name__} {', and '.join(reasons)}"
        )
    return f"WRONG: {difference:.0e}"


def _plain(folder: Path) -> float:
    own_loss = _takes_own_loss(folder)
    ours = _losses(folder, own_loss)
    return _difference(ours, _stock_losses(folder, own_loss))


def _beside_plain(*settings: str, beside: Sequence[str] = ()) -> Callable[[Path], float]:
    """Return a try that compares a technique with a run that has none."""

    def compare(folder: Path) -> float:
        return _difference(_losses(folder, *settings), _losses(folder, _takes_own_loss(folder), *beside))

    return compare


def _packed(folder: Path) -> float:
    """Compare packed documents with the same ones in rows of their own."""
    return _packed_under(folder, (_CHUNKED,), (_CHUNKED,))


def _packed_under(folder: Path, settings: Sequence[str], beside: Sequence[str]) -> float:
    together = _losses(folder, _SEVERAL, *settings)
    alone = _losses(folder, _ONE_DOCUMENT, *beside, apart=True)
    return _difference(together, alone)


def packed_difference(model_type: str, technique: str) -> float:
    """Return the relative difference of losses between packed rows under a technique and plain rows of one document.

    Args:
        model_type: a type of transformers' causal LMs.
        technique: ``lowest rung``, ``LoRA`` or ``QLoRA``; the plain rows have the same adapters, and nothing else.
    """
    settings, beside = {
        "lowest rung": (_LOWEST, (_CHUNKED,)),
        "LoRA": ((*_LORA, *_FROZEN), (*_LORA, _CHUNKED)),
        "QLoRA": ((*_QLORA, *_FROZEN), (*_QLORA, _CHUNKED)),
    }[technique]
    with tempfile.TemporaryDirectory() as folder:
        tiny_config(model_type).save_pretrained(folder)
        return _packed_under(Path(folder), settings, beside)


def _in_two_processes(folder: Path) -> float:
    """Compare a model that two processes of FSDP2 share with a plain run of the same rows."""
    own_loss = _takes_own_loss(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        ranks = [processes.submit(_losses_of_rank, folder, own_loss, rank, port) for rank in range(2)]
        shared, _ = (rank.result() for rank in ranks)
    return _difference(shared, _losses(folder, own_loss))


def _losses_of_rank(folder: Path, own_loss: str, rank: int, port: int) -> Losses:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    logging.disable(logging.WARNING)
    try:
        return _losses(folder, own_loss, "distributed.strategy=fsdp2", rank=rank)
    except UserError:
        raise
    except Exception as error:
        raise RuntimeError(
            f"{type(error).__name__}: {error}"
        ) from error  # which crosses to the other process


def _estimated(folder: Path) -> float:
    """Trace the lowest rung, or the plain step where the lowest is refused, as another column says."""
    try:
        estimate_memory(_recipe(folder, _LOWEST), "rtx-4090")
    except UserError:
        estimate_memory(_recipe(folder, (_CHUNKED,)), "rtx-4090")
    return 0.0


TECHNIQUES: dict[str, Callable[[Path], float]] = {
    "plain": _plain,
    "lowest rung": _beside_plain(*_LOWEST),
    "tiles": _beside_plain(_CHUNKED, "tiling.head=3", "tiling.mlp=2"),
    "LoRA": _beside_plain(*_LORA, *_FROZEN, beside=_LORA),
    "QLoRA": _beside_plain(*_QLORA, *_FROZEN, beside=_QLORA),
    "packing": _packed,
    "FSDP2": _in_two_processes,
    "estimate": _estimated,
}
"""The tries, each of which returns a relative difference of losses."""


def _recipe(folder: Path, settings: Sequence[str]) -> Recipe:
    return load_recipe(None, [f"model={folder}", *_COMMON, *settings])


def _takes_own_loss(folder: Path) -> str:
    """Return the setting of the loss that is nearest to the model's own: a mean of means is refused."""
    try:
        _session(_recipe(folder, (_OWN_LOSS,)), folder)
    except ModelError as error:
        if "num_items_in_batch" in str(error):
            return "loss.chunk_tokens=1024"
        raise
    return _OWN_LOSS


def _session(recipe: Recipe, folder: Path) -> Any:
    recipe = as_launched(recipe, read_launch(use_cpu=True))
    runtime = launched_runtime(recipe.training, folder, recipe.distributed)
    plan = plan_session(recipe, runtime, load_model_config(recipe.model))
    torch.manual_seed(0)
    session = build_session(recipe, runtime, plan, num_training_steps=NUM_STEPS)
    if recipe.adapter.name == "none" and recipe.offload.parameters != "stream":
        refuse_bidirectional_weights(session, str(recipe.model.name_or_path))
    if recipe.data.packing:
        refuse_leaking_documents(session, str(recipe.model.name_or_path))
    return session


def _losses(folder: Path, *settings: str, apart: bool = False, rank: int | None = None) -> Losses:
    """Return the loss of each step, the second of which has seen one update; of one of two processes, if so."""
    recipe = _recipe(folder, settings)
    session = _session(recipe, folder)
    torch.manual_seed(0)
    losses = []
    for window in _windows(packed=recipe.data.packing or apart, apart=apart, rank=rank):
        result = train_step(session, window)
        assert result.applied
        losses.append(result.loss)
    session.techniques.flush()
    session.close()
    return losses


def _stock_losses(folder: Path, own_loss: str) -> Losses:
    """Return the losses of the same steps with transformers and torch alone."""
    recipe = _recipe(folder, (own_loss,))
    session = _session(recipe, folder)
    ours = session.unwrapped_model
    model = AutoModelForCausalLM.from_config(
        load_model_config(recipe.model), attn_implementation=ours.config._attn_implementation
    )
    model.load_state_dict(ours.state_dict())
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.training.learning_rate, betas=(0.9, 0.95), eps=_EPS, weight_decay=0
    )
    torch.manual_seed(0)
    losses = []
    for window in _windows():
        num_labels = sum(batch.num_label_tokens for batch in window)
        total = torch.zeros(())
        for batch in window:
            loss = _stock_loss(model, batch, num_labels, computes_it=own_loss == _OWN_LOSS)
            loss.backward()
            total += loss.detach()
        losses.append(float(total))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _stock_loss(model: Any, batch: Batch, num_labels: int, *, computes_it: bool) -> torch.Tensor:
    inputs = dict(batch.model_inputs(), use_cache=False)
    if computes_it:
        return model(**inputs, labels=batch.labels_BT, num_items_in_batch=num_labels).loss
    logits_BTV = model(**inputs).logits[:, :-1].float()
    labels_BT = batch.labels_BT[:, 1:]
    return (
        functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum") / num_labels
    )


def _windows(*, packed: bool = False, apart: bool = False, rank: int | None = None) -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(0)
    windows = []
    for _ in range(NUM_STEPS):
        window = [torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2)]
        if rank is not None:
            window = [ids_BT[rank::2] for ids_BT in window]
        windows.append([batch for ids_BT in window for batch in _batches(ids_BT, packed=packed, apart=apart)])
    return windows


def _batches(ids_BT: torch.Tensor, *, packed: bool, apart: bool) -> list[Batch]:
    labels_BT = ids_BT.clone()
    labels_BT[:, :3] = IGNORED_LABEL
    if packed:
        labels_BT[:, _CUT] = IGNORED_LABEL
    if apart:
        parts = (slice(0, _CUT), slice(_CUT, LENGTH))
        return [_batch(ids_BT[:, part], labels_BT[:, part], None) for part in parts]
    positions_BT = (
        torch.cat([torch.arange(_CUT), torch.arange(LENGTH - _CUT)]).repeat(ROWS, 1) if packed else None
    )
    return [_batch(ids_BT, labels_BT, positions_BT)]


def _batch(ids_BT: torch.Tensor, labels_BT: torch.Tensor, positions_BT: torch.Tensor | None) -> Batch:
    return Batch(
        input_ids_BT=ids_BT.contiguous(),
        labels_BT=labels_BT.contiguous(),
        position_ids_BT=positions_BT,
        sample_ids=tuple(range(len(ids_BT))),
        num_label_tokens=int((labels_BT != IGNORED_LABEL).sum()),
        num_tokens=ids_BT.numel(),
    )


def _difference(ours: Losses, theirs: Losses) -> float:
    """Return the largest relative difference of two runs' losses."""
    assert all(map(math.isfinite, theirs))
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))

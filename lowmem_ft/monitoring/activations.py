"""Memory that a model keeps for its backward pass, by the module that keeps it."""

from __future__ import annotations

import dataclasses
import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.tensors.live_tensors import has_storage, storage_key
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.monitoring.module_pattern import module_pattern
from lowmem_ft.monitoring.text_table import size, text_table

OUTSIDE = "(outside the model)"
"""The name of the module if no module is running, as in a loss function."""


@dataclass(frozen=True)
class KeptByModule:
    """One module, or several alike: of one class, with names that differ only in numbers, keeping the same tensors.

    Attributes:
        name: qualified name, with ``*`` for the number in which several differ; empty: the model itself.
        class_name: class of the module.
        count: number of modules.
        kept_bytes: bytes that all of them together keep.
        tensors: the tensors that each keeps, such as ``[4, 128, 512] bfloat16``, and how often.
    """

    name: str
    class_name: str
    count: int
    kept_bytes: int
    tensors: dict[str, int]


@dataclass(frozen=True)
class ActivationReport:
    """Memory that a forward pass leaves for the backward pass.

    Attributes:
        modules: modules that keep something, the largest first.
        kept_bytes: bytes that all of them keep.
        elsewhere_bytes: bytes of storages that the forward pass made and that stay alive without being saved that way:
            its outputs, and memory kept in other ways, as selective checkpointing and some custom functions do.
        num_uncounted: number of saved tensors without a storage to count, such as sparse ones.
    """

    modules: tuple[KeptByModule, ...]
    kept_bytes: int
    elsewhere_bytes: int
    num_uncounted: int

    def table(self, max_rows: int = 20) -> str:
        """Return the modules that keep most as a table 80 columns wide.

        Args:
            max_rows: number of modules to show; one row sums up the others.
        """
        rows = [
            (
                f"{row.name or '(the model)'} {row.class_name}".rstrip(),
                f"x{row.count}",
                size(row.kept_bytes // row.count),
                size(row.kept_bytes),
            )
            for row in self.modules[:max_rows]
        ]
        rest = self.modules[max_rows:]
        if rest:
            rows.append((f"({len(rest)} more)", "", "", size(sum(row.kept_bytes for row in rest))))
        rows.append(("kept for backward", "", "", size(self.kept_bytes)))
        rows.append(("also alive, such as outputs", "", "", size(self.elsewhere_bytes)))
        table = text_table(("module", "alike", "each", "together"), rows)
        if self.num_uncounted:
            table += f"\n{self.num_uncounted} saved tensors have no storage that could be counted."
        return table

    def to_json(self) -> str:
        """Return everything as JSON, in bytes."""
        return json.dumps(dataclasses.asdict(self), indent=2)


def activation_report(
    model: nn.Module, batch: Any, loss_fn: Callable[[Any], Tensor] | None = None
) -> ActivationReport:
    """Run a model's forward pass once and count what autograd keeps of it, by module.

    Each storage counts once, in full, for the module that saved it first: the innermost one whose code was running, or
    the layer that a checkpoint belongs to. Memory that exists anyway does not count: parameters, buffers and the batch.
    Works on a CPU, on CUDA and inside a ``VirtualGPU``, with and without checkpointing: for a checkpointed layer it
    counts the inputs, which are what is kept.

    Cost: one forward pass through a dispatch mode. It is not a training step: it computes no gradient and restores the
    state of random numbers. Running statistics, such as those of batch norm, change as in any forward pass.

    Args:
        model: in the mode in which it is trained.
        batch: a mapping is passed to the model by name, a tuple or list by position, anything else as the only
            argument.
        loss_fn: computes the loss from the model's output; None: the model computes its own, or there is no loss.

    Returns:
        Kept memory by module, the largest first.

    Raises:
        UserError: if nothing requires a gradient, so that autograd keeps nothing.
    """
    tracker = StorageTracker(device_type=None)
    saved = _Saved(model, [*model.parameters(), *model.buffers(), *_tensors_in(batch)], tracker)
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    with (
        torch.random.fork_rng(devices),
        torch.enable_grad(),
        saved_tensors_hooks(saved.pack, saved.unpack),
        tracker,
    ):
        output = _call(model, batch)
        result = output if loss_fn is None else loss_fn(output)
    if not any(tensor.requires_grad for tensor in _tensors_in(result)):
        raise UserError(
            "Autograd keeps nothing of this forward pass, because its result requires no gradient. Train at least one "
            "parameter, and let the model run outside of `torch.no_grad()` and `torch.inference_mode()`."
        )
    kept = list(saved.kept.values())  # while `output` and `result` are alive, and their graph with them
    kept_bytes = sum(tensor.num_bytes for tensor in kept)
    return ActivationReport(
        modules=tuple(_folded(kept)),
        kept_bytes=kept_bytes,
        elsewhere_bytes=tracker.live_bytes - kept_bytes,
        num_uncounted=saved.num_uncounted,
    )


class _Running(NamedTuple):
    """The running module, and the name it shares with those like it."""

    name: str = OUTSIDE
    class_name: str = ""
    pattern: str = OUTSIDE


class _Kept(NamedTuple):
    """A storage that autograd keeps, by the module that saved it first."""

    module: _Running
    num_bytes: int
    description: str


class _Saved:
    """The tensors that autograd saves, for as long as it keeps them."""

    def __init__(self, model: nn.Module, there_anyway: Iterable[Tensor], tracker: StorageTracker) -> None:
        self.kept: dict[int, _Kept] = {}
        self.num_uncounted = 0
        self._module_of = {
            id(module): _Running(name, type(module).__name__, module_pattern(model, name))
            for name, module in model.named_modules()
        }
        self._there_anyway = {storage_key(tensor) for tensor in there_anyway if has_storage(tensor)}
        self._tracker = tracker

    def pack(self, tensor: Tensor) -> Tensor:
        if has_storage(tensor):
            self._keep(tensor)
        elif tensor.layout is not torch.strided:
            self.num_uncounted += 1
        return tensor.detach()  # the tensor itself would hold the graph that holds it: a cycle in C++

    @staticmethod
    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    def _keep(self, tensor: Tensor) -> None:
        key, storage = storage_key(tensor), tensor.untyped_storage()
        if key in self._there_anyway or key in self.kept:
            return
        description = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        self.kept[key] = _Kept(self._running_module(sys._getframe(2)), storage.nbytes(), description)
        self._tracker.add(tensor)
        weakref.finalize(storage, self.kept.pop, key, None).atexit = False  # saved, and no longer needed

    def _running_module(self, frame: FrameType | None) -> _Running:
        """Return the innermost running module; a checkpoint's inputs are saved by the layer around it."""
        while frame is not None and frame.f_code is not activation_report.__code__:
            if frame.f_code.co_varnames[:1] == ("self",):
                running = self._module_of.get(id(frame.f_locals["self"]))
                if running is not None:
                    return running
            frame = frame.f_back
        return _Running()


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(dict(tree) if isinstance(tree, Mapping) else tree):
        if isinstance(leaf, Tensor):
            yield leaf


def _folded(kept: Iterable[_Kept]) -> list[KeptByModule]:
    of_module: dict[_Running, Counter[tuple[str, int]]] = {}
    for tensor in kept:
        of_module.setdefault(tensor.module, Counter())[tensor.description, tensor.num_bytes] += 1
    alike: dict[Any, list[_Running]] = {}
    for module, tensors in of_module.items():
        alike.setdefault((module.pattern, module.class_name, frozenset(tensors.items())), []).append(module)
    rows = [
        KeptByModule(
            name=pattern if len(modules) > 1 else modules[0].name,
            class_name=class_name,
            count=len(modules),
            kept_bytes=len(modules) * sum(num_bytes * times for (_, num_bytes), times in tensors),
            tensors={text: times for (text, _), times in sorted(tensors)},
        )
        for (pattern, class_name, tensors), modules in alike.items()
    ]
    return sorted(rows, key=lambda row: row.kept_bytes, reverse=True)

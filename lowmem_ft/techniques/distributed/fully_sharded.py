"""Weights, gradients and optimizer state sharded by rows among several processes: torch's FSDP2, layer by layer."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.tensors.local_shards import is_sharded, local_part
from lowmem_ft.foundation.tensors.logical_size import PART_OF_ANOTHER
from lowmem_ft.techniques.distributed.config import DistributedConfig
from lowmem_ft.techniques.modules.model_parts import ModelParts, base_model
from lowmem_ft.techniques.technique import Technique

__all__ = ["enable_fsdp2"]

log = logging.getLogger(__name__)


class FullySharded(Technique):
    """A model whose parameters are of type ``DTensor``; see :func:`enable_fsdp2`.

    Args:
        model: the outermost ``FSDPModule``.
        sync_each_batch: whether the gradients of each micro-batch are reduce-scattered.
        has_own_head: whether a head with a weight of its own is gathered alone.
    """

    def __init__(self, model: FSDPModule, *, sync_each_batch: bool, has_own_head: bool = True) -> None:
        super().__init__(functools.partial(_reshard, model))
        self.model = model
        self._sync_each_batch = sync_each_batch
        self._has_own_head = has_own_head

    def sum_in_float32(self, *, several_in_backward: bool) -> None:
        """Leave each gradient in float32 from now on, as it was summed; else it gets the type of its weight.

        Args:
            several_in_backward: whether a weight gets more than one gradient in a backward pass, as in vertical order:
                then the gradients of a gathered layer are float32, too. A weight shared by embedding and head always
                gets two.
        """
        shared = self._group_of_shared_weight()
        for module in _fsdp_modules(self.model):
            group: Any = module._get_fsdp_state()._fsdp_param_group
            if group is None:
                continue
            several = several_in_backward or module is self.model or group is shared
            if not hasattr(group, "_orig_dtype"):  # since torch 2.15
                for sharded in group.fsdp_params:
                    sharded.sharded_grad_dtype = torch.float32
                if several:
                    group._fsdp_params_with_wider_grad_dtype = []  # or their first gradient would keep its type
                continue
            if several:
                module.unshard()
                for parameter in cast(nn.Module, module).parameters():
                    if parameter.requires_grad and not is_sharded(parameter):
                        parameter.grad_dtype = torch.float32
                module.reshard()
            group._orig_dtype = torch.float32  # until someone calls unshard(), which settles types again

    def _group_of_shared_weight(self) -> Any:
        """Return what is gathered with the embedding, if that is the head, too; a group has gradients of one type."""
        causal_lm = cast(Any, base_model(cast(nn.Module, self.model)))
        embedding, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
        is_shared = head is not None and head.weight is embedding.weight
        return (
            embedding._get_fsdp_state()._fsdp_param_group
            if is_shared and isinstance(embedding, FSDPModule)
            else None
        )

    def spare_head_in_backward(self) -> None:
        """Gather a separate head in forward only from now on, as its loss computes its gradients there, too.

        FSDP2 would prefetch it for backward, where nothing uses it: with updates in backward, while it is being
        written.
        """
        head = cast(Any, base_model(cast(nn.Module, self.model))).get_output_embeddings()
        if self._has_own_head and isinstance(head, FSDPModule):
            head.set_unshard_in_backward(False)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Tell FSDP2 before each forward whether it is the last one of its accumulation window."""
        self.model.set_requires_gradient_sync(is_last or self._sync_each_batch)

    def abandon(self) -> None:
        """Reset FSDP2's state after an aborted pass."""
        if hasattr(self.model, "reset_iter_state"):  # since torch 2.13
            self.model.reset_iter_state()

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Reshard every parameter to this process's part of it."""
        self.reshard()
        yield

    def reshard(self) -> None:
        """Reshard what the last forward has left gathered: one without gradients has no backward that would."""
        _reshard(self.model)


def enable_fsdp2(
    model: nn.Module | ModelParts,
    config: DistributedConfig,
    mesh: DeviceMesh,
    rows: MutableMapping[nn.Parameter, Tensor] | None = None,
    around: Callable[[nn.Module], AbstractContextManager[None]] = lambda module: contextlib.nullcontext(),
) -> FullySharded:
    """Shard every parameter by rows among the processes, and gather each layer's parameters for as long as it runs.

    Each decoder layer is gathered by itself, and so are the embedding and the head, unless they share their weight; the
    rest (a norm) stays gathered from forward to backward. Gradients are summed in float32.

    Frees: each of N processes holds 1/N of weights, gradients and optimizer state, and one or two whole layers.
    Costs: all weights cross the link before forward and, with ``reshard_after_forward``, before backward, and all
    gradients after it.
    Equals: one process with the same global batch, except for the order of sums, and for gradients of 16-bit weights,
    which each process rounds before they are summed.
    Limits: call it after any technique that changes how forward runs through the layers, and create the optimizer after
    it. Code that reads a parameter outside of its own module's call finds only a shard of it.
    Source: PyTorch FSDP, 2023 (arXiv:2304.11277); ``torch.distributed.fsdp.fully_shard``.

    Args:
        model: a causal LM from transformers, or a PEFT model around one; or its parts.
        config: when gathered weights are freed, and whether shards are kept on the host.
        mesh: the processes, in one dimension.
        rows: for each parameter, the rows of it that
            :func:`lowmem_ft.models.sharded_weights.weights_in_shards` kept; entries used are removed. None: the
            parameters are whole.
        around: a context entered while the parameters of a module are sharded.

    Returns:
        A technique to which a loop announces its micro-batches; ``remove()`` leaves every parameter sharded.

    Raises:
        UserError: if new rows of an embedding are trained alone.
    """
    parts = ModelParts.of(model)
    outermost: Any = parts.model
    _refuse_parts(outermost)
    rows = rows or {}
    policies: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
    }
    units = list(_units(parts))
    for unit in units:
        with around(unit):
            _shard(unit, rows, {**policies, "reshard_after_forward": config.reshards})
    with around(outermost):
        _shard(outermost, rows, policies)
    assert isinstance(outermost, FSDPModule), "fully_shard makes it one"
    log.info(
        "FSDP2: %d parameters are sharded by rows among %d processes, and gathered in %d groups.",
        sum(1 for _ in parts.model.parameters()),
        mesh.size(),
        len(units) + 1,
    )
    for module in _fsdp_modules(outermost):
        # Sums: a mean over three processes would take a factor of 3, which rounds every product in 16 bits again.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if isinstance(parts.embedding, FSDPModule):
        parts.embedding.set_unshard_in_backward(False)  # its gradient needs tokens, and no weight
    _make_ready(outermost)
    return FullySharded(outermost, sync_each_batch=config.sync_each_batch)


def take_fsdp2(model: nn.Module) -> FullySharded:
    """Return the technique for a model that other code has sharded with ``fully_shard``, in units of its own.

    Gradients are reduced as that code has set it: by default they are means over the processes.

    Args:
        model: the outermost ``FSDPModule``.

    Raises:
        UserError: as for :func:`enable_fsdp2`.
    """
    assert isinstance(model, FSDPModule)
    _make_ready(model)
    return FullySharded(model, sync_each_batch=True, has_own_head=False)


def _make_ready(outermost: Any) -> None:
    for module in _fsdp_modules(outermost):
        if hasattr(module, "set_reduce_scatter_unused_params"):  # since torch 2.13
            # An expert that got no token in this process may have got some in another, which would wait for its shard.
            module.set_reduce_scatter_unused_params(True)
    # Or whatever runs first, such as a part of the model, would become its root.
    outermost._get_fsdp_state()._lazy_init()


def _refuse_parts(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if getattr(parameter, PART_OF_ANOTHER, False):
            raise UserError(
                f"enable_fsdp2 cuts whole parameters, and {name} is a view of rows of another, which would be kept "
                "whole and trained in vain. Set adapter.train_new_tokens=false, or distributed.strategy=ddp."
            )


def _reshard(model: Any) -> None:
    for module in _fsdp_modules(model):
        module.reshard()


def _fsdp_modules(model: Any) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _units(parts: ModelParts) -> Iterator[nn.Module]:
    """Yield the modules whose parameters are gathered together, from the inside out."""
    yield from parts.layers(way_out="distributed.strategy=ddp")
    embedding, head = parts.embedding, parts.head
    if head is not None and head.weight is not embedding.weight:
        yield embedding
        yield head


def _shard(
    module: nn.Module, rows: MutableMapping[nn.Parameter, Tensor], policies: Mapping[str, Any]
) -> None:
    """Shard one unit; a hollow parameter is whole, without values, while this runs."""
    device = _device_of(policies["mesh"])
    hollow = {name: parameter for name, parameter in module.named_parameters() if parameter in rows}
    for parameter in hollow.values():
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    fully_shard(module, **policies)
    sharded = dict(module.named_parameters())
    for name, parameter in hollow.items():
        local_part(sharded[name]).copy_(rows.pop(parameter))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())

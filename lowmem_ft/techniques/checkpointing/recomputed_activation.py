"""MLPs that compute the input of their last linear layer again in backward, instead of keeping it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.pytorch_utils import Conv1D

from lowmem_ft.foundation.devices import has_values
from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.tensors.live_tensors import storage_key
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.techniques.modules.autocast_state import autocast_of_now
from lowmem_ft.techniques.modules.model_parts import ModelParts, mlps_in
from lowmem_ft.techniques.modules.save_before_compute import is_inside_hooks
from lowmem_ft.techniques.technique import Technique

log = logging.getLogger(__name__)

_KEY = "checkpointing.mlp_activation"

_CHECKED_TOKENS = 8
"""Tokens of the trial in which an MLP's forward is given the outputs of its linear layers."""


def enable_recomputed_activations(
    model: nn.Module | ModelParts, config: CheckpointingConfig, *, device: torch.device
) -> Technique:
    """Make MLPs save only the outputs of their first linear layers, and recompute the rest in backward.

    Frees: the input of an MLP's last linear layer (batch x tokens x intermediate), in each layer that is not
    checkpointed. The outputs of the linear layers before it are kept anyway, by activation functions whose backward
    needs their input, such as SiLU and GELU.
    Costs: the activation function, and the product of a gated MLP, once more; no matrix product. The host's time for
    hooks on what the last linear layer saves.
    Equals: the same losses and gradients bit for bit: the MLP's own forward, with whatever kernels, is given the
    outputs that its linear layers had. The first forward compares the result with the input that it stands for.
    Limits: MLPs whose linear layers are modules, so no experts that are one tensor; activation functions that keep
    their input, not ReLU; nothing random between the linear layers; what else forward changes, it changes twice. The
    last linear layer has to save its input as it is: a cast or a dropout in front of its product makes a copy, which is
    kept. Inside other hooks on saved tensors, and in replicas of ``nn.DataParallel``, all is kept.
    Source: Reducing Activation Recomputation in Large Transformer Models, 2022 (arXiv:2205.05198), for recomputing what
    is cheap; Megatron-LM's output-discarding recomputation, which frees such a tensor and writes it again.

    Args:
        model: a causal LM from transformers, wrapped or not, with its adapters and kernels; or its parts.
        config: whether to, and which layers are checkpointed.
        device: the device to train on; weights may still be elsewhere.

    Returns:
        A handle whose ``remove()`` makes the MLPs keep it again.

    Raises:
        ModelError: if no layer has such an MLP, if it computes with more than its linear layers' outputs, which may
            show in the first forward, or if nothing would be freed.
    """
    if config.mlp_activation == "keep":
        return Technique()
    config.refuse_unchosen()
    parts = ModelParts.of(model)
    layers = parts.text_layers(way_out=f"{_KEY}=keep")
    checkpointed = config.layers_of(len(layers))
    found = [_recomputable(layer) for layer in layers]
    if not any(found):
        raise ModelError(
            f"{_KEY}=recompute needs decoder layers with an MLP of several linear layers; "
            f"{type(parts.model).__name__} has none. Set {_KEY}=keep."
        )
    chosen = [
        one
        for index, mlps in enumerate(found)
        if index not in checkpointed
        for one in map(_Recomputing, mlps)
        if one.is_trained
    ]
    for one in {type(one.mlp): one for one in chosen}.values():
        one.check(getattr(parts.model, "dtype", None), device)
    if not chosen:
        log.warning("%s=recompute changes nothing: every layer is checkpointed, or has no trained MLP.", _KEY)
        return Technique()
    log.info(
        "MLPs: %d in %d of %d layers compute their activation again in backward.",
        len(chosen),
        len(layers) - len(checkpointed),
        len(layers),
    )
    return _RecomputedActivations(chosen)


def recomputed_width(layer: nn.Module) -> int:
    """Return the elements per token that a decoder layer does not keep if it computes its activation again."""
    return sum(_features(mlp.get_submodule(_linear_layers(mlp)[-1]))[0] for mlp in _recomputable(layer))


class _RecomputedActivations(Technique):
    """MLPs that recompute, until they keep again.

    Args:
        mlps: the MLPs.
    """

    def __init__(self, mlps: Sequence[_Recomputing]) -> None:
        super().__init__(*(undo for mlp in mlps for undo in mlp.hooks()))
        self._mlps = mlps

    def abandon(self) -> None:
        """Drop what an interrupted forward has left."""
        for mlp in self._mlps:
            mlp.forget()


class _Recomputing:
    """An MLP whose last linear layer saves a way to compute its input in place of it.

    Args:
        mlp: the MLP, with two linear layers or more as children.
    """

    def __init__(self, mlp: nn.Module) -> None:
        self.mlp = mlp
        *self._first, self._last = _linear_layers(mlp)
        self._outputs: dict[str, Tensor] = {}
        self._hooks: saved_tensors_hooks | None = None
        self._is_compared = False

    @property
    def is_trained(self) -> bool:
        """True if the last linear layer saves its input: frozen and without an adapter it does not."""
        return any(one.requires_grad for one in self.mlp.get_submodule(self._last).parameters())

    def hooks(self) -> Iterator[Callable[[], None]]:
        """Put hooks on the linear layers, and yield the calls that remove them."""
        for name in self._first:
            keep = partial(self._keep, name)
            yield self.mlp.get_submodule(name).register_forward_hook(keep).remove
        last = self.mlp.get_submodule(self._last)
        yield last.register_forward_pre_hook(self._before_last).remove
        yield last.register_forward_hook(self._after_last, always_call=True).remove
        yield self.forget

    def forget(self) -> None:
        """Drop what a forward that did not end has left."""
        self._outputs.clear()
        self._after_last()

    def check(self, dtype: torch.dtype | None, device: torch.device) -> None:
        """Reject an MLP that computes with more than the outputs of its first linear layers, or keeps them for this.

        Args:
            dtype: type of the outputs.
            device: device of the trial, unless the MLP has weights of its own elsewhere.

        Raises:
            ModelError: if it does.
        """
        linear = {weight for name in (*self._first, self._last) for weight in self._child(name).parameters()}
        own = next((weight.device for weight in self.mlp.parameters() if weight not in linear), device)
        outputs = {
            name: torch.ones(
                _CHECKED_TOKENS, _features(self._child(name))[1], dtype=dtype, device=own, requires_grad=True
            )
            for name in self._first
        }
        kept: set[int] = set()

        def pack(tensor: Tensor) -> Tensor:
            kept.add(storage_key(tensor))
            return tensor.detach()

        try:
            with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
                result = self.input_of_last(outputs)
        except Exception as problem:
            raise self._unknown(f"its forward does not run with these alone ({problem!r})") from problem
        freed = 0 if storage_key(result) in kept else result.numel()
        if freed <= sum(one.numel() for one in outputs.values() if storage_key(one) not in kept):
            raise ModelError(
                f"{_KEY}=recompute needs an activation function that keeps its input for backward, such as SiLU or "
                f"GELU; that of {type(self.mlp).__name__} does not, and nothing would be freed. Set {_KEY}=keep."
            )

    def input_of_last(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """Return what the MLP's forward gives to its last linear layer if the others have these outputs."""
        children = self.mlp._modules
        own = {name: children[name] for name in (*outputs, self._last)}
        reached = _Reached()
        children.update({name: cast(nn.Module, partial(_given, output)) for name, output in outputs.items()})
        children[self._last] = cast(nn.Module, reached.stop)
        try:
            self.mlp.forward(None)
        except _Reached:
            return reached.taken()
        finally:
            children.update(own)
        raise RuntimeError(f"the forward of {type(self.mlp).__name__} does not call its {self._last}")

    def _child(self, name: str) -> nn.Module:
        return self.mlp.get_submodule(name)

    def _keep(self, name: str, linear: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            self._outputs[name] = output.detach()

    def _before_last(self, linear: nn.Module, inputs: tuple[Any, ...]) -> None:
        outputs = {name: self._outputs[name] for name in self._first if name in self._outputs}
        self._outputs.clear()
        is_replica = self.mlp._modules[self._last] is not linear
        if len(outputs) < len(self._first) or not inputs or is_replica or is_inside_hooks():
            return
        if not self._is_compared:
            self._compare(inputs[0], outputs)
        product = _Product(inputs[0], partial(self.input_of_last, outputs))
        hooks = saved_tensors_hooks(product.pack, product.unpack)
        hooks.__enter__()
        self._hooks = hooks

    def _compare(self, actual: Tensor, outputs: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            again = self.input_of_last(outputs)
        if has_values(again) and not torch.allclose(again, actual, rtol=0, atol=0, equal_nan=True):
            raise self._unknown("the input of the last one is another when it is computed again")
        self._is_compared = True

    def _after_last(self, *_: Any) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()

    def _unknown(self, why: str) -> ModelError:
        return ModelError(
            f"{_KEY}=recompute needs MLPs that compute only with the outputs of their linear layers; in "
            f"{type(self.mlp).__name__}, {why}. Set {_KEY}=keep."
        )


class _Product:
    """The input of a last linear layer, which is kept as a way to compute it.

    Args:
        tensor: the input; only its layout is kept.
        compute: computes it again.
    """

    def __init__(self, tensor: Tensor, compute: Callable[[], Tensor]) -> None:
        self._storage, self._numel, self._dtype = storage_key(tensor), tensor.numel(), tensor.dtype
        self._compute = compute
        kind = tensor.device.type
        has_autocast = torch.is_autocast_enabled(kind)
        self._autocast = autocast_of_now(tensor.device) if has_autocast else partial(_without_autocast, kind)
        self._again: Tensor | None = None

    def pack(self, tensor: Tensor) -> Tensor | tuple[int, ...]:
        """Keep a shape in place of the input, or a view of all of it."""
        is_input = (
            (tensor.numel(), tensor.dtype) == (self._numel, self._dtype)
            and storage_key(tensor) == self._storage
            and tensor.is_contiguous()
        )
        if is_input:
            return tuple(tensor.shape)
        return tensor if tensor.grad_fn is None else tensor.detach()  # an output would keep its own node

    def unpack(self, kept: Tensor | tuple[int, ...]) -> Tensor:
        """Compute the input for the first node that takes it; the last one frees it, with the graph."""
        if isinstance(kept, Tensor):
            return kept
        if self._again is None:
            with torch.no_grad(), self._autocast():
                self._again = self._compute()
        return self._again.view(kept)


class _Reached(Exception):  # no error: it leaves a forward that has done its part
    """A forward has come to its last linear layer."""

    tensor: Tensor | None = None

    def stop(self, tensor: Tensor) -> Tensor:
        """Leave the forward with the input of its last linear layer."""
        self.tensor = tensor
        raise self

    def taken(self) -> Tensor:
        """Return the input, and let go of it and of the frames that the forward has left."""
        tensor, self.tensor, self.__traceback__ = self.tensor, None, None
        assert tensor is not None
        return tensor


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Switch autocast off; mostly it is, and to enter its context takes the host as long as several operators."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _given(output: Tensor, *_: Any) -> Tensor:
    return output


def _recomputable(layer: nn.Module) -> list[nn.Module]:
    return [mlp for mlp in mlps_in(layer) if len(_linear_layers(mlp)) > 1]


def _linear_layers(mlp: nn.Module) -> list[str]:
    """Return the names of a module's own linear layers in their order, with adapters or without."""
    return [name for name, child in mlp.named_children() if _features(child) != (0, 0)]


def _features(module: nn.Module) -> tuple[int, int]:
    """Return a linear layer's numbers of inputs and outputs, also of one with an adapter; zeros for other modules."""
    base = getattr(module, "base_layer", module)
    if isinstance(base, nn.Linear):
        return base.in_features, base.out_features
    return (base.nx, base.nf) if isinstance(base, Conv1D) else (0, 0)

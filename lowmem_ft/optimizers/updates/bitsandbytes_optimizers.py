"""bitsandbytes' AdamW and Lion, in 8-bit and paged forms; the only module here that imports bitsandbytes."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from lowmem_ft.optimizers.table import Bitsandbytes


def build_bitsandbytes(groups: list[dict[str, Any]], form: Bitsandbytes, **hyperparameters: Any) -> Optimizer:
    """Build one of bitsandbytes' optimizers, sharing no settings with any other.

    With 8 bits, state is quantised blockwise (256 elements a block), except for tensors below 4096 elements; with 32 it
    is float32 whatever the weights are. Paged state is in CUDA's managed memory, which moves to the host when the
    device is full.

    Args:
        groups: parameter groups with their weight decay.
        form: the optimizer to build.
        **hyperparameters: ``lr``, ``betas`` and, for AdamW, ``eps``.

    Returns:
        The optimizer.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022; paging: "QLoRA", 2023.
    """
    import bitsandbytes

    optimizer = getattr(bitsandbytes.optim, form.algorithm)(
        groups, optim_bits=form.bits, is_paged=form.paged, **hyperparameters
    )
    # bitsandbytes keeps overrides in one manager for the whole process, by the id() of a parameter: a later model whose
    # parameter lands on a freed id would inherit them. A separate manager prevents that.
    manager_class = bitsandbytes.optim.GlobalOptimManager
    optimizer.mng = manager_class.__new__(manager_class)
    optimizer.mng.initialize()
    return optimizer


def keep_embeddings_in_32bit(optimizer: Any, model: nn.Module) -> None:
    """Give ``nn.Embedding`` weights, and a head tied to one, 32-bit state: rare tokens are unstable in 8.

    Args:
        optimizer: one from :func:`build_bitsandbytes`, before its first step.
        model: the model it trains.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) in embeddings:
                optimizer.mng.index2config[group_index, index] = {"optim_bits": 32}


@runtime_checkable
class AllocatesState(Protocol):
    """The call that bitsandbytes' optimizers have and torch's lack: it allocates one parameter's state."""

    state: dict[nn.Parameter, dict[str, Any]]

    def init_state(self, group: dict[str, Any], p: nn.Parameter, gindex: int, pindex: int) -> None:
        """Allocate zeros for the parameter at ``param_groups[gindex]["params"][pindex]``."""
        ...

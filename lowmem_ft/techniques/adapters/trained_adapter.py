"""The adapter of a run: its parameters, and its files in PEFT's format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lowmem_ft.foundation.errors import CheckpointError
from lowmem_ft.foundation.tensors.local_shards import set_whole, whole_shape, whole_tensor
from lowmem_ft.techniques.adapters.adapter_folder import WEIGHTS_FILE
from lowmem_ft.techniques.adapters.modules_to_save import add_to_file
from lowmem_ft.techniques.adapters.trained_rows import trained_parameters
from lowmem_ft.techniques.adapters.whole_model import WholeModel, name_for_whole, named_for_language_model
from lowmem_ft.techniques.technique import Technique


class Lora(Technique):
    """The adapters of a model, and their files in PEFT's format.

    Training calls the model itself, so that its layers stay where other techniques expect them. PEFT's wrapper is used
    only for the files, and by callers that want it.

    Attributes:
        model: the model with adapters.
        peft_model: PEFT's wrapper around it.
    """

    is_trained = True

    def __init__(
        self,
        model: Any,
        peft_model: Any,
        *undo: Callable[[], object],
        whole: WholeModel | None = None,
        saved_modules: Iterable[nn.Module] = (),
    ) -> None:
        super().__init__(*undo)
        self.model = model
        self.peft_model = peft_model
        self._whole = whole
        # Not their parameters, in whose place FSDP2 puts sharded ones.
        self._saved_modules = tuple(saved_modules)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The adapters' parameters and the trained ones of the model itself, by their names: no others are trained."""
        own = {weight for module in self._saved_modules for weight in module.parameters()}
        own |= trained_parameters(self.model)
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if _is_of_adapter(name) or parameter in own
        }

    def save(self, folder: Path, *, writes: bool = True) -> bool:
        """Write ``adapter_model.safetensors`` and ``adapter_config.json``, and check them by reading them back.

        Raises:
            CheckpointError: if what is in the folder then is not this adapter, bit for bit.
        """
        named = self._gathered()
        if not writes:
            return True
        # PEFT makes a set of the layers, whose order is another in every process.
        for config in self.peft_model.peft_config.values():
            if isinstance(config.target_modules, set):
                config.target_modules = sorted(config.target_modules)
        # The state is passed explicitly: without it PEFT would collect that of the whole base first.
        self.peft_model.save_pretrained(folder, state_dict=named, save_embedding_layers=False)
        add_to_file(folder, {name: tensor for name, tensor in named.items() if not _is_of_adapter(name)})
        (folder / "README.md").unlink()  # PEFT's model card; the run writes its own
        if self._whole is not None:
            name_for_whole(folder, self._whole)
        state = self._as_in_files(named)
        saved = self._read(folder)
        _compare(state, saved, f"The adapter saved in {folder} is not the one in memory")
        return True

    def load(self, folder: Path) -> None:
        """Load the values of a saved adapter, bit for bit; if the adapter is sharded, this rank's rows.

        Raises:
            CheckpointError: if the adapter does not have these layers and this rank.
        """
        saved, live = self._read(folder), self._as_in_files(self._named_for_peft(self.parameters()))
        problem = f"The adapter in {folder} does not fit this run's"
        _compare(live, saved, problem, by_value=False)
        for name, parameter in live.items():
            set_whole(parameter, saved[name])
        _compare(self._as_in_files(self._gathered()), saved, problem)

    def _read(self, folder: Path) -> dict[str, Tensor]:
        tensors = read_weights(folder)
        return tensors if self._whole is None else named_for_language_model(tensors, self._whole)

    def _gathered(self) -> dict[str, Tensor]:
        """Gather the whole adapter; if several processes hold parts of it, each of them must call this."""
        whole = {name: whole_tensor(parameter).detach() for name, parameter in self.parameters().items()}
        return self._named_for_peft(whole)

    def _as_in_files(self, named: dict[str, Any]) -> dict[str, Tensor]:
        """Key tensors by their names in files, which omit the adapter's name within the model."""
        from peft import get_peft_model_state_dict

        of_model = {name: tensor for name, tensor in named.items() if not _is_of_adapter(name)}
        of_adapter = {name: tensor for name, tensor in named.items() if name not in of_model}
        return of_model | get_peft_model_state_dict(
            self.peft_model, state_dict=of_adapter, save_embedding_layers=False
        )

    def _named_for_peft(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Key tensors by PEFT's names; one that several modules share has all of its names, as in PEFT's files."""
        every_name = dict(self.model.named_parameters(remove_duplicate=False))
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            f"base_model.model.{name}": tensors[names[parameter]]
            for name, parameter in every_name.items()
            if names[parameter] in tensors
        }


def _is_of_adapter(name: str) -> bool:
    return "lora_" in name


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a saved adapter by the names in its file.

    Raises:
        CheckpointError: if the folder has no such file, or the file is damaged.
    """
    try:
        return load_file(folder / WEIGHTS_FILE)
    except OSError as error:
        raise CheckpointError(f"{folder} holds no adapter: {error}.") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE} is damaged: {error}. Save the adapter again."
        ) from error


def _compare(
    live: Mapping[str, Tensor], saved: Mapping[str, Tensor], problem: str, *, by_value: bool = True
) -> None:
    def is_same(name: str) -> bool:
        one, other = live.get(name), saved.get(name)
        if one is None or other is None or whole_shape(one) != other.shape or one.dtype != other.dtype:
            return False
        return not by_value or torch.equal(
            one.cpu().view(torch.uint8), other.view(torch.uint8)
        )  # NaN equals NaN

    different = [name for name in sorted({*live, *saved}) if not is_same(name)]
    if different:
        raise CheckpointError(f"{problem}: {len(different)} tensors differ, such as {different[0]}.")

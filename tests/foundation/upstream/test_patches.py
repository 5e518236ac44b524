"""A patch of what is not there says so, and makes nothing up."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any, cast

import pytest
import torch
import torch.nn.attention.flex_attention as flex_attention
import torch.utils.data._utils.worker
from accelerate.state import PartialState
from torch import nn
from transformers import PreTrainedModel, core_model_loading, modeling_flash_attention_utils
from transformers.generation.utils import GenerationMixin
from transformers.integrations import moe
from transformers.utils import import_utils

from lowmem_ft.foundation.upstream.patches import (
    UpstreamChangedError,
    existing,
    loaded_module,
    replace,
    wrap,
    wrap_wherever_imported,
)
from lowmem_ft.foundation.upstream.tested import installed_version
from lowmem_ft.virtual_gpu import VirtualGPU


def test_what_was_inherited_is_inherited_again():
    class Base:
        value = 1

    class Inherits(Base):
        pass

    with contextlib.ExitStack() as undo:
        replace(undo, Inherits, "value", 2)
        assert (Base.value, Inherits.value) == (1, 2)
    Base.value = 3
    assert Inherits.value == 3


def test_a_static_method_stays_one():
    class Owner:
        @staticmethod
        def double(number):
            return 2 * number

    with contextlib.ExitStack() as undo:
        replace(undo, Owner, "double", staticmethod(lambda number: 3 * number))
        assert Owner().double(1) == 3
    assert Owner().double(1) == 2


def test_what_goes_around_a_method_gets_the_method_whatever_its_kind():
    class Owner:
        def plain(self, number):
            return self.__class__.__name__, number

        @classmethod
        def of_class(cls, number):
            return cls.__name__, number

        @staticmethod
        def static(number):
            return "Owner", number

    class Inherits(Owner):
        pass

    def doubled(original, *arguments):
        *owner, number = arguments
        return original(*owner, 2 * number)

    names = ("plain", "of_class", "static")
    with contextlib.ExitStack() as undo:
        for name in names:
            wrap(undo, Owner, name, doubled)
        assert {getattr(Owner(), name)(1) for name in names} == {("Owner", 2)}
        assert Inherits.of_class(1) == ("Inherits", 2)
    assert {getattr(Owner(), name)(1) for name in names} == {("Owner", 1)}


def test_a_function_is_wrapped_by_each_name_and_nowhere_once_that_is_undone():
    defines, before, meanwhile = (
        cast(Any, types.ModuleType(name)) for name in ("defines", "before", "meanwhile")
    )
    defines.double = before.its_double = lambda number: 2 * number
    with pytest.MonkeyPatch.context() as patch:
        for module in (defines, before):
            patch.setitem(sys.modules, module.__name__, module)
        for plus in (1, 10):  # the second time, `meanwhile` has what the first time is over
            with contextlib.ExitStack() as undo:
                wrap_wherever_imported(
                    undo, defines, "double", lambda double, number, plus=plus: double(number) + plus
                )
                if plus == 1:
                    meanwhile.double = defines.double
                assert defines.double(1) == before.its_double(1) == meanwhile.double(1) == 2 + plus
            assert defines.double(1) == before.its_double(1) == meanwhile.double(1) == 2


def test_a_class_method_written_in_c_gets_the_class_that_it_is_called_on():
    """As ``torch.autograd.Function.apply`` is since torch 2.14."""

    class Owner(dict):
        fromkeys = vars(dict)["fromkeys"]

    class Inherits(Owner):
        pass

    seen = []
    with contextlib.ExitStack() as undo:
        wrap(
            undo,
            Owner,
            "fromkeys",
            lambda original, *arguments: seen.append(arguments) or original(*arguments),
        )
        assert type(Inherits.fromkeys("a")) is Inherits
    assert seen == [(Inherits, "a")]
    assert vars(Owner)["fromkeys"] is vars(dict)["fromkeys"]


@pytest.mark.parametrize(
    "owner, name, full_name",
    [
        (torch.optim, "_no_such_name", "torch.optim._no_such_name"),
        (nn.Linear, "_no_such_name", "torch.nn.modules.linear.Linear._no_such_name"),
    ],
)
def test_a_name_that_is_not_there_is_not_made_up(owner, name, full_name):
    with contextlib.ExitStack() as undo, pytest.raises(UpstreamChangedError) as caught:
        replace(undo, owner, name, None)
    assert not hasattr(owner, name)
    message = str(caught.value)
    assert full_name in message
    assert f"torch {installed_version('torch')}" in message
    assert "Tested is torch 2.11 to 2.15: run pip install 'torch>=2.11,<2.16'" in message


def test_of_an_untested_library_the_installed_version_is_named():
    with pytest.raises(UpstreamChangedError, match=r"pytest\.gone, which pytest [\d.]+ does not have"):
        existing(pytest, "gone")


def test_a_module_that_has_gone_is_not_taken_for_one_that_nobody_imported():
    assert loaded_module("no_such_library.module") is None
    assert loaded_module("torch.optim.optimizer") is sys.modules["torch.optim.optimizer"]
    for name in ("torch.optim.no_such_module", "torch.no_such_package.module"):
        with pytest.raises(UpstreamChangedError, match=name):
            loaded_module(name)


PATCHED = [
    (import_utils, "is_fake_tensor"),
    (torch.utils.data.DataLoader, "_get_iterator"),
    (moe, "_can_use_grouped_mm"),
    (modeling_flash_attention_utils, "_lazy_imports"),
    (PreTrainedModel, "_flash_attn_can_dispatch"),
    (core_model_loading, "_materialize_copy"),
    (GenerationMixin, "_beam_search_has_unfinished_sequences"),
    (GenerationMixin, "_update_finished_beams"),
    (flex_attention, "_validate_device"),
    (PartialState, "_shared_state"),
]


@pytest.mark.parametrize("owner, name", PATCHED, ids=[name for _, name in PATCHED])
def test_no_trace_begins_where_upstream_has_renamed_what_it_patches(owner, name, monkeypatch):
    monkeypatch.setattr(owner, f"{name}_of_a_later_version", vars(owner)[name], raising=False)
    monkeypatch.delattr(owner, name)
    with pytest.raises(UpstreamChangedError, match=f"{name}, which"), VirtualGPU("rtx-4090"):
        pass
    assert not hasattr(owner, name)
    monkeypatch.undo()
    with VirtualGPU("rtx-4090"):  # what had been patched before was taken back
        torch.zeros(1, device="cuda")

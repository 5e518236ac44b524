"""Every private name of another library is there, with the shape that the package takes it for."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import tempfile

import pytest
import torch
import torch._subclasses.fake_tensor
import torch.nn.attention.varlen  # noqa: F401 - registers its operators
from torch import nn
from upstream_names import NAMES, UpstreamName

from lowmem_ft.upstream.tested import is_before

BY_PATH = {name.path: name for name in NAMES}


def make_scheduler():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    return torch.optim.lr_scheduler.ConstantLR(optimizer)


def make_checkpointed_layer():
    """As transformers leaves one for recomputation: asked by its name since 5.23, or before."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=8))
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    return model.model.layers[0]


def make_prepared_model():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare(nn.Linear(1, 1))
    AcceleratorState._reset_state()
    return prepared


def make_dataset():
    import datasets

    return datasets.Dataset.from_dict({"x": [1]})


def make_linked_parameter():
    """As ZeRO-2 leaves one of which this process updates a part."""
    from deepspeed.utils.mixed_precision_linkage import link_hp_params

    parameter = nn.Parameter(torch.zeros(4))
    link_hp_params([parameter], torch.zeros(4), {}, {}, False, 0, 0, 4, None)
    return parameter


@functools.cache
def make_fsdp_state():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    state = fully_shard(nn.Linear(1, 1), mesh=init_device_mesh("cpu", (1,)))._get_fsdp_state()
    state._lazy_init()
    torch.distributed.destroy_process_group()
    return state


@functools.cache
def make_loaded_model():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_experts": 2, "vocab_size": 8, "head_dim": 8}
    plain = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_attention_heads=1, num_key_value_heads=1))
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        return Qwen3MoeForCausalLM.from_pretrained(folder)


OBJECTS = {
    "transformers.PreTrainedModel.from_pretrained()": make_loaded_model,
    "torch.distributed.fsdp.FSDPModule()._get_fsdp_state()": make_fsdp_state,
    "torch.distributed.fsdp.FSDPModule()._get_fsdp_state()._fsdp_param_group": lambda: (
        make_fsdp_state()._fsdp_param_group
    ),
    "torch.nn.Module()": nn.Module,
    "torch.autograd.graph.Node()": lambda: torch.ones(1, requires_grad=True).exp().grad_fn,
    "torch.optim.lr_scheduler.LRScheduler()": make_scheduler,
    "torch._subclasses.fake_tensor.FakeTensorMode()": torch._subclasses.fake_tensor.FakeTensorMode,
    "torch._ops.OpOverload()": lambda: torch.ops.aten.add.Tensor,
    "torch.compile(function)": lambda: torch.compile(lambda value: value),
    "torch.compile(module)": lambda: torch.compile(nn.Module()),
    "transformers.modeling_layers.GradientCheckpointingLayer()": make_checkpointed_layer,
    "accelerate.Accelerator().prepare()": make_prepared_model,
    "datasets.Dataset()": make_dataset,
    "torch.utils.data.DataLoader().__iter__()": lambda: iter(torch.utils.data.DataLoader([1])),
    "deepspeed.utils.mixed_precision_linkage.link_hp_params()": make_linked_parameter,
}
"""How to come by an object whose attributes are relied on."""


@functools.cache
def owner_of(path):
    """The module, class or object of a path."""
    if path in OBJECTS:
        return OBJECTS[path]()
    return pkgutil.resolve_name(path)


def parameters_of(function):
    """Names by position and by name, and those that must be given; None where nobody tells."""
    if isinstance(function, torch._ops.OpOverloadPacket):
        arguments = getattr(function, function.overloads()[0])._schema.arguments
        positional = [argument.name for argument in arguments if not argument.kwarg_only]
        needed = {argument.name for argument in arguments if not argument.has_default_value()}
        return positional, [argument.name for argument in arguments], needed
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C++
        return None
    single = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    positional = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
    return (
        positional,
        [one.name for one in parameters],
        {one.name for one in single if one.default is one.empty},
    )


def problem_with(entry: UpstreamName) -> str | None:
    """What is not as the manifest says, in words."""
    try:
        if entry.kind == "module":
            importlib.import_module(entry.path)
            return None
        value = getattr(owner_of(entry.owner), entry.name)
    except (AttributeError, ModuleNotFoundError):
        return "is not there"
    if entry.kind == "data":
        is_so = entry.type_name in ("", type(value).__name__)
        return None if is_so else f"is a {type(value).__name__}, no {entry.type_name}"
    if entry.kind == "class":
        return None if isinstance(value, type) else f"is no class but {value!r}"
    if not callable(value):
        return f"cannot be called: {value!r}"
    return None if entry.parameters is None else problem_with_parameters(entry, value)


def problem_with_parameters(entry: UpstreamName, function) -> str | None:
    assert entry.parameters is not None
    known = parameters_of(function)
    if known is None:
        return None
    positional, every, needed = known
    if entry.kind == "replaced":
        return None if every == list(entry.parameters) else f"takes {every}"
    passed = [name for name in entry.parameters if name != "*"]
    by_position = entry.parameters.index("*") if "*" in entry.parameters else len(passed)
    if positional[:by_position] != passed[:by_position] or not set(passed) <= set(every):
        return f"takes {every}, and is given {passed}"
    # What only reads a call that others make gives no list of what it passes.
    return f"needs {sorted(needed - set(passed))} as well" if needed - set(passed) and by_position else None


@pytest.mark.parametrize("entry", NAMES, ids=BY_PATH)
def test_the_name_is_there_with_the_expected_shape(entry):
    if importlib.util.find_spec(entry.library) is None:
        pytest.skip(f"{entry.library} is not installed")
    if is_before(entry.library, entry.since or (0, 0)) or not is_before(
        entry.library, entry.before or (9999, 0)
    ):
        pytest.skip(f"other versions of {entry.library} have it")
    problem = problem_with(entry)
    assert problem is None, f"{entry.path} {problem}. It is relied on for: {entry.purpose}"


def test_no_name_is_there_twice():
    assert len(BY_PATH) == len(NAMES)


@pytest.mark.parametrize(
    "path", ["torch.Tensor._use_count", "transformers.utils.import_utils.is_fake_tensor"]
)
def test_a_renamed_name_is_found(path, monkeypatch):
    entry = BY_PATH[path]
    if entry.owner == "torch.Tensor":  # what C++ defines nobody can delete: another class stands for it
        monkeypatch.setattr(torch, "Tensor", nn.Module)
    else:
        monkeypatch.delattr(owner_of(entry.owner), entry.name)
    owner_of.cache_clear()
    assert problem_with(entry) == "is not there"
    owner_of.cache_clear()


def test_a_module_that_has_moved_is_found():
    entry = dataclasses.replace(
        BY_PATH["torch.utils._foreach_utils"], name="_foreach_utils_of_a_later_version"
    )
    assert problem_with(entry) == "is not there"


def other_parameters(query, key, value, mask):
    pass


@pytest.mark.parametrize(
    "path, value, problem",
    [
        ("torch.nn.attention.flex_attention._validate_device", other_parameters, "takes"),
        ("torch.cuda._utils._get_device_index", other_parameters, "takes"),
        ("torch.utils._pytree.tree_leaves", lambda tree, now_needed: None, "needs"),
        ("torch.utils._pytree.tree_map", 3, "cannot be called"),
        ("torch.optim.optimizer._foreach_supported_types", (), "is a tuple"),
        ("torch._subclasses.fake_tensor.FakeTensor", 3, "is no class"),
    ],
)
def test_another_shape_is_found(path, value, problem, monkeypatch):
    entry = BY_PATH[path]
    monkeypatch.setattr(owner_of(entry.owner), entry.name, value)
    found = problem_with(entry)
    assert found is not None
    assert found.startswith(problem)

"""A stand-in for Triton where it is not installed, as on a laptop: its decorators, and a name for everything else.

A library of kernels can be imported with it on a virtual GPU, and its launches are recorded. The rest of the program,
torch included, finds no Triton: the stand-in can be imported only from such a library, while that is itself imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from lowmem_ft.foundation.devices import is_virtual
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.virtual_gpu.triton.triton_driver import VirtualDriver, benchmark
from lowmem_ft.virtual_gpu.triton.triton_kernels import launch, tensors_of

_VERSION = "3.7.1"
"""Version of Triton whose names these are."""


class _Launched:
    """A kernel, an autotuner or heuristics, launched by ``kernel[grid](...)``."""

    fn: Any
    arg_names: list[str]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self.run, grid=grid, warmup=False)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Launch."""
        raise NotImplementedError


class Kernel(_Launched):
    """A function that Triton would compile."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self.__module__, self.__qualname__ = function.__module__, function.__qualname__
        self.fn = function
        self.arg_names = list(function.__code__.co_varnames[: function.__code__.co_argcount])
        self.pre_run_hooks: list[Callable[..., Any]] = []

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Record a launch."""
        _refuse_elsewhere(self.fn, (*args, *kwargs.values()))
        if not warmup:
            launch(self, grid, args, kwargs)


def _refuse_elsewhere(fn: Any, arguments: tuple[Any, ...]) -> None:
    """Raise for a launch on a device that is not virtual."""
    if not all(is_virtual(tensor.device) for tensor in tensors_of(arguments)):
        while hasattr(fn, "fn"):
            fn = fn.fn
        raise UserError(
            f"{fn.__name__} is a Triton kernel, and Triton is not installed here: it can be estimated on a virtual "
            "GPU, not run. `pip install triton` installs it under Linux."
        )


class Config:
    """A configuration to choose from."""

    def __init__(
        self, kwargs: dict[str, Any], *options: Any, pre_hook: Callable[..., Any] | None = None, **named: Any
    ) -> None:
        self.kwargs, self.pre_hook = kwargs, pre_hook
        self.num_warps, self.num_stages = named.get("num_warps", 4), named.get("num_stages", 3)

    def all_kwargs(self) -> dict[str, Any]:
        """Return the kernel's arguments that it sets."""
        return dict(self.kwargs)


class Autotuner(_Launched):
    """Takes the first configuration that may be chosen, and for each key once the memory of the timings."""

    def __init__(self, fn: Any, configs: list[Config], key: list[str], prune_configs_by: Any = None) -> None:
        self.fn, self.arg_names = fn, fn.arg_names
        self.configs = list(configs) or [Config({})]
        self._key = key
        self._prune = (prune_configs_by or {}).get("early_config_prune")
        self._tuned: dict[tuple[Any, ...], Config] = {}

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Launch with a configuration."""
        _refuse_elsewhere(self.fn, (*args, *kwargs.values()))
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        key = (
            *(given.get(name) for name in self._key),
            *(str(one.dtype) for one in tensors_of(tuple(given.values()))),
        )
        if key not in self._tuned:
            configs = self._prune(self.configs, given, **kwargs) if self._prune else self.configs
            if len(self.configs) > 1:
                benchmark()
            self._tuned[key] = configs[0]
        config = self._tuned[key]
        if config.pre_hook is not None:
            config.pre_hook({**given, **config.all_kwargs()})
        self.fn.run(*args, grid=grid, warmup=warmup, **kwargs, **config.all_kwargs())


class Heuristics(_Launched):
    """Computes arguments from the others."""

    def __init__(self, fn: Any, values: Mapping[str, Callable[[dict[str, Any]], Any]]) -> None:
        self.fn, self.arg_names, self._values = fn, fn.arg_names, values

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Launch with them."""
        for name, value in self._values.items():
            kwargs[name] = value({**dict(zip(self.arg_names, args, strict=False)), **kwargs})
        self.fn.run(*args, grid=grid, warmup=warmup, **kwargs)


class _Constant:
    """A constant of a kernel."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Anything:
    """Any other name of Triton, which only kernels use: types, functions within them, what decorates those."""

    __module__ = "triton"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> Any:
        return self


_ANYTHING = _Anything()


def _jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return Kernel if function is None else Kernel(function)


def _autotune(configs: list[Config], key: list[str], prune_configs_by: Any = None, **options: Any) -> Any:
    return lambda fn: Autotuner(fn, configs, key, prune_configs_by)


def _heuristics(values: Mapping[str, Callable[[dict[str, Any]], Any]]) -> Any:
    return lambda fn: Heuristics(fn, values)


def cdiv(number: int, size: int) -> int:
    """Return a quotient, rounded up."""
    return -(-number // size)


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length() if number else 0


class _Target(NamedTuple):
    backend: str
    arch: int
    warp_size: int


_DECORATORS = {"jit": _jit, "autotune": _autotune, "heuristics": _heuristics, "Config": Config}
_CLASSES = {
    "Autotuner": Autotuner,
    "Heuristics": Heuristics,
    "JITFunction": Kernel,
    "KernelInterface": _Launched,
}
_DRIVER = SimpleNamespace(active=VirtualDriver(_Target))
_NAMES: dict[str, dict[str, Any]] = {
    "triton": {**_DECORATORS, "cdiv": cdiv, "next_power_of_2": _next_power_of_2, "__version__": _VERSION},
    "triton.language": {"constexpr": _Constant},
    "triton.runtime": {**_DECORATORS, **_CLASSES, "driver": _DRIVER},
    "triton.runtime.jit": {"jit": _jit, **_CLASSES},
    "triton.runtime.autotuner": {**_DECORATORS, **_CLASSES},
}


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _ANYTHING


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds Triton's modules, whatever their names."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "triton" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_NAMES.get(module.__name__, {}))


_FINDER = _Finder()
_modules: dict[str, ModuleType] = {}


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Let Triton's modules be imported in a block."""
    before = _taken_out()
    sys.modules.update(_modules)
    sys.meta_path.insert(0, _FINDER)
    try:
        yield
    finally:
        sys.meta_path.remove(_FINDER)
        _modules.update(_taken_out())
        sys.modules.update(before)


def _taken_out() -> dict[str, ModuleType]:
    """Return what has been imported of Triton, which is no longer imported then."""
    names = [name for name in sys.modules if name.partition(".")[0] == "triton"]
    return {name: sys.modules.pop(name) for name in names}

"""A script's memory on this processor by torch's own allocator, phase by phase, next to its estimate.

    python scripts/measuring/real_script.py train.py ARGS...

prints one line for each phase: bytes of the real run, bytes of the estimate, and how far the estimate is off. The real
run is the script itself, in a process of its own. Its bytes are those that torch's allocator reports to the profiler,
so no dispatch mode is on: under one, autograd sums the gradients of a tied weight in another way. The script must end
after the steps that the estimate sees (``max_steps=3``), and weights have to be in files; these are copied once they
are loaded, so ``load`` may hold a copy more than the estimate. What some kernels of this processor take and free within
themselves is left out, such as weights of a convolution in another layout.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.autograd.profiler import record_function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from lowmem_ft.foundation.notebook_cells import SUFFIX
from lowmem_ft.foundation.upstream.import_hooks import wrap_when_imported
from lowmem_ft.foundation.upstream.patches import replace, wrap

_MARK = "lowmem_ft phase "

_KERNELS_WITH_SCRATCH = (
    "aten::convolution",
    "aten::convolution_backward",
    "aten::native_layer_norm_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::_scaled_dot_product_efficient_attention",  # where a test stands in for a GPU's
    "aten::_scaled_dot_product_efficient_attention_backward",
    "c10d::_allgather_base_",  # gloo gathers into a copy
    "gloo:all_gather",
)

REAL = {
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # the profiler sees one thread
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}
"""Environment of a real run."""


@dataclass(frozen=True, kw_only=True)
class RealScript:
    """Memory of a script's run.

    Args:
        by_phase: the most bytes allocated in each phase.
        kept_bytes: bytes as the last optimizer step ends; 0 without one.
        steps: optimizer steps taken.
    """

    by_phase: dict[str, int]
    kept_bytes: int
    steps: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes allocated at all."""
        return max(self.by_phase.values())


def run_for_real(
    script: str | Path, arguments: Sequence[str] = (), *, folder: Path | None = None
) -> RealScript:
    """Run a script in a new process on this processor.

    Args:
        script: its file.
        arguments: what it finds in ``sys.argv``.
        folder: where it runs; None: here.

    Raises:
        RuntimeError: if it fails, with the end of its errors.
    """
    done = subprocess.run(
        [sys.executable, __file__, "--real", str(script), *arguments],
        cwd=folder,
        env={**os.environ, **REAL, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{script} failed:\n{done.stderr[-3000:]}")
    return RealScript(**json.loads(done.stdout.splitlines()[-1]))


class _Marks:
    """Marks in a profile: the phases of the program, by the rules of the virtual GPU's own attribution."""

    def __init__(self) -> None:
        self.steps = 0
        self._depth = 0
        self._fixed = 0
        self._trains = False

    def says(self, phase: str) -> None:
        """Mark that a phase begins."""
        if not self._fixed:
            with record_function(_MARK + phase):
                pass

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Mark the phases of what runs in a block."""
        with contextlib.ExitStack() as undo:
            for handle in (
                register_module_forward_pre_hook(self._before_forward),
                register_module_forward_hook(self._after_forward, always_call=True),
                register_optimizer_step_pre_hook(lambda *args: self.says("optimizer_step")),
                register_optimizer_step_post_hook(self._after_step),
            ):
                undo.callback(handle.remove)
            wrap(undo, torch.autograd, "backward", self._backward)
            wrap_when_imported(undo, "transformers.trainer", "Trainer", "training_step", self._train)
            module = "transformers.generation.utils"
            wrap_when_imported(undo, module, "GenerationMixin", "generate", self._generate)
            wrap_when_imported(
                undo, "transformers.modeling_utils", "PreTrainedModel", "from_pretrained", _copied_from_files
            )
            yield

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not self._depth and torch._C._current_autograd_node() is None:
            without = "score" if self._trains else "forward" if module.training else "evaluation"
            self.says("forward" if torch.is_grad_enabled() else without)
        self._depth += 1

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1

    def _backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.says("backward")
        result = backward(*args, **kwargs)
        self.says("optimizer_step")
        return result

    def _generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.says("generate")
        self._fixed += 1
        try:
            return generate(*args, **kwargs)
        finally:
            self._fixed -= 1

    def _train(self, training_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._trains = True
        try:
            return training_step(*args, **kwargs)
        finally:
            self._trains = False

    def _after_step(self, *args: Any) -> None:
        self.steps += 1
        with record_function(f"{_MARK}step ends"):
            pass


def _copied_from_files(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Load a model, and copy its weights: while they are a file's pages, the allocator does not report them."""
    loaded = load(*args, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()
    return loaded


def measure(script: str, arguments: list[str]) -> RealScript:
    """Run a script in this process, which the profiler then watches."""
    marks = _Marks()
    with contextlib.ExitStack() as undo:
        replace(undo, sys, "argv", [script, *arguments])
        replace(undo, sys, "path", [str(Path(script).parent.absolute()), *sys.path])
        undo.enter_context(contextlib.redirect_stdout(sys.stderr))
        profiled = undo.enter_context(profile(activities=[ProfilerActivity.CPU], profile_memory=True))
        undo.enter_context(marks.apply())
        if script.endswith(SUFFIX):
            from lowmem_ft.planning.script_runs.notebook_run import NotebookRun

            notebook = NotebookRun(Path(script))
            notebook.apply(undo)
            notebook.run()
        else:
            runpy.run_path(script, run_name="__main__")
    return _read(profiled, marks.steps)


def _read(profiled: Any, steps: int) -> RealScript:
    events = list(_all_events(profiled.profiler.kineto_results.experimental_event_tree()))
    events.sort(key=lambda event: event.start_time_ns)
    scratch = _scratch_of_kernels(events)
    phase, now, kept, by_phase, taken = "load", 0, 0, {"load": 0}, 0
    for event in events:
        if event.tag == _EventType.Allocation:
            taken += event.extra_fields.alloc_size if id(event) in scratch else 0
            now = event.extra_fields.total_allocated - taken
            if event.extra_fields.alloc_size > 0:
                by_phase[phase] = max(by_phase.get(phase, 0), now)
        elif event.name.startswith(_MARK):
            said = event.name.removeprefix(_MARK)
            if said == "step ends":
                kept = now
            else:
                phase = said
    return RealScript(by_phase=by_phase, kept_bytes=kept, steps=steps)


def _scratch_of_kernels(events: Sequence[Any]) -> set[int]:
    """Return the ids of the events by which kernels take and free memory within themselves."""
    scratch: set[int] = set()
    for event in events:
        if event.name not in _KERNELS_WITH_SCRATCH:
            continue
        taken: dict[int, Any] = {}
        for within in sorted(_all_events(event.children), key=lambda event: event.start_time_ns):
            if within.tag != _EventType.Allocation:
                continue
            address = within.extra_fields.ptr
            if within.extra_fields.alloc_size > 0:
                taken[address] = within
            elif address in taken:
                scratch |= {id(taken.pop(address)), id(within)}
    return scratch


def _all_events(roots: Sequence[Any]) -> Iterator[Any]:
    stack = list(roots)
    while stack:
        event = stack.pop()
        yield event
        stack.extend(event.children)


def compare(real: RealScript, found: Any) -> None:
    """Print a run next to its ``ScriptEstimate``."""
    estimated = dict(found.estimate.by_phase)
    print(f"{'phase':<16}{'real':>15}{'estimate':>15}{'off':>10}")
    phases = [*estimated, *(phase for phase in real.by_phase if phase not in estimated)]
    rows = [(phase, real.by_phase.get(phase, 0), estimated.get(phase, 0)) for phase in phases]  # type: ignore[call-overload]
    rows.append(("kept", real.kept_bytes, found.kept_bytes))
    rows.append(("peak", real.peak_bytes, found.estimate.allocated_peak_bytes))
    for name, measured, guessed in rows:
        off = f"{guessed / measured - 1:+.3%}" if measured and guessed else "-"
        print(f"{name:<16}{measured:>15,}{guessed:>15,}{off:>10}")
    print(f"steps: {real.steps} real, {found.steps} estimated")


def main() -> None:
    """Measure one script, or compare it."""
    if sys.argv[1:2] == ["--real"]:
        print(json.dumps(vars(measure(sys.argv[2], sys.argv[3:]))))
    elif len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
    else:
        from lowmem_ft.planning.script_runs import estimate_script

        script, arguments = sys.argv[1], sys.argv[2:]
        compare(run_for_real(script, arguments), estimate_script(script, arguments, gpu="cpu"))


if __name__ == "__main__":
    main()

"""Slowdown of a training step while it is watched, by each tier of lowmem_ft.monitoring, on one core.

    python scripts/bench monitoring

Steps of each tier take turns with plain ones, and the ratio is that of median processor seconds, so that other programs
on the machine matter little.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable

import torch
from command_line import parser_of
from measured_on import measured_on
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from lowmem_ft.monitoring import LeakFinder, MemoryMeter, StepProfiler, activation_report

SIZES = {"small (hidden 64, 4 layers)": (64, 4, 15), "larger (hidden 512, 4 layers)": (512, 4, 5)}
"""Hidden size, number of layers and number of steps."""


class Step:
    """A training step of a Llama, in three phases if there is a meter."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        config = LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            vocab_size=512,
        )
        self.model: nn.Module = AutoModelForCausalLM.from_config(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.tokens = torch.randint(512, (4, 128))
        self.meter: MemoryMeter | None = None

    def __call__(self) -> None:
        """Take one step."""
        with self._phase("forward"):
            loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        with self._phase("backward"):
            loss.backward()
        with self._phase("update"):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def report(self) -> None:
        """Report what the layers keep."""
        activation_report(self.model, {"input_ids": self.tokens, "labels": self.tokens})

    def forward(self) -> None:
        """Run the same forward pass, unwatched."""
        self.model(input_ids=self.tokens, labels=self.tokens)

    def _phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self.meter.phase(name) if self.meter is not None else contextlib.nullcontext()


def seconds(function: Callable[[], object], times: int) -> float:
    """Return the median of a call's processor seconds."""
    taken = []
    for _ in range(times):
        begin = time.process_time()
        function()
        taken.append(time.process_time() - begin)
    return statistics.median(taken)


def ratios(step: Step, times: int) -> dict[str, float]:
    """Return the ratio of each tier's time to that of the plain work it watches, and a profiler's time afterwards."""
    found = {}
    for tier, watch in {
        "phases": lambda: MemoryMeter("cpu"),
        "exact": lambda: MemoryMeter("cpu", exact=True),
        "leaks": lambda: LeakFinder(steps=times + 1),
    }.items():
        plain = seconds(step, times)
        with watch() as watching:
            step.meter = watching if isinstance(watching, MemoryMeter) else None
            watched = seconds(step, times)
        step.meter = None
        found[tier] = 2 * watched / (plain + seconds(step, times))
    plain = seconds(step, times)
    with StepProfiler(step.model) as profiler:

        def profiled() -> None:
            with profiler.step():
                step()

        watched = seconds(profiled, 3)
    found["profiler"] = 2 * watched / (plain + seconds(step, times))
    found["seconds for its tables"] = seconds(profiler.result, 1)
    found["activation_report"] = seconds(step.report, 5) / seconds(step.forward, 5)
    return found


def main() -> None:
    """Print the ratios, and the time of a phase's beginning and end."""
    torch.set_num_threads(1)
    print(measured_on("cpu"))
    for name, (hidden_size, num_layers, times) in SIZES.items():
        step = Step(hidden_size, num_layers)
        seconds(step, 2)
        print(f"{name}: {seconds(step, times) * 1e3:.0f} ms a step;", end=" ")
        print(", ".join(f"{tier} {ratio:.2f}" for tier, ratio in ratios(step, times).items()))
    with MemoryMeter("cpu") as meter:

        def phase() -> None:
            with meter.phase("empty"):
                pass

        print(f"an empty phase: {seconds(lambda: [phase() for _ in range(100)], 5) * 1e4:.0f} us")


if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    main()

"""An answer on a tracing machine: the pass over its prompt, and one of the passes over a single token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowmem_ft.training.step.greedy import generate_greedily
from lowmem_ft.training.step.session import ForwardSession
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine

_END = 0
"""A token that ends an answer: which tokens come is not known in a trace, where no answer ends before its length."""


@dataclass(frozen=True)
class TracedAnswer:
    """Ranges of an answer's passes in the log of work, end exclusive.

    Args:
        prompt: the pass over the prompt.
        token: the pass over one token, the last one, with all of the cache before it.
    """

    prompt: tuple[int, int]
    token: tuple[int, int]


def trace_answer(session: ForwardSession, length: int, machine: TracingMachine) -> TracedAnswer:
    """Trace the end of an answer: all tokens but two as a prompt, then the last two.

    The cache is then as large as it gets, and no pass over a prompt is larger than the one traced, which is longer than
    the real one by the answer. What the passes over single tokens hold grows with the cache: the last one holds most.

    Args:
        session: the model, in eval mode.
        length: tokens of prompt and answer together.
        machine: where it is.
    """
    prompt_BT = torch.ones((1, max(1, length - 2)), dtype=torch.int64, device=session.runtime.machine.device)
    machine.mark(prompt_BT, "input")
    begin, ends = len(machine.work.entries), list[int]()
    num_said = len(machine.choices)
    generate_greedily(
        session, prompt_BT, 2, [_END], after_forward=lambda: ends.append(len(machine.work.entries))
    )
    # After each token generate asks whether the answer has ended: no, as it is to be of full length.
    said = [
        choice for choice in machine.choices[num_said:] if not choice.startswith("transformers/generation/")
    ]
    machine.choices[num_said:] = [f"answers: {choice}" for choice in said]
    return TracedAnswer(prompt=(begin, ends[0]), token=(ends[0], ends[1]))

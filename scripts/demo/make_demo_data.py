"""Write the demo's chat examples, ``recipes/demo/train.jsonl`` and ``heldout.jsonl``, from the topics in ``topics/``.

    python scripts/demo/make_demo_data.py

A topic (``topics/*.yaml``) is written by hand: three questions, two short answers, six steps that make sense in any
selection, two costs and two gains. The script deals it into three examples that share at most three of their six lines.
The topics of ``topics/heldout.yaml`` go to the held-out file, so no question and no line of an answer is in both files.
The result depends only on the topics: running it again writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml
from answer_style import format_answer

TOPICS_DIR = Path(__file__).parent / "topics"
OUTPUT_DIR = Path(__file__).parents[2] / "recipes" / "demo"

# The style must not depend on one system prompt: every sixth example brings its own, the others have no prompt.
SYSTEM_PROMPTS = (
    "You are a practical assistant.",
    "You answer everyday questions.",
    "Help the user. Be brief and honest.",
)
SYSTEM_PROMPT_EVERY = 6


@dataclass(frozen=True, kw_only=True)
class Topic:
    """One subject with the parts of its answers."""

    topic: str
    questions: tuple[str, str, str]
    answers: tuple[str, str]
    steps: tuple[str, str, str, str, str, str]
    costs: tuple[str, str]
    frees: tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Deal:
    """The parts of a topic that make one example, as indices into its lists."""

    answer: int
    steps: tuple[int, int, int]
    costs: int
    frees: int


# The first two deals share nothing; the third takes three lines from each, in one of two ways by turns.
FIRST = Deal(answer=0, steps=(0, 2, 4), costs=0, frees=0)
SECOND = Deal(answer=1, steps=(1, 3, 5), costs=1, frees=1)
THIRD = (
    Deal(answer=0, steps=(0, 3, 5), costs=1, frees=0),
    Deal(answer=1, steps=(1, 2, 4), costs=0, frees=1),
)


def main() -> None:
    """Write both files and say how many examples each holds."""
    for name, topics in load_topics().items():
        path = OUTPUT_DIR / f"{name}.jsonl"
        examples = make_examples(topics)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "".join(json.dumps(example, ensure_ascii=False) + "\n" for example in examples), "utf-8"
        )
        print(f"{path}: {len(examples)} examples from {len(topics)} topics")


def load_topics() -> dict[str, list[Topic]]:
    """Return the topics of each output file, ``train`` and ``heldout``."""
    topics: dict[str, list[Topic]] = {"train": [], "heldout": []}
    for path in sorted(TOPICS_DIR.glob("*.yaml")):
        rows = yaml.safe_load(path.read_text("utf-8"))
        topics["heldout" if path.stem == "heldout" else "train"].extend(_topic(row, path) for row in rows)
    return topics


def make_examples(topics: Iterable[Topic]) -> list[dict[str, list[dict[str, str]]]]:
    """Return three chat examples per topic, in a fixed shuffled order so that neighbours differ."""
    examples = []
    for number, topic in enumerate(topics):
        for question, deal in zip(topic.questions, (FIRST, SECOND, THIRD[number % 2]), strict=True):
            answer = format_answer(
                topic.answers[deal.answer],
                [topic.steps[index] for index in deal.steps],
                topic.costs[deal.costs],
                topic.frees[deal.frees],
            )
            examples.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    random.Random(0).shuffle(examples)
    for number in range(0, len(examples), SYSTEM_PROMPT_EVERY):
        prompt = SYSTEM_PROMPTS[number // SYSTEM_PROMPT_EVERY % len(SYSTEM_PROMPTS)]
        examples[number].insert(0, {"role": "system", "content": prompt})
    return [{"messages": messages} for messages in examples]


def _topic(row: dict[str, str | list[str]], path: Path) -> Topic:
    """Return a checked topic; a wrong number of parts would otherwise silently lose a line."""
    parts_wanted = {"questions": 3, "answers": 2, "steps": 6, "costs": 2, "frees": 2}
    for part, count in parts_wanted.items():
        if len(row[part]) != count or not all(isinstance(line, str) for line in row[part]):
            raise ValueError(
                f"{path}: topic {row['topic']!r} needs {count} lines of text in {part}, got {row[part]}"
            )
    return Topic(**row)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()

"""Kinds of data that supervised training does not learn from, by their columns: preferences, judged answers, pairs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lowmem_ft.data.text.examples import Row


def are_preferences(columns: Collection[str]) -> bool:
    """Return whether rows are preferences between two answers, in the columns of TRL's DPO or of OpenAI's."""
    return any(set(names) <= set(columns) for names in PREFERENCES)


def holds_preferences(columns: Sequence[str], source: str) -> str:
    """Return what is wrong with preferences if answers are to be learnt, and what learns from them."""
    return (
        f"{source} holds preferences (columns seen: {', '.join(columns)}), and training here is supervised: it learns "
        "answers, not which of two is better. Use TRL's DPOTrainer, which takes the same recipe through lowmem_ft.hf."
    )


def judged_answers(row: Row) -> str | None:
    """Return what is wrong with a row of KTO's if answers are to be learnt, and what learns from it; None for others.

    Args:
        row: values by column. TRL's rows have a ``label`` next to a completion, LLaMA-Factory's a ``kto_tag``; a label
            that is neither true nor false, such as the name of a class, judges nothing.
    """
    for name in ("label", "kto_tag"):
        value = row.get(name)
        is_number = value in (0, 1) and (name == "kto_tag" or "completion" in row)
        if isinstance(value, bool) or is_number or str(value).strip().lower() in ("true", "false"):
            return (
                f"{name}={str(value).lower()} judges the answer (KTO: true is a good one, false a bad one), and "
                "training here is supervised: good and bad answers would be learnt alike. Use TRL's KTOTrainer, with "
                "the rows of lowmem_ft.hf.load_rows. To learn only the good answers, leave out the rows of bad ones "
                f"and the column {name}."
            )
    return None


PREFERENCES = (("chosen", "rejected"), ("preferred_output", "non_preferred_output"))
_JOIN = "(join them as input_ids, with labels of -100 at the prompt)"
OTHER_KINDS = {
    (
        "prompt",
        "completions",
        "labels",
    ): "answers whose steps were judged one by one, as TRL's PRM trainer learns",
    (
        "chosen_ids",
        "rejected_ids",
    ): "preferences that are tokens already, from which TRL's RewardTrainer learns",
    (
        "chosen_input_ids",
        "rejected_input_ids",
    ): "preferences that are tokens already, by names that TRL gives up",
    ("prompt_ids", "completion_ids"): f"prompts apart from their completions, as tokens {_JOIN}",
    ("prompt_input_ids", "completion_input_ids"): f"prompts apart from their completions, as tokens {_JOIN}",
    ("segments",): "the segments of axolotl's input_output, each with a label of its own",
    ("contents",): "the contents of Google's format",
}
"""Kinds of data that are not read, by their columns."""

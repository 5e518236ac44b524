"""Write the table of memory knobs into ``docs/memory_ladder.md``, from the knobs' own descriptions.

    python scripts/knob_table.py

Run it when a knob has changed; a test compares page and knobs. ``lowmem-ft recipes NAME`` prints the same words by key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import marked_table
from command_line import rewrite_page

from lowmem_ft.foundation.knob import ENGINES, Effect
from lowmem_ft.recipe.reading.keys import RecipeKey, recipe_keys

PAGE = Path(__file__).parents[1] / "docs" / "memory_ladder.md"
HEADER = "| knob | frees | costs | paid with; the numbers; only with |\n|---|---|---|---|\n"


def with_table(page: str) -> str:
    """Return a page with the current table between its marks."""
    rows = "".join(_row(key) for key in recipe_keys().values() if key.effects is not None)
    return marked_table.with_table(page, "knob_table.py", HEADER + rows)


def _row(key: RecipeKey) -> str:
    return f"| `{key.path}` | {key.frees or ''} | {key.costs or ''} | {'. '.join(_by_value(key))} |\n"


def _by_value(key: RecipeKey) -> Iterator[str]:
    """Yield the effects of the values, each once with all the values that have it."""
    if isinstance(key.effects, Effect):
        yield _words(key.effects)
        return
    values: dict[Effect, list[str]] = defaultdict(list)
    for value, effect in (key.effects or {}).items():
        values[effect].append(f"`{str(value).lower()}`")
    for effect, alike in values.items():
        yield f"{', '.join(alike)}: {_words(effect)}"


def _processes(effect: Effect) -> list[str]:
    if not effect.engines:
        return ["one process"]
    return [] if effect.engines == ENGINES else [f"one process, or {' or '.join(effect.engines)}"]


def _words(effect: Effect) -> str:
    needs = _processes(effect)
    if effect.needs_checkpointed != "no layer":
        needs.append(f"{effect.needs_checkpointed} checkpointed")
    if effect.consent:
        needs.append(f"in plans by `plan.allow=[{effect.consent}]`")
    return "; ".join([effect.cost, effect.fidelity, *needs])


if __name__ == "__main__":
    rewrite_page(__doc__, PAGE, with_table)

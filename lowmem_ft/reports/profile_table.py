"""The profile of a run's steps: its tables, and what to change first."""

from __future__ import annotations

from lowmem_ft.monitoring.profiling.step_profile import Section, StepProfile
from lowmem_ft.reports.text.document import Document, Pairs, Table


def profile_report(profile: StepProfile, run: str) -> Document:
    """Return a run's profile as a document.

    Args:
        profile: the profile.
        run: name of the run.
    """
    advice = Pairs([(f"{number}.", text) for number, text in enumerate(profile.advice, start=1)])
    return Document(
        *(Document(_table(section), title=section.title, gap=0) for section in profile.sections()),
        Document(advice, title="What to change first", gap=0) if advice else None,
        title=f"{run}: {profile.title}",
    )


def _table(section: Section) -> Table:
    """Return a table whose first column, of words, wraps where it has no room."""
    words = section.headings[0]
    return Table(section.headings, section.rows, left=(words,), wraps=(words, 24))

"""What the lint for English finds, and where."""

from __future__ import annotations

import lint_english


def lines_of(source):
    return sorted(line for line, _ in lint_english.findings(source))


def test_questions_and_rests_of_sentences_begin_no_docstring():
    source = (
        'def f():\n    """Whether it is."""\n\nX = 1\n"""Of a share."""\n\ndef g():\n    """Return it."""\n'
    )
    assert lines_of(source) == [2, 5]


def test_words_are_found_in_docstrings_and_comments():
    source = '"""A page.\n\nIt lies beside another.\n"""\nx = "beside"  # and goes on\n'
    assert lines_of(source) == [3, 5]


def test_words_are_found_in_messages_but_not_in_keys_values_or_schemas():
    source = (
        'raise ValueError(f"{beside} is none of those.")\n'
        "print(\n"
        '    "One "\n'
        '    "card is enough."\n'
        ")\n"
        'row = {"card": 1, "all but": f"{cards} of {num_cards} beside"}\n'
        'operator = "(Tensor weight, Tensor beside) -> Tensor"\n'
    )
    assert lines_of(source) == [1, 3, 6]


def test_the_package_has_none():
    assert not [
        (file, finding)
        for folder in lint_english.FOLDERS
        for file in (lint_english.ROOT / folder).rglob("*.py")
        for finding in lint_english.findings(file.read_text(encoding="utf-8"))
    ]

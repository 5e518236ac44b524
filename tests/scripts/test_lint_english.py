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


def test_percent_follows_its_number():
    source = (
        '"""About 6 % of it, or 6%."""\nlog("%.1f %% of")\nlog(f"at most {share} %")\nlog(f"{x}% of %s %d")\n'
    )
    assert lines_of(source) == [1, 2, 3]


def test_words_are_found_in_pages_but_not_in_their_code_and_addresses():
    page = "# A page\n\nIt goes on.\n\n```\nbeside\n```\n\nA `card` and a\n[link](beside.md); a card.\n"
    assert sorted(line for line, _ in lint_english.findings_in_page(page)) == [3, 10]


def test_package_scripts_and_pages_have_none():
    files = [lint_english.ROOT / name for name in lint_english.FOLDERS]
    assert all(file.exists() for file in files)
    assert [finding for file in files for finding in lint_english.findings_below(file)] == []

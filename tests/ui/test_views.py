"""HTML of answers."""

from __future__ import annotations

import copy
import dataclasses

from lowmem_ft.foundation.units import GIB
from lowmem_ft.planning.estimator.longest_rows import LongestRows
from lowmem_ft.ui import views
from lowmem_ft.ui.desk import Progress

ANSWER = {
    "values": {
        "verdict": "fits",
        "gpu": {"name": "l4"},
        "device": {
            "process_peak_bytes": 10 * GIB,
            "process_low_bytes": 9 * GIB,
            "process_high_bytes": 11 * GIB,
        },
        "host": {"peak_bytes": 2 * GIB},
        "step": {"seconds": 2.0, "tokens_per_second": 1000.0},
        "cost": {"usd_per_million_tokens": 0.5},
    },
    "uses": [["parameters", 6 * GIB], ["activations", 4 * GIB], ["free", 12 * GIB]],
    "verdict": "fits on l4",
    "timeline": {"narrow": "<svg></svg>"},
    "facts": "",
    "engines": "",
    "command": "lowmem-ft estimate 'model=a b'",
}


def test_the_bar_is_as_wide_as_its_uses():
    uses = [("parameters", 3 * GIB), ("activations", GIB), ("missing", 7 * GIB)]
    html = views.estimate_html({**ANSWER, "uses": uses})
    assert "width:75.000%" in html
    assert "width:25.000%" in html
    assert html.count('<i style="width') == 2  # what is missing is in the legend alone
    assert "missing<b>7.00 GiB</b>" in html


def test_the_estimate_says_its_range():
    html = views.estimate_html(ANSWER)
    assert f'data-bytes="{10 * GIB}">10.0 GiB, 9.00 GiB to 11.0 GiB<' in html


def test_two_settings_differ_by_what_they_take():
    other = copy.deepcopy(ANSWER)
    other["values"]["device"]["process_peak_bytes"] = 8 * GIB
    other["uses"] = [["parameters", 6 * GIB], ["gradients", 2 * GIB]]
    other["values"]["step"] = None
    html = views.compared_html(ANSWER, other)
    assert "-2.00 GiB" in html
    assert "+2.00 GiB" in html
    assert ">same<" in html
    assert "model=a b" in html


def test_what_a_browser_gets_is_escaped():
    text = "<script>alert(1)</script>"
    for html in (
        views.problems_html([text]),
        views.progress_html(Progress(doing=text, seconds=1.2)),
        views.copied_html(text),
        views.rows_html({"rows": 1, "tokens": 2, "longest": 2, "warnings": [text]}),
    ):
        assert "<script" not in html
        assert "&lt;script&gt;" in html


def test_a_search_that_ends_before_the_longest_row_does_not_call_its_last_the_longest():
    found = LongestRows(tokens=1024, over_tokens=None, most_tokens=4096, process_bytes=((1024, GIB),))
    html = views.lengths_html({"now": found, "with_one_gib_more": found})
    assert "1,024 tokens fit; no longer ones were tried" in html
    found = dataclasses.replace(found, most_tokens=1024)
    assert "1,024 tokens fit, the longest that the model takes" in views.lengths_html(
        {"now": found, "with_one_gib_more": found}
    )


def test_lengths_say_where_memory_ends():
    found = LongestRows(
        tokens=1024, over_tokens=1088, most_tokens=4096, process_bytes=((1024, GIB), (1088, 2 * GIB))
    )
    html = views.lengths_html({"now": found, "with_one_gib_more": dataclasses.replace(found, tokens=2048)})
    assert "Rows of 1,024 tokens fit; rows of 1,088 were estimated not to" in html
    assert "rows of 2,048 tokens, 1,024 more" in html

"""What a drawing or a page shows, read from its text."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from xml.etree import ElementTree

LETTER, HEIGHT = 0.56, 0.8
"""Width of a letter and height of a line, as shares of the letters' size."""


@dataclass(frozen=True)
class Words:
    text: str
    left: float
    right: float
    top: float
    bottom: float


def elements(svg: str, tag: str) -> list[ElementTree.Element]:
    """Return the elements of a kind, which shows that the document is well-formed."""
    return [one for one in ElementTree.fromstring(svg).iter() if one.tag.rpartition("}")[2] == tag]


def words(svg: str) -> list[Words]:
    """Return each text with about the room that it takes."""
    found = []
    for one in elements(svg, "text"):
        style = one.get("class") or ""
        size = 14 if "title" in style else 12
        x, y, text = float(one.get("x") or 0), float(one.get("y") or 0), one.text or ""
        width = len(text) * LETTER * size
        left = x - (width if "end" in style else width / 2 if "middle" in style else 0)
        found.append(Words(text, left, left + width, y - HEIGHT * size, y))
    return found


def check_readable(svg: str, width: float, *, margin: float = 4) -> None:
    """Check that texts are within the drawing, apart from each other, and at least 11 pixels high where they are 12."""
    shown = words(svg)
    assert shown
    sizes = [float(size) for size in re.findall(r"(?:font|font-size): (\d+)px", svg)]
    assert sizes
    assert min(sizes) >= 11
    for one in shown:
        assert one.left >= -margin, one
        assert one.right <= width + margin, one
    for one, other in itertools.combinations(shown, 2):
        apart = (
            one.right <= other.left
            or other.right <= one.left
            or one.bottom <= other.top
            or other.bottom <= one.top
        )
        assert apart, (one, other)


class Page(HTMLParser):
    """Text and tags of a page; fails if an element is closed that was not open."""

    VOID = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source = text
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def check_loads_nothing(self) -> None:
        """Check that the page is whole, and that nothing in it points anywhere."""
        assert self.open == []
        assert [tag for tag, _ in self.tags].count("h1") == 1
        assert not [attributes for _, attributes in self.tags if {"src", "href"} & attributes.keys()]
        assert not re.search(r"http|url\(|@import|//[a-z]", self.source)

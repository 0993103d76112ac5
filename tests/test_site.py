"""The site of `make site`: it has every page, as GitHub shows it, and asks no other server for anything.

What was built is looked at by `make site` alone, as pages change after it. Links and anchors are checked by
the build itself, which treats a warning as an error.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
BUILT = ROOT / "build" / "site" / "html"
PAGES = ROOT / "build" / "site" / "pages"
# By these a browser fetches more than the page itself.
FETCHED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}


def built() -> list[Path]:
    """All HTML files of the site."""
    if os.environ.get("REQUIRE") != "site":
        pytest.skip("`make site` builds the site, and runs this")
    return sorted(BUILT.rglob("*.html"))


def configuration() -> str:
    """Its text, without the one line that names a function."""
    text = (ROOT / "docs" / "mkdocs.yml").read_text()
    return re.sub(r"!!python/object/apply:\S+", "", text)


def navigation(part: object) -> Iterator[str]:
    """The files of the navigation, or of a part of it."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict):
        for each in part.values():
            yield from navigation(each)
    elif isinstance(part, list):
        for each in part:
            yield from navigation(each)


class Shape(HTMLParser):
    """What a page has of lists, tables, headings and code, and what is fetched for it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.fetched: list[str] = []
        self._depth = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Count it."""
        self._depth += tag in ("ul", "ol")
        if tag == "li":
            self.found[f"item of depth {self._depth}"] += 1
        elif tag in ("pre", "tr", "h2", "h3"):
            self.found[tag] += 1
        self.fetched += [value or "" for name, value in attributes if (tag, name) in FETCHED]

    def handle_endtag(self, tag: str) -> None:
        """Count it."""
        self._depth -= tag in ("ul", "ol")


def test_each_page_has_a_place_in_the_navigation() -> None:
    """Decisions have their index instead."""
    told = msgspec.yaml.decode(configuration())
    named = list(navigation(told["nav"]))
    pages = {file.relative_to(ROOT).as_posix() for file in (ROOT / "docs").rglob("*.md")}
    pages = {page for page in pages if not re.match(r"docs/decisions/0\d+-", page)}

    assert set() == pages - set(named)
    assert [] == [page for page in named if not (ROOT / page).is_file()]
    assert len(named) == len(set(named))
    assert ["Start", "Use", "Operate", "Understand", "Decisions"] == [
        next(iter(each)) for each in told["nav"]
    ]


def test_pages_are_fetched_from_their_own_server_alone() -> None:
    """No fonts, scripts, styles or pictures of another host, and nothing for which a script fetches more."""
    assert len(built()) > 60
    for file in built():
        html = file.read_text()
        assert [] == [url for url in Shape(html).fetched if re.match(r"(https?:)?//", url)], file
        # A diagram would fetch its library, a repository its number of stars.
        assert not re.search(r'class="[^"]*\bmermaid\b|data-md-component="source"', html), file
    for file in BUILT.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", file.read_text()), file


def test_pages_have_the_lists_tables_and_code_of_their_markdown() -> None:
    """The site's Markdown is another than GitHub's (CommonMark): a list could be lost in a paragraph."""
    built()
    markdown = MarkdownIt("commonmark").enable("table")
    compared = 0
    for file in sorted(PAGES.rglob("*.md")):
        page = file.relative_to(PAGES)
        folder = page.parent if page.name == "README.md" else page.with_suffix("")
        html = (BUILT / folder / "index.html").read_text()
        article = html[html.index("<article") : html.index("</article")]
        assert Shape(markdown.render((ROOT / page).read_text())).found == Shape(article).found, page
        compared += 1
    assert compared > 60

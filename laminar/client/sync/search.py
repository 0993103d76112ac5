"""A search without a loop: the twin of `laminar.client.search`."""

from __future__ import annotations

from collections.abc import Iterator

from laminar.client import search as aio_search
from laminar.client.search import FoundRecord, NotSearched
from laminar.client.sync.portal import Portal


class Search:
    """A search under way: ``for record in search`` yields the records; attributes tell the progress."""

    def __init__(self, portal: Portal, search: aio_search.Search) -> None:
        self._portal = portal
        self._twin = search
        self._page: list[FoundRecord] = []

    def __iter__(self) -> Iterator[FoundRecord]:
        return self

    def __next__(self) -> FoundRecord:
        while not self._page:
            if self.is_done:
                raise StopIteration
            self._page = self.next_page()[::-1]
        return self._page.pop()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left: all was looked at, or `limit` records were found."""
        return self._twin.is_done

    @property
    def searched_records(self) -> int:
        """Number of records searched so far."""
        return self._twin.searched_records

    @property
    def searched_bytes(self) -> int:
        """Number of bytes read for the search so far."""
        return self._twin.searched_bytes

    @property
    def left_records(self) -> int:
        """Number of records not searched yet, in the partitions of which it is known."""
        return self._twin.left_records

    @property
    def left_partitions(self) -> int:
        """Number of partitions that have, or may have, records not searched yet."""
        return self._twin.left_partitions

    @property
    def not_searched(self) -> list[NotSearched]:
        """Ranges that could not be searched, and why."""
        return self._twin.not_searched

    # generated from laminar.client.search.Search

    def next_page(self) -> list[FoundRecord]:
        """Request the next step of the search; return the records found, often none. [] once `is_done`.

        Raises:
            Unavailable: nothing could be searched within the deadline, because no replica of the remaining
                partitions answers. Call again to continue.
        """
        return self._portal.run(lambda: self._twin.next_page())

"""Who holds which page of one kind (open or sealed), and which unheld pages still carry a known prefix.

    held         reference count > 0: some sequence reads it
    cached       nobody holds it, but its content is known by a key and can be had again
    blank        nobody holds it and its content is worth nothing

Blank pages are handed out first, then the cached page that was let go longest ago.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable


class PagePool:
    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._blank = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._references: Counter[int] = Counter()
        self._page_of_key: dict[bytes, int] = {}
        self._key_of_page: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be handed out, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def allocate(self) -> int:
        """A page of unknown content, held once. IndexError when none is free: ask `num_free` first."""
        if self._blank:
            page = self._blank.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            del self._page_of_key[self._key_of_page.pop(page)]
        else:
            raise IndexError("page pool is empty")
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """Hold a page once more; a cached page becomes held again."""
        self._cached.pop(page, None)
        self._references[page] += 1

    def release(self, page: int) -> None:
        """Let go once; the last holder leaves the page cached if its content is known, blank otherwise."""
        self._references[page] -= 1
        if self._references[page]:
            return
        del self._references[page]
        if page in self._key_of_page:
            self._cached[page] = None
        else:
            self._blank.append(page)

    def register(self, page: int, key: bytes) -> None:
        """The held page now carries the content known by `key`. The first page of a key keeps it."""
        if key not in self._page_of_key and page not in self._key_of_page:
            self._page_of_key[key] = page
            self._key_of_page[page] = key

    def find(self, key: bytes) -> int | None:
        return self._page_of_key.get(key)

    def is_cached(self, page: int) -> bool:
        """True when the page is counted in `num_free` and `share` would take it from there."""
        return page in self._cached

    def check_integrity(self, holders: Iterable[int]) -> None:
        """AssertionError unless pages are held exactly by `holders` (a page for each hold) and none is lost."""
        assert Counter(holders) == self._references, "reference counts differ from the sequences' pages"
        everywhere = sorted([*self._blank, *self._cached, *self._references])
        assert everywhere == list(range(self.num_pages)), "a page is lost or in two places"
        assert {page: key for key, page in self._page_of_key.items()} == self._key_of_page, "keys and pages disagree"
        assert all(page in self._key_of_page for page in self._cached), "a cached page has no key"

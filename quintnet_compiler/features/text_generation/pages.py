"""Who has which pages of a cache. Every rank counts alike: nothing is exchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .ops import NOTHING

Prefix = tuple[int, tuple[int, ...]]  # the page before (NOTHING: none), and the tokens of a whole page


@dataclass
class Pool:
    """Pages of ``page`` tokens, which texts take when they need them and give back when they end. A page that is full
    of a prompt's tokens may belong to several texts: those that have the same tokens up to its end.

    ``count``: pages that there have ever been, with the one that no text has. ``written``: those whose tokens are in
    the cache, or will be by the call that is being made.
    """

    page: int
    count: int = NOTHING + 1
    free: list[int] = field(default_factory=list)
    users: Counter[int] = field(default_factory=Counter)
    prefixes: dict[Prefix, int] = field(default_factory=dict)
    named: dict[int, Prefix] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)

    @property
    def used(self) -> int:
        """Pages that texts have now."""
        return len(self.users)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def known(self, prompt: Sequence[int]) -> list[int]:
        """Return the existing pages of the beginning of a prompt; its last token is never among them: it is needed."""
        pages: list[int] = []
        for prefix in self._prefixes(prompt[:-1], pages):
            if prefix not in self.prefixes:
                break
            pages.append(self.prefixes[prefix])
        return pages

    def enter(self, prompt: Sequence[int]) -> tuple[list[int], int]:
        """The pages of a new text, and how many of its tokens are in those that other texts have, too."""
        pages = self.known(prompt)
        shared = len(pages)
        self.users.update(pages)
        while len(pages) < self.pages_for(len(prompt)):
            pages.append(self.take())
        for index, prefix in enumerate(self._prefixes(prompt, pages)):
            if index >= shared and prefix not in self.prefixes:
                self.prefixes[prefix], self.named[pages[index]] = pages[index], prefix
        return pages, shared * self.page

    def take(self) -> int:
        """A page that nobody else has."""
        if not self.free:
            self.free.append(self.count)
            self.count += 1
        page = self.free.pop()
        self.users[page] = 1
        return page

    def leave(self, pages: Sequence[int]) -> None:
        """A text has ended, or is forgotten."""
        for page in pages:
            self.users[page] -= 1
            if not self.users[page]:
                del self.users[page]
                self.free.append(page)
                self.written.discard(page)
                if page in self.named:
                    del self.prefixes[self.named.pop(page)]

    def _prefixes(self, prompt: Sequence[int], pages: Sequence[int]) -> Iterator[Prefix]:
        """Yield the prefix of each page that the prompt fills; ``pages`` has the earlier ones by then."""
        for index in range(len(prompt) // self.page):
            previous = pages[index - 1] if index else NOTHING
            yield previous, tuple(prompt[index * self.page : (index + 1) * self.page])

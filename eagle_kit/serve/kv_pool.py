"""Pages and who owns them."""

from eagle_kit.core.errors import UserError


class PagePool:
    """Hands out page numbers 0..num_pages-1. Owned by the engine; the tensors lie elsewhere."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.page_size)

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether :meth:`allocate` would succeed."""
        return self.pages_for(num_tokens) <= self.num_free

    def allocate(self, owner: int, num_tokens: int) -> list[int]:
        """Give ``owner`` pages for ``num_tokens`` tokens, lowest numbers first. Raises UserError when too few
        are free."""
        count = self.pages_for(num_tokens)
        if count > self.num_free:
            raise UserError(
                f"A request needs {count} pages of {self.page_size} tokens, and {self.num_free} are free.",
                "Lower max_tokens or the batch size, or raise max_context.",
            )
        assert owner not in self._owned, f"request {owner} already owns pages"
        pages = [self._free.pop() for _ in range(count)]
        self._owned[owner] = pages
        return pages

    def free(self, owner: int) -> None:
        """Take back every page of ``owner``."""
        self._free.extend(self._owned.pop(owner))
        self._free.sort(reverse=True)

    def check(self) -> None:
        """Assert that free and owned pages are together all pages, each once."""
        everything = sorted(self._free + [page for pages in self._owned.values() for page in pages])
        assert everything == list(range(self.num_pages)), "the page pool lost or duplicated a page"

"""The memory of keys and values: pages of so many positions, which sequences share.

Each attention layer has a store of rows, one for each position of each page; a page has the same number in
all of them. A sequence has a list of pages, in the order of its positions. It writes only into pages that it
has taken itself: the first positions of a sequence may be pages of others (`Checkpoint.restore`), which
are then read by both.

The stores double while they are small. From `STEP_TOKENS` on they grow by that many rows at a time, so that
they never take more than one step beyond what is needed; what that costs in copies is less than what a step
computes. They shrink when nobody needs their last pages (`trim`).
"""

import heapq
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from gpu_worker.state.kv_rows import decoded, empty_rows, encoded
from shared.kv_format import EXACT, KvFormat
from shared.model_config import Qwen4ExpConfig
from shared.placement.memory_plan import KV_GROW_STEP
from shared.placement.sizes import context_bytes, rounded_up, state_bytes

PAGE_TOKENS = 64
"""Positions of a page, roughly: a multiple of the lengths of the indexer's blocks."""
_FIRST_TOKENS = 256
STEP_TOKENS = KV_GROW_STEP


class Page:
    """One page. It goes back to its pool when nobody has it any more."""

    __slots__ = ("_pool", "number")

    def __init__(self, pool: "PagePool", number: int) -> None:
        self._pool = pool
        self.number = number

    def __del__(self) -> None:
        self._pool.take_back(self.number)


class LayerStore:
    """The rows of one attention layer: `keys` and `values`, after norm and rotation, in the rows of a format
    (`kv_rows.empty_rows`); `block_keys` float32 [rows / ratio, indexer dim], the finished keys of complete
    blocks, where the layer has an indexer."""

    def __init__(
        self, config: Qwen4ExpConfig, ratio: int, torch_device: torch.device, kv_format: KvFormat
    ) -> None:
        heads, self._dim = config.num_kv_heads, config.head_dim
        self.ratio = ratio
        self.format = kv_format
        self.keys = empty_rows(0, heads, self._dim, kv_format.keys, torch_device)
        self.values = empty_rows(0, heads, self._dim, kv_format.values, torch_device)
        self.block_keys = torch.empty(0, config.indexer.head_dim, device=torch_device)

    def put(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keeps keys and values [n, kv heads, head dim] in these rows, int64 [n]."""
        self.keys[rows] = encoded(keys, self.format.keys)
        self.values[rows] = encoded(values, self.format.values)

    def keys_of(self, rows: Tensor) -> Tensor:
        """The keys of rows int64 [n]: float32 [n, kv heads, head dim]."""
        return decoded(self.keys[rows], self.format.keys, self._dim)

    def values_of(self, rows: Tensor) -> Tensor:
        """Likewise the values."""
        return decoded(self.values[rows], self.format.values, self._dim)

    def resize(self, num_rows: int) -> None:
        """Gives it so many rows; those of lower numbers keep what they hold."""
        self.keys = _resized(self.keys, num_rows)
        self.values = _resized(self.values, num_rows)
        if self.ratio:
            self.block_keys = _resized(self.block_keys, num_rows // self.ratio)

    def rows_of(self, rows: Tensor) -> list[tuple[str, Tensor, Tensor]]:
        """What is kept of consecutive positions from the first on, whose rows int64 [n] these are: by name,
        in which tensor, and which rows of it."""
        kept = [("keys", self.keys, rows), ("values", self.values, rows)]
        if self.ratio:
            blocks = rows[: len(rows) // self.ratio * self.ratio : self.ratio] // self.ratio
            kept.append(("block keys", self.block_keys, blocks))
        return kept

    def copy_rows(self, source: int, target: int, count: int) -> None:
        """Copies rows, with the keys of their blocks; `source` and `target` are the first of a page."""
        for rows in (self.keys, self.values):
            rows[target : target + count] = rows[source : source + count]
        if self.ratio:
            first, to, blocks = source // self.ratio, target // self.ratio, count // self.ratio
            self.block_keys[to : to + blocks] = self.block_keys[first : first + blocks]


class PagePool:
    """The pages of all sequences of a model."""

    def __init__(
        self, config: Qwen4ExpConfig, torch_device: torch.device, kv_format: KvFormat = EXACT
    ) -> None:
        self.page_tokens = page_tokens(config)
        self.torch_device = torch_device
        self.stores = {
            layer: LayerStore(config, config.compress_ratios[layer], torch_device, kv_format)
            for layer, is_recurrent in enumerate(config.is_recurrent)
            if not is_recurrent
        }
        self.page_bytes = context_bytes(config, self.page_tokens, kv_format)
        """Memory of one page, of all layers."""
        self.state_bytes = state_bytes(config)
        """What a sequence keeps beside its pages."""
        self._capacity = 0
        # Lowest numbers first, so that the last pages become free.
        self._free: list[int] = []

    @property
    def num_pages(self) -> int:
        """Pages that somebody has."""
        return self._capacity - len(self._free)

    @property
    def num_bytes(self) -> int:
        """Memory of the stores."""
        return self._capacity * self.page_bytes

    def bytes_with(self, num_more: int) -> int:
        """Memory of the stores once so many more pages have been taken."""
        needed = self.num_pages + num_more
        return max(self._capacity, self._capacity_for(needed)) * self.page_bytes

    def take(self, count: int) -> list[Page]:
        """So many pages that nobody has. What they hold is undefined."""
        if count > len(self._free):
            self._resize(self._capacity_for(self.num_pages + count))
        return [Page(self, heapq.heappop(self._free)) for _ in range(count)]

    def page_rows(self, pages: Iterable[Page]) -> Tensor:
        """The rows of all positions of pages, one page after the other: int64 [pages * page_tokens]."""
        numbers = torch.tensor([page.number for page in pages], dtype=torch.int64, device=self.torch_device)
        offsets = torch.arange(self.page_tokens, device=self.torch_device)
        return (numbers[:, None] * self.page_tokens + offsets).flatten()

    def take_back(self, number: int) -> None:
        """A page is not used any more."""
        heapq.heappush(self._free, number)

    def copy(self, source: Page, target: Page, num_tokens: int) -> None:
        """Copies the first tokens of a page."""
        for store in self.stores.values():
            store.copy_rows(source.number * self.page_tokens, target.number * self.page_tokens, num_tokens)

    def trim(self) -> None:
        """Gives memory back that only free pages take, as far as they are the last ones."""
        free = set(self._free)
        used = self._capacity
        while used and used - 1 in free:
            used -= 1
        capacity = self._capacity_for(used)
        if capacity < self._capacity:
            self._free = [number for number in self._free if number < capacity]
            heapq.heapify(self._free)
            self._set_capacity(capacity)

    def _resize(self, capacity: int) -> None:
        for number in range(self._capacity, capacity):
            heapq.heappush(self._free, number)
        self._set_capacity(capacity)

    def _set_capacity(self, capacity: int) -> None:
        for store in self.stores.values():
            store.resize(capacity * self.page_tokens)
        self._capacity = capacity

    def _capacity_for(self, num_pages: int) -> int:
        return _pages_grown_for(num_pages, self.page_tokens)


def page_tokens(config: Qwen4ExpConfig) -> int:
    """Positions of a page: blocks of the indexers never lie in two."""
    multiple = math.lcm(*(ratio for ratio in config.compress_ratios if ratio))
    return rounded_up(PAGE_TOKENS, multiple)


def storage_bytes(config: Qwen4ExpConfig, num_tokens: int, kv_format: KvFormat) -> int:
    """What the stores have grown to when sequences have so many positions in all."""
    of_page = page_tokens(config)
    pages = -(-num_tokens // of_page)
    return _pages_grown_for(pages, of_page) * context_bytes(config, of_page, kv_format)


def _pages_grown_for(num_needed: int, of_page: int) -> int:
    """Pages of stores that have grown to hold so many, each of `of_page` positions."""
    return -(-capacity_of(num_needed * of_page) // of_page)


def capacity_of(num_tokens: int) -> int:
    """The positions of stores that have grown to hold so many."""
    if num_tokens == 0:
        return 0
    if num_tokens > STEP_TOKENS:
        return rounded_up(num_tokens, STEP_TOKENS)
    capacity = _FIRST_TOKENS
    while capacity < num_tokens:
        capacity *= 2
    return capacity


def _resized(rows: Tensor, num_rows: int) -> Tensor:
    resized = torch.empty((num_rows, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    kept = min(num_rows, len(rows))
    resized[:kept] = rows[:kept]
    return resized

"""How much memory operations would take, found out without taking any: on torch's device `meta`."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MetaMemory(TorchDispatchMode):
    """While it is entered, counts the bytes of tensors that are made on `meta`, until they are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = 0
        self.peak_bytes = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Called by torch for each operation."""
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta":
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        # Tensors that share memory have storages of the same address, though not the same object.
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self.now_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)
            weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now_bytes -= num_bytes

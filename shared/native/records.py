"""Records of parameters: numpy structured arrays in Python, values with named fields in compiled code."""

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
from numpy.typing import NDArray

from shared.native.memory import native
from shared.native.task import address_of

Record = NDArray[np.void]
"""A structured array, of one element unless said otherwise."""
RecordType = np.dtype[np.void]


def fields(*names: str, **others: type[np.generic]) -> RecordType:
    """A record's type: int64 fields of these names (addresses of arrays, counts), then those of other types,
    each on its natural place."""
    return np.dtype([(name, np.int64) for name in names] + list(others.items()), align=True)


def reader(dtype: RecordType) -> Callable[[int], Any]:
    """A function, for compiled code only, that makes of an address the record there: `record.field` reads,
    an assignment writes.

    It has to be kept in a global of its module, like everything in `shared.native.memory`. Fields are read
    anew after every store into memory: loops that shall be vectorised take what they need before they begin.
    """
    untyped: Any = numba
    kind = untyped.from_dtype(dtype)

    def convert(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return kind(untyped.types.int64), generate

    return cast("Callable[[int], Any]", native(convert))


def record(dtype: RecordType, **values: object) -> Record:
    """A record with these values; of arrays it has the addresses, so whoever keeps it must keep them."""
    made = np.zeros(1, dtype)
    for name, value in values.items():
        made[name] = address_of(value) if isinstance(value, np.ndarray) else value
    return made

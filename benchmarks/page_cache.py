"""Models in memory before anything is measured."""

from benchmarks.report import Report, memory_bytes
from shared.gguf.model import GGUFModel

_READ_BYTES = 16 << 20


def warm_page_cache(model: GGUFModel, report: Report) -> None:
    """Reads the whole file, and says so where it cannot stay in memory."""
    num_bytes = model.num_bytes
    room = memory_bytes("MemAvailable")
    if num_bytes > room:
        report.note(
            f"the model has {num_bytes / 1e9:.1f} GB and does not fit into the {room / 1e9:.1f} GB of memory "
            "that are available: what follows measures the disk too"
        )
        return
    buffer = bytearray(_READ_BYTES)
    for part in model.parts:
        with part.path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                continue

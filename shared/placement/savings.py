"""Settings that free memory, how much, how many more slots that makes, and what they cost otherwise."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shared.config import GpuWorkerConfig
from shared.kv_format import KV_FORMATS, kv_format
from shared.placement.memory_plan import KV_GROW_FIRST

_SMALLEST_CONTEXT, _SMALLEST_CHUNK = 1024, 256


@dataclass(frozen=True, slots=True)
class Saving:
    """A setting that frees so many bytes of the device's memory or RAM, and makes so many more slots;
    `price` says in words what is worse with it."""

    setting: str
    memory: str
    num_bytes: int
    num_slots: int
    price: str


@dataclass(frozen=True, slots=True)
class Change:
    """A setting of the gpu_worker that makes it need less of the device's memory."""

    setting: str
    price: str
    changed: GpuWorkerConfig


def smaller_settings(settings: GpuWorkerConfig, max_context: int) -> Iterator[Change]:
    """Each way by itself; `max_context` is that of the settings and the model."""
    half = max_context // 2
    if half >= _SMALLEST_CONTEXT:
        yield Change(f"--max-context {half}", "shorter context", replace(settings, max_context=half))
    if not settings.kv_grow and max_context > KV_GROW_FIRST:
        price = "fewer slots while a context is long"
        yield Change("--kv-grow", price, replace(settings, kv_grow=True))
    if _keeps_more_than_int8(settings):
        yield Change("--kv-type int8", "outputs change a little", replace(settings, kv_type="int8"))
    if settings.parallel > 1:
        yield Change("--parallel 1", "one request at a time", replace(settings, parallel=1))
    if settings.vram_reserve_mib > 1:
        reserve = settings.vram_reserve_mib // 2
        price = "less for other programs"
        yield Change(f"--vram-reserve-mib {reserve}", price, replace(settings, vram_reserve_mib=reserve))


def smallest_settings(settings: GpuWorkerConfig, max_context: int) -> GpuWorkerConfig:
    """All of these ways together."""
    half = max_context // 2
    return replace(
        settings,
        max_context=half if half >= _SMALLEST_CONTEXT else max_context,
        kv_grow=settings.kv_grow or max_context > KV_GROW_FIRST,
        kv_type="int8" if _keeps_more_than_int8(settings) else settings.kv_type,
        parallel=1,
        vram_reserve_mib=settings.vram_reserve_mib // 2
        if settings.vram_reserve_mib > 1
        else settings.vram_reserve_mib,
    )


def _keeps_more_than_int8(settings: GpuWorkerConfig) -> bool:
    """Of each value of the keys."""
    return kv_format(settings.kv_type).keys.bits > KV_FORMATS["int8"].keys.bits


def smaller_chunk(chunk: int) -> int:
    """Half of it, as far as chunks go down."""
    return max(_SMALLEST_CHUNK, chunk // 2)

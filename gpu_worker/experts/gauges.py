"""What the gpu_worker says of its experts in heartbeats: how they are placed at the moment."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGauges:
    """All 0 where no expert is on a device. Names that end in `_total` only grow, and begin anew when the
    process or its cache does; the gateway exports them as counters."""

    expert_cache_slots: int = 0
    """Slots of the expert cache, each for one expert."""
    expert_cache_resident: int = 0
    """Those that have an expert which is computed from them."""
    expert_cache_lent: int = 0
    """Those whose memory is lent to a prompt, or given to keys and values."""
    expert_cache_coverage: float = 0.0
    """Resident experts, of all experts of all layers: 0 to 1."""
    expert_swaps_total: int = 0
    """Experts that have come in exchange for others."""
    expert_swapped_bytes_total: int = 0
    """Bytes that were copied to the device for that."""
    expert_cache_loaded_bytes_total: int = 0
    """The same for all that has come into slots, fills at the start among it."""
    expert_cache_failures_total: int = 0
    """Loads of slots that have failed: blobs that could not be read or copied."""
    pcie_frac: float = 0.0
    """Share of missed experts that is transferred now: 0 to 1."""
    pcie_frac_updates_total: int = 0
    """How often measured rates have changed it."""
    tail_skip_active: int = 0
    """1 while missed experts of low rank are left out (`--route-tail-skip`)."""

    def as_heartbeat(self) -> dict[str, float]:
        """As a heartbeat has it."""
        return {name: float(value) for name, value in asdict(self).items()}

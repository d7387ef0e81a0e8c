"""The rings that a gpu_worker makes for its peers: which ones, and that none is left behind."""

from pathlib import Path
from typing import Any

import pytest

from gpu_worker.engine import AttachRing, DetachRing
from gpu_worker.peers import PeerListener
from shared.errors import WorkerFailedError
from shared.gguf.model import GGUFModel
from shared.link import Peer
from shared.messages import Init
from shared.model_config import Qwen4ExpConfig, read_model_config
from shared.run_directory import Role, new_incarnation
from shared.work_slots import RingTokens
from tests.support.tiny_model import tiny_model

NUM_PLACES, PLACE_BYTES = 3, 8192


class Commands(list[Any]):
    """What the engine is told."""

    submit = list.append


class Played:
    """A listener, what the engine was told, and the segments there are."""

    def __init__(self, config: Qwen4ExpConfig, staging_places: int, place_bytes: int = PLACE_BYTES) -> None:
        self.commands: Any = Commands()
        self._incarnation = new_incarnation()
        self.listener = PeerListener(
            config,
            RingTokens(4, 4),
            self._incarnation,
            self.commands,
            lambda: None,
            staging_places,
            place_bytes,
        )

    @property
    def num_segments(self) -> int:
        return len(list(Path("/dev/shm").glob(f"strata-*{self._incarnation}")))


@pytest.fixture(params=[True, False], ids=["n-grams", "no n-grams"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Qwen4ExpConfig:
    model = tiny_model()
    if not request.param:
        model.drop_ngrams()
    with GGUFModel(model.write(tmp_path / "tiny.gguf")) as file:
        return read_model_config(file)


@pytest.mark.parametrize("staging_places", [0, NUM_PLACES])
def test_rings_of_a_stager(config: Qwen4ExpConfig, staging_places: int) -> None:
    """One for n-grams where the model has them, one for staging places where there are any. Whoever loses a
    stager loses both; the engine closes what it was given."""
    played, peer = Played(config, staging_places), Peer(Role.STAGER)
    expected = (config.ngram is not None) + (staging_places > 0)
    for _ in range(2):
        # One that is gone before it serves anything leaves nothing.
        init = played.listener.greet(Role.STAGER)
        assert isinstance(init, Init)
        assert (init.segment is not None, init.ring_tokens) == (
            (True, 4) if config.ngram is not None else (False, 0)
        )
        assert (init.staging_segment is not None, init.staging_places) == (staging_places > 0, staging_places)
        assert played.num_segments == expected
        played.listener.peer_lost(peer, "it died")
        assert played.num_segments == 0
        assert played.commands == []
    played.listener.greet(Role.STAGER)
    played.listener.peer_ready(peer)
    assert played.listener.missing == [Role.CPU_WORKER]
    played.listener.peer_lost(peer, "it died")
    if not expected:
        assert played.commands == []
        return
    attached, detached = played.commands
    assert isinstance(attached, AttachRing)
    assert isinstance(detached, DetachRing)
    rings = [ring for ring in (attached.ring, attached.staging) if ring is not None]
    assert len(rings) == expected
    for ring in rings:
        with pytest.raises(WorkerFailedError, match="the stager is lost: it died"):
            ring.check()
        ring.close()
    assert played.num_segments == 0


def test_a_cpu_worker_has_no_staging(config: Qwen4ExpConfig) -> None:
    played = Played(config, NUM_PLACES)
    init = played.listener.greet(Role.CPU_WORKER)
    assert init is not None
    assert init.staging_segment is None
    assert played.num_segments == 1
    played.listener.close()
    assert played.num_segments == 0


def test_no_room_for_staging(config: Qwen4ExpConfig, caplog: pytest.LogCaptureFixture) -> None:
    """The stager is asked to come again, with nothing made for it."""
    played = Played(config, NUM_PLACES, 1 << 50)
    assert played.listener.greet(Role.STAGER) is None
    assert played.num_segments == 0
    assert "no room for" in caplog.text or "shared memory cannot be made" in caplog.text

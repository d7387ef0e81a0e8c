"""A stager that serves two rings of a gpu_worker, whose part is played here: with and without n-grams, with a
cpu_worker and without one, until it is killed."""

import asyncio
import os
import queue
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.engine import AttachRing, DetachRing
from gpu_worker.experts.staging import Staging
from gpu_worker.peers import PeerListener
from shared.demo_model import DEMO_MODEL_PATH
from shared.errors import WorkerFailedError
from shared.expert_blobs import BlobLayout, expert_tensor
from shared.gguf.model import GGUFModel
from shared.link import Identity, LinkServer
from shared.model_config import Qwen4ExpConfig, read_model_config
from shared.ring import RingClient
from shared.run_directory import Role, RunDirectory
from shared.work_slots import PARTS, RingTokens
from tests.support.expert_ring import cpu_way
from tests.support.link_sides import QUICK, living, running
from tests.support.stack import START_TIMEOUT_S, Stack, stack_files
from tests.support.tiny_model import tiny_model

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

NUM_PLACES = 6
INCARNATION = "57a61463"


class Commands:
    """What the engine would be told."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def submit(self, command: object) -> None:
        self._commands.put(command)

    async def next(self) -> Any:
        return await asyncio.to_thread(self._commands.get, timeout=START_TIMEOUT_S)


@pytest.fixture
def unstarted() -> Iterator[Stack]:
    with stack_files() as stack:
        yield stack


@asynccontextmanager
async def played(stack: Stack, file: GGUFModel, config: Qwen4ExpConfig) -> AsyncIterator[Commands]:
    """A gpu_worker's side of its links."""
    directory, commands = RunDirectory(stack.run_dir), Commands()
    place_bytes = BlobLayout(file, config.num_layers).largest_place_bytes
    engine: Any = commands
    peers = PeerListener(config, RingTokens(8, 8), INCARNATION, engine, lambda: None, NUM_PLACES, place_bytes)
    identity = Identity(Role.GPU_WORKER, INCARNATION, file.fingerprint(), os.getpid())
    link = LinkServer(identity, directory, [Role.CPU_WORKER, Role.STAGER], peers, QUICK)
    with living(directory, Role.GPU_WORKER, INCARNATION):
        async with running(link):
            yield commands
    peers.close()


def segments() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"strata-*{INCARNATION}")]


def bring(staging: Staging, file: GGUFModel, layer: int, experts: list[int]) -> list[list[int]]:
    """Brings experts, looks at their bytes, gives their places back; returns the reads of each."""
    places, num_reads = staging.request(layer, experts), []
    assert len(places) == len(experts)
    staging.wait(places)
    for place, expert in zip(places, experts, strict=True):
        assert staging.state(place) == 1
        rows = [each.tobytes() for each in staging.parts(place, layer, expert)]
        assert rows == [file.rows(expert_tensor(layer, part))[expert].tobytes() for part in PARTS]
        num_reads.append(staging.reads(place)[0])
        staging.free(place)
    return num_reads


def staging_of(ring: RingClient | None, file: GGUFModel, config: Qwen4ExpConfig) -> Staging:
    assert ring is not None
    return Staging(ring, BlobLayout(file, config.num_layers), NUM_PLACES, 60)


def run_alone(stack: Stack, path: Path, role: str, *flags: str) -> subprocess.Popen[bytes]:
    return stack.start_alone(role, "--model", str(path), *flags)


async def lose(commands: Commands, process: subprocess.Popen[bytes], wait: Callable[[], None]) -> None:
    """Kills a stager that has something to do; `wait` waits for it."""
    process.send_signal(signal.SIGSTOP)
    waiting = asyncio.create_task(asyncio.to_thread(wait))
    await asyncio.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    detached = await commands.next()
    assert isinstance(detached, DetachRing)
    assert detached.role is Role.STAGER
    with pytest.raises(WorkerFailedError, match="the stager is lost"):
        await waiting


@pytest.mark.parametrize("has_ngrams", [True, False])
def test_mapped_experts(unstarted: Stack, tmp_path: Path, has_ngrams: bool) -> None:
    """Without a cpu_worker, since it is not asked how it keeps experts. A killed stager ends waits for it;
    its successor gets rings of its own; nothing is left of either."""
    model = tiny_model()
    if not has_ngrams:
        model.drop_ngrams()
    path = model.write(tmp_path / "tiny.gguf")

    async def play(file: GGUFModel) -> None:
        config = read_model_config(file)
        async with played(unstarted, file, config) as commands:
            for _ in range(2):
                process = run_alone(unstarted, path, "stager", "--experts", "mapped")
                attached = await commands.next()
                assert isinstance(attached, AttachRing)
                assert attached.role is Role.STAGER
                assert (attached.ring is not None) == has_ngrams
                staging = staging_of(attached.staging, file, config)
                for layer in range(config.num_layers):
                    assert bring(staging, file, layer, [5, 0, 2]) == [[0, 0, 0]] * 3
                assert len(segments()) == 1 + has_ngrams

                def wait(staging: Staging = staging) -> None:
                    staging.wait(staging.request(0, [1]))

                await lose(commands, process, wait)
                for ring in (attached.ring, attached.staging):
                    if ring is not None:
                        ring.close()
                assert segments() == []

    with GGUFModel(path) as file:
        asyncio.run(play(file))


def test_experts_of_a_pool(unstarted: Stack) -> None:
    """What the cpu_worker has computed with is not read again, what it has not is read and counted; and when
    all are told to leave, they do."""
    budget = ("--ram-budget", "0.012")

    async def play(file: GGUFModel) -> None:
        config = read_model_config(file)
        async with played(unstarted, file, config) as commands:
            processes = [
                run_alone(unstarted, DEMO_MODEL_PATH, role, *budget) for role in ("cpu_worker", "stager")
            ]
            rings = {}
            for _ in processes:
                attached = await commands.next()
                assert isinstance(attached, AttachRing)
                rings[attached.role] = attached
            ring = rings[Role.CPU_WORKER].ring
            assert ring is not None
            experts = cpu_way(ring, file, 60)
            used = list(range(config.num_experts_used))
            ids = torch.tensor([used], dtype=torch.int32)
            x, weights = torch.ones((1, config.hidden)), torch.ones((1, len(used)))
            experts.counts.begin([1])
            outputs = experts.collect(experts.submit(1, x, ids, weights))
            assert np.isfinite(outputs.numpy()).all()
            staging = staging_of(rings[Role.STAGER].staging, file, config)
            assert bring(staging, file, 1, [used[0], used[-1], len(used)]) == [[0] * 3, [0] * 3, [1] * 3]
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                assert await asyncio.to_thread(process.wait, START_TIMEOUT_S) == 0
            for each in rings.values():
                for made in (each.ring, each.staging):
                    if made is not None:
                        made.close()
        assert segments() == []

    with GGUFModel(DEMO_MODEL_PATH) as file:
        asyncio.run(play(file))
    assert "Traceback" not in unstarted.log

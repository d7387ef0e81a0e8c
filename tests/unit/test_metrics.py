"""What is measured: names, units, counts, and the gauges of processes that come and go."""

import asyncio
import math
import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway import metrics as module
from gateway.metrics import Metrics
from gpu_worker.experts.gauges import ExpertGauges
from shared.link import PeerState
from shared.messages import ExpertBytes, Heartbeat, RouteCounts
from shared.run_directory import Role
from tests.support.gateway_parts import TIMINGS, InProcess, finished, gateway, reads, staged


def samples(running: InProcess) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    body, content_type = running.services.metrics.exposition()
    assert content_type.startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def gauge(running: InProcess, name: str, **labels: str) -> float | None:
    return samples(running).get((name, frozenset(labels.items())))


@pytest.mark.parametrize("buckets", [module._TTFT_BUCKETS, module._GAP_BUCKETS, module._REQUEST_BUCKETS])
def test_buckets_rise(buckets: tuple[float, ...]) -> None:
    assert list(buckets) == sorted(set(buckets))


async def test_a_process_is_in_one_state() -> None:
    async with gateway() as running:
        peer = running.engine.peers[Role.STAGER]
        for state, beat in (
            ("absent", None),
            ("starting", Heartbeat(state="starting", activity="a", progress=0, gauges={})),
            ("ready", Heartbeat(state="ready", activity="a", progress=1, gauges={"cpu_seconds": 1.5})),
        ):
            peer.heartbeat = beat
            states = {
                dict(labels)["state"]: value
                for (name, labels), value in samples(running).items()
                if name == "strata_process_state" and dict(labels)["process"] == "stager"
            }
            assert [name for name, value in states.items() if value] == [state]
        assert gauge(running, "strata_process_cpu_seconds", process="stager") == 1.5
        assert gauge(running, "strata_process_cpu_seconds", process="gateway") is not None


async def test_a_lost_process_has_no_gauges_but_its_losses() -> None:
    async with gateway() as running:
        running.lose_gpu_worker()
        assert gauge(running, "strata_process_losses", process="gpu_worker") == 1
        assert gauge(running, "strata_process_losses", process="stager") == 0
        assert gauge(running, "strata_heartbeat_age_seconds", process="gpu_worker") is None
        assert running.engine.peers[Role.GPU_WORKER].state is PeerState.ABSENT


async def test_places_and_queue_are_read_at_the_moment_of_the_scrape() -> None:
    async with gateway(parallel=1) as running:
        admission = running.services.admission
        async with admission.enter(), admission.enter():
            assert gauge(running, "strata_num_requests_running", model_name="tiny") == 1
            assert gauge(running, "strata_num_requests_waiting", model_name="tiny") == 1
        assert gauge(running, "strata_num_requests_running", model_name="tiny") == 0


def test_failures_are_counted_by_code() -> None:
    metrics = Metrics("m")
    for code in ("a", "b", "a"):
        metrics.failed(code)
    metrics.ignored_fields(3)
    value = metrics.registry.get_sample_value
    assert value("strata_request_failure_total", {"model_name": "m", "code": "a"}) == 2
    assert value("strata_request_ignored_fields_total", {"model_name": "m"}) == 3


async def test_what_requests_needed_adds_up_by_file_purpose_and_way() -> None:
    timings = msgspec.structs.replace(
        TIMINGS,
        ngram_rows=120,
        ngram_hits=117,
        routes=RouteCounts(device=100, ram=300, transferred=50, skipped=7),
        expert_bytes=ExpertBytes(device=10, ram=20, transferred=30),
        transfer_wait_s=0.5,
        device_wait_s=0.25,
        disk=[reads("part-1", 1, 4096, 0.25)],
        major_faults=2,
    )
    async with gateway() as running:
        assert gauge(running, "strata_expert_routes_total", model_name="tiny", way="disk") == 0
        for _ in range(2):
            running.say(finished("a", timings=timings))
        running.stager_says(staged("a", reads("part-1", 40, 163840)))

        def value(name: str, **labels: str) -> float | None:
            return gauge(running, name, model_name="tiny", **labels)

        step = {"file": "part-1", "purpose": "step"}
        assert value("strata_disk_reads_total", **step) == 2
        assert value("strata_disk_read_bytes_total", **step) == 8192
        assert value("strata_disk_wait_seconds_total", **step) == 0.5
        staging = {"file": "part-1", "purpose": "staging"}
        assert value("strata_disk_reads_total", **staging) == 40
        assert value("strata_disk_read_bytes_total", **staging) == 163840
        assert value("strata_ngram_rows_total") == 240
        assert value("strata_ngram_row_hits_total") == 234
        assert value("strata_request_major_faults_total") == 4
        by_way = {"device": 200, "ram": 600, "disk": 0, "transferred": 100, "skipped": 14}
        for way, count in by_way.items():
            assert value("strata_expert_routes_total", way=way) == count
        for way, count in {"device": 20, "ram": 40, "transferred": 60}.items():
            assert value("strata_expert_bytes_total", way=way) == count
        for way, seconds in {"device": 0.5, "ram": 0.6, "transferred": 1.0}.items():
            assert value("strata_expert_wait_seconds_total", way=way) == seconds


async def test_what_the_gpu_worker_measures_is_exported() -> None:
    """As it names it: what only grows is a counter, also in its type."""
    own = ExpertGauges(expert_cache_slots=8, expert_cache_resident=6, expert_swaps_total=3, pcie_frac=0.35)
    async with gateway() as running:
        peer = running.engine.peers[Role.GPU_WORKER]
        peer.heartbeat = Heartbeat(state="ready", activity="a", progress=1, gauges=own.as_heartbeat())
        for name, value in own.as_heartbeat().items():
            assert gauge(running, f"strata_process_{name}", process="gpu_worker") == value
        body, _ = running.services.metrics.exposition()
        types = dict(re.findall("# TYPE ([a-z_]+) ([a-z]+)", body.decode()))
        assert types["strata_process_expert_swaps_total"] == "counter"
        assert types["strata_process_expert_cache_resident"] == "gauge"
        status = await (await running.client.get("/v1/status")).json()
        assert status["processes"]["gpu_worker"]["gauges"] == own.as_heartbeat()


async def test_stages_have_the_waits_for_experts_of_each_way() -> None:
    timings = msgspec.structs.replace(TIMINGS, expert_wait_s=1.0, transfer_wait_s=2.0, device_wait_s=3.0)
    async with gateway() as running:
        asking = asyncio.ensure_future(running.client.post("/v1/completions", json={"prompt": "a"}))
        running.answer(await running.workers.requests.get(), "x", timings=timings)
        assert (await asking).status == 200
        for stage, seconds in (("expert_wait", 1), ("transfer_wait", 2), ("device_wait", 3)):
            labels = {"model_name": "tiny", "stage": stage}
            assert gauge(running, "strata_stage_seconds_sum", **labels) == seconds


async def test_stages_have_the_waits_for_the_disk() -> None:
    """That of the steps; how long staging took is a stage of its own, since nobody waits for it."""
    timings = msgspec.structs.replace(TIMINGS, disk=[reads("a", 1, 1, 0.25), reads("b", 1, 1, 0.5)])
    async with gateway() as running:
        for is_staged in (True, False):
            asking = asyncio.ensure_future(running.client.post("/v1/completions", json={"prompt": "a"}))
            request = await running.workers.requests.get()
            if is_staged:
                running.stager_says(staged(request.request_id, reads("a", 1, 1, 9)))
            running.answer(request, "x", timings=timings)
            assert (await asking).status == 200

        def stage(name: str) -> tuple[float | None, float | None]:
            labels = {"model_name": "tiny", "stage": name}
            family = "strata_stage_seconds"
            return gauge(running, f"{family}_count", **labels), gauge(running, f"{family}_sum", **labels)

        assert stage("disk_wait") == (2, 1.5)
        assert stage("staging") == (1, 0.25)


@pytest.mark.parametrize("page_name", ["disk.md", "experts-on-the-device.md"])
async def test_pages_name_metrics_that_there_are(page_name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / page_name).read_text(encoding="utf-8")
    named = {name.removesuffix("_bucket") for name in re.findall("strata_[a-z_]+", page)}
    assert len(named) > 5
    gauges = ExpertGauges().as_heartbeat()
    async with gateway() as running:
        peer = running.engine.peers[Role.GPU_WORKER]
        peer.heartbeat = Heartbeat(state="ready", activity="a", progress=1, gauges=gauges)
        body, _ = running.services.metrics.exposition()
    assert named <= set(re.findall("# TYPE ([a-z_]+) ", body.decode()))


async def test_every_name_says_its_unit_and_is_ours() -> None:
    async with gateway() as running:
        body, _ = running.services.metrics.exposition()
        for family in text_string_to_metric_families(body.decode()):
            assert family.name.startswith("strata_")
            assert family.documentation
            for sample in family.samples:
                assert math.isfinite(sample.value)

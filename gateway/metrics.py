"""What the gateway measures, as Prometheus families, with the bucket lists of all of them.

Families that other servers have too take the stems of their names (vLLM's) with our own prefix. What the
workers say of themselves in heartbeats, and of requests in their answers, is exported here too, so that one
scrape sees all processes.
"""

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from gateway.admission import Admission
from gateway.engine_client import EngineClient
from gateway.generation import Generation, Outcome
from shared.messages import REPETITION, Heartbeat
from shared.process import ProcessState

# Seconds. Long tails are kept: reading experts from a disk can be slow.
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_GAP_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
# What should be nothing, up to a disk that answers one read at a time.
_WAIT_BUCKETS = (
    *(1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 20.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Metrics:
    """The registry and everything in it."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, ["model_name", *labels], buckets=buckets, registry=self.registry)

        self._prompt_tokens = counter("strata_prompt_tokens", "Prompt tokens of finished requests")
        self._generation_tokens = counter("strata_generation_tokens", "Generated tokens of finished requests")
        self._finished = counter("strata_request_success", "Finished requests", "finished_reason")
        self._failed = counter("strata_request_failure", "Requests that ended in an error", "code")
        self._ignored_fields = counter(
            "strata_request_ignored_fields", "Unknown body fields that were ignored"
        )
        self._ttft = histogram(
            "strata_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            _TTFT_BUCKETS,
        )
        self._gap = histogram(
            "strata_inter_token_latency_seconds", "Between two tokens of an answer", _GAP_BUCKETS
        )
        self._ngram_wait = histogram(
            "strata_token_ngram_wait_seconds",
            "What the step of a token waited for rows of the n-gram table, but the first token's",
            _WAIT_BUCKETS,
        )
        self._latency = histogram(
            "strata_e2e_request_latency_seconds", "From the request's arrival to its end", _REQUEST_BUCKETS
        )
        self._stage = histogram(
            "strata_stage_seconds", "Time of a request in one stage", _TTFT_BUCKETS, "stage"
        )

    def finished(self, generation: Generation, arrived_at: float, tokenize_s: float) -> None:
        """A request ended well."""
        outcome = generation.outcome
        is_degenerate = outcome.stop_reason == REPETITION and outcome.finish_reason != "stop"
        reason = "repetition" if is_degenerate else outcome.finish_reason
        self._finished.labels(self._model, reason).inc()
        self._prompt_tokens.labels(self._model).inc(outcome.finished.num_prompt_tokens)
        self._generation_tokens.labels(self._model).inc(outcome.num_output_tokens)
        self._latency.labels(self._model).observe(time.monotonic() - arrived_at)
        if generation.first_token_at is not None:
            self._ttft.labels(self._model).observe(generation.first_token_at - arrived_at)
        for gap_s in generation.gaps_s:
            self._gap.labels(self._model).observe(gap_s)
        for wait_s in generation.ngram_waits_s:
            self._ngram_wait.labels(self._model).observe(wait_s)
        for stage, seconds in _stage_times(outcome, tokenize_s).items():
            self._stage.labels(self._model, stage).observe(seconds)

    def failed(self, code: str) -> None:
        """A request ended in an error, or its client left ("client_closed")."""
        self._failed.labels(self._model, code).inc()

    def ignored_fields(self, count: int) -> None:
        """A body had fields that nothing reads."""
        self._ignored_fields.labels(self._model).inc(count)

    def exposition(self) -> tuple[bytes, str]:
        """The text that Prometheus scrapes, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


def _stage_times(outcome: Outcome, tokenize_s: float) -> dict[str, float]:
    timings = outcome.timings
    seconds = {
        "queue": timings.queue_s,
        "tokenize": tokenize_s,
        "prefill": timings.prefill_s,
        "decode": timings.decode_s,
        "ngram_wait": timings.ngram_wait_s,
        "expert_wait": timings.expert_wait_s,
        "transfer_wait": timings.transfer_wait_s,
        "device_wait": timings.device_wait_s,
        # Of its steps; while a prompt is staged nobody has to wait.
        "disk_wait": sum(reads.wait_s for reads in outcome.finished.timings.disk),
    }
    return seconds | ({"staging": outcome.staged.seconds} if outcome.staged is not None else {})


class StackCollector(Collector):
    """What is read at the moment of the scrape: queues, what was needed so far, the states of processes."""

    def __init__(
        self,
        engine: EngineClient,
        admission: Admission,
        own_heartbeat: Callable[[], Heartbeat],
        model_name: str,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._own_heartbeat = own_heartbeat
        self._model = model_name

    def collect(self) -> Iterable[Metric]:
        """Everything that is not counted as requests end."""
        for name, text, value in (
            ("strata_num_requests_running", "Requests being computed", self._admission.num_running),
            ("strata_num_requests_waiting", "Requests waiting for their turn", self._admission.num_waiting),
        ):
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
        yield from self._disk()
        yield from self._needs()
        yield from self._processes()

    def _disk(self) -> Iterable[Metric]:
        labels = ["model_name", "file", "purpose"]
        num_reads = CounterMetricFamily(
            "strata_disk_reads", "Reads of a file, and whether they were ahead of time", labels=labels
        )
        num_bytes = CounterMetricFamily(
            "strata_disk_read_bytes", "Bytes that these reads moved", labels=labels
        )
        wait = CounterMetricFamily(
            "strata_disk_wait_seconds", "Time in which nothing could be done but wait for them", labels=labels
        )
        for (purpose, file), reads in self._engine.totals.reads.items():
            values = [self._model, file, purpose]
            num_reads.add_metric(values, reads.num_reads)
            num_bytes.add_metric(values, reads.num_bytes)
            wait.add_metric(values, reads.wait_s)
        yield from (num_reads, num_bytes, wait)

    def _needs(self) -> Iterable[Metric]:
        totals = self._engine.totals
        plain: tuple[tuple[str, str, float], ...] = (
            ("strata_ngram_rows", "Rows of the n-gram table that tokens needed", totals.num_ngram_rows),
            ("strata_ngram_row_hits", "Those of them that were in memory", totals.num_ngram_hits),
            (
                "strata_request_major_faults",
                "Page faults of the workers in steps; those of a shared step count for each of its requests",
                totals.num_major_faults,
            ),
            (
                "strata_prompt_tokens_cached",
                "Prompt tokens that were not computed, since a conversation that begins so was kept",
                totals.num_reused_tokens,
            ),
        )
        for name, text, value in plain:
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
        for name, text, counts in (
            ("strata_spec_decode_num_draft_tokens", "Drafted tokens, by source", totals.num_drafted),
            ("strata_spec_decode_num_accepted_tokens", "Those that were accepted", totals.num_accepted),
        ):
            family = CounterMetricFamily(name, text, labels=["model_name", "source"])
            for source, count in counts.items():
                family.add_metric([self._model, source], count)
            yield family
        by_way: tuple[tuple[str, str, Mapping[str, float]], ...] = (
            ("strata_expert_routes", "Routes of tokens to experts, by way", totals.num_routes),
            ("strata_expert_bytes", "Bytes of experts that were read, or moved, by way", totals.expert_bytes),
            (
                "strata_expert_wait_seconds",
                "What steps waited for experts, by way; a shared step's counts for each of its requests",
                totals.expert_wait_s,
            ),
        )
        for name, text, values in by_way:
            family = CounterMetricFamily(name, text, labels=["model_name", "way"])
            for way, value in values.items():
                family.add_metric([self._model, way], value)
            yield family

    def _processes(self) -> Iterable[Metric]:
        state = GaugeMetricFamily(
            "strata_process_state", "1 for the state a process is in", labels=["process", "state"]
        )
        age = GaugeMetricFamily(
            "strata_heartbeat_age_seconds", "Since the last sign of life", labels=["process"]
        )
        losses = GaugeMetricFamily("strata_process_losses", "Times a worker was lost", labels=["process"])
        gauges: dict[str, Metric] = {}
        now = time.monotonic()
        heartbeats: dict[str, Heartbeat | None] = {"gateway": self._own_heartbeat()}
        for role, peer in self._engine.peers.items():
            heartbeats[role] = peer.heartbeat
            losses.add_metric([role], peer.num_losses)
            if peer.heartbeat is not None:
                age.add_metric([role], peer.silence_s(now))
        for process, heartbeat in heartbeats.items():
            current = heartbeat.state if heartbeat is not None else "absent"
            for candidate in (*ProcessState, "absent"):
                state.add_metric([process, candidate], float(candidate == current))
            for name, value in (heartbeat.gauges if heartbeat is not None else {}).items():
                family = gauges.setdefault(name, _process_family(name))
                family.add_sample(f"strata_process_{name}", {"process": process}, value)
        yield from (state, age, losses, *gauges.values())


def _process_family(name: str) -> Metric:
    """For what processes measure by that name: a counter where that says so, a gauge otherwise."""
    kind = "counter" if name.endswith("_total") else "gauge"
    return Metric(f"strata_process_{name.removesuffix('_total')}", f"{name} of a process", kind)

"""The router's /metrics. Owns the values; the pools' figures are read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.router.pools import Pool

_OUTCOMES = ("answered", "refused", "failed", "broken", "client_gone")
_PHASES = ("prefill", "decode", "blocks")
_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class RouterMetrics(Collector):
    """All values of one router."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        """Of these pools."""
        self._pools = pools
        self._registry = CollectorRegistry(auto_describe=False)
        self._requests = Counter(
            "octavo_router_requests", "Requests, by how they ended", ["outcome"], registry=self._registry
        )
        self._retries = Counter(
            "octavo_router_retries", "Tries that were followed by another one", ["phase"], registry=self._registry
        )
        self._skipped = Counter(
            "octavo_router_prefills_skipped", "Requests that decode servers computed alone", registry=self._registry
        )
        self._seconds = Histogram(
            "octavo_router_prefill_seconds", "Until the blocks were on offer", buckets=_SECONDS, registry=self._registry
        )
        for outcome in _OUTCOMES:
            self._requests.labels(outcome)
        for phase in _PHASES:
            self._retries.labels(phase)
        self._registry.register(self)

    def ended(self, outcome: str) -> None:
        """Count a request."""
        self._requests.labels(outcome).inc()

    def retried(self, phase: str) -> None:
        """Count a try that failed."""
        self._retries.labels(phase).inc()

    def skipped_prefill(self) -> None:
        """Count a request that no prefill server computed."""
        self._skipped.inc()

    def prefilled(self, seconds: float) -> None:
        """Count a prefill."""
        self._seconds.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """The pools' figures."""
        labels = ["pool", "server"]
        up = GaugeMetricFamily("octavo_router_server_up", "Whether a server is well", labels=labels)
        open_ = GaugeMetricFamily("octavo_router_open_requests", "Requests that a server works on", labels=labels)
        sent = CounterMetricFamily("octavo_router_server_requests", "Requests that a server was sent", labels=labels)
        failed = CounterMetricFamily("octavo_router_server_failures", "Times that a server failed", labels=labels)
        for pool in self._pools:
            for server in pool.servers:
                names = [pool.name, str(server.address)]
                up.add_metric(names, float(server.is_well))
                open_.add_metric(names, server.num_open)
                sent.add_metric(names, server.num_requests)
                failed.add_metric(names, server.num_failures)
        yield from (up, open_, sent, failed)

    def render(self) -> bytes:
        """The body of /metrics."""
        return generate_latest(self._registry)

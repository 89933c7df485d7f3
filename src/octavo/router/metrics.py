"""The router's /metrics. Owns the values; the pools' figures are read when they are asked for."""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.router.pools import Pool

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_OUTCOMES = ("answered", "refused", "failed", "broken", "client_gone")
_PHASES = ("prefill", "decode", "blocks")
_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class RouterMetrics(Collector):
    """All values of one router."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        """Of these pools."""
        self._pools = pools
        self._requests = dict.fromkeys(_OUTCOMES, 0)
        self._retries = dict.fromkeys(_PHASES, 0)
        self._restarts = collections.Counter({pool.name: 0 for pool in pools})
        self._load_failures = collections.Counter[str]()  # by decode server
        self._num_skipped = 0
        self._counts, self._seconds = [0] * (len(_SECONDS) + 1), 0.0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def ended(self, outcome: str) -> None:
        """Count a request."""
        self._requests[outcome] += 1

    def retried(self, phase: str) -> None:
        """Count a try that failed."""
        self._retries[phase] += 1

    def restarted(self, pool: str) -> None:
        """Count a server that was started again."""
        self._restarts[pool] += 1

    def load_failures(self, server: str, count: int) -> None:
        """Count what a decode server says of blocks that it could not take."""
        self._load_failures[server] += count

    def skipped_prefill(self) -> None:
        """Count a request that goes on without blocks of a prefill server."""
        self._num_skipped += 1

    def prefilled(self, seconds: float) -> None:
        """Count a prefill."""
        self._counts[bisect.bisect_left(_SECONDS, seconds)] += 1
        self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        """All figures."""
        yield from self._own()
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

    def _own(self) -> Iterator[Metric]:
        for name, label, text, values in (
            ("requests", "outcome", "Requests, by how they ended", self._requests),
            ("retries", "phase", "Tries that were followed by another one", self._retries),
            ("kv_load_failures", "server", "Blocks on offer that a decode server could not take", self._load_failures),
            ("server_restarts", "pool", "Times that a server of --start-pair was started again", self._restarts),
        ):
            family = CounterMetricFamily(f"octavo_router_{name}", text, labels=[label])
            for value, count in values.items():
                family.add_metric([value], count)
            yield family
        skipped = "octavo_router_prefills_skipped", "Requests passed on without blocks of a prefill server"
        yield CounterMetricFamily(*skipped, value=self._num_skipped)
        bounds = [*(f"{float(bound)}" for bound in _SECONDS), "+Inf"]
        histogram = HistogramMetricFamily("octavo_router_prefill_seconds", "Until the blocks were on offer")
        totals = itertools.accumulate(self._counts)
        histogram.add_metric([], list(zip(bounds, totals, strict=True)), self._seconds)
        yield histogram

    def render(self) -> bytes:
        """The body of /metrics."""
        return generate_latest(self._registry)

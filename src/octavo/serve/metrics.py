"""/metrics: counts what requests, the engine and HTTP did, and writes it in Prometheus' text form.

Owns the values behind `metric_families` and the HTTP families. Fed by the front end's event loop alone, so nothing is
locked; knows neither sockets nor the engine's process. Invariants: no global registry; the set of series is fixed when
it is built (and once more when the engine tells its cache, and how many drafts its speculator has), but for those of
HTTP: of the routes that there are, those that were asked for; counters never go back, also when the engine restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.frontend.messages import EngineInfo
from octavo.frontend.metrics import COUNTERS, GAUGES
from octavo.frontend.request_metrics import Histogram, RequestCounts, RequestFacts, token_buckets
from octavo.serve.metric_families import ACCEPTED_PER_PLACE, FAMILIES, HTTP, OWN, VLLM, Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHER = "other"  # what every unknown method and unknown route is called
_RENDER_SECONDS = 0.1  # between two renderings for HTTP, which take some ms of the event loop each
_GAUGES = (
    *((name.partition(":")[2], source) for name, source in GAUGES),
    ("num_requests_open", "num_requests"),
    ("weights_missing", "weights_missing"),
)
_COUNTERS = (
    *((name.partition(":")[2], source) for name, source in COUNTERS),
    ("engine_restarts", "num_restarts"),
    ("weights_lost", "num_weights_lost"),
)


class Watched(Protocol):
    """What is read of an AsyncEngine."""

    observers: list[Callable[[str, RequestFacts], None]]
    info: EngineInfo | None

    @property
    def stats(self) -> Mapping[str, float]:
        """EngineStats by name, and what the front end knows."""

    @property
    def weights_version(self) -> str:
        """The label of the weights that serve."""


class ServerMetrics(Collector):
    """All values of one server. The methods that count are called by the front end; none may raise for odd input."""

    def __init__(
        self,
        model_name: str,
        *,
        max_model_len: int = 131072,
        num_drafts: int = 0,
        engine: str = "0",
        routes: Iterable[tuple[str, str]] = (),
    ) -> None:
        """`routes` are (method, path template) pairs: the only values that HTTP labels take beside "other".

        num_drafts: of a row in one step at most, each of whose places is a series.
        """
        self._labels = (model_name, engine)
        self._engine: Watched | None = None
        self._totals: dict[str, float] = {}  # totals of the engine process, as last told
        self._requests = RequestCounts(max_model_len)
        self._values: dict[str, dict[str, float]] = {**self._requests.values}
        self._histograms: dict[str, Histogram] = {**self._requests.histograms}
        self._by_label: dict[str, dict[str, Histogram]] = {}  # of families with a label
        self._version, self._tokens_before = "", 0.0  # of the weights; tokens of others before
        for family in FAMILIES:
            if family.name in self._values or family.name in self._histograms:
                continue
            if family.kind == "histogram" and family.label:
                self._by_label[family.name] = {value: Histogram(family.buckets) for value in family.values}
            elif family.kind == "histogram":
                self._histograms[family.name] = Histogram(family.buckets or token_buckets(max_model_len))
            else:
                self._values[family.name] = dict.fromkeys(family.values, 0.0)
        self._values[ACCEPTED_PER_PLACE] = dict.fromkeys(map(str, range(num_drafts)), 0.0)
        self._values["engine_sleep_state"]["awake"] = 1.0  # before an engine is watched
        self._exchanges: set[tuple[str, str]] = set()  # (method, path template) of all that can be counted
        self._http_counts: dict[tuple[str, str, str], float] = {}  # of those that were, as the times
        self._http_times: dict[tuple[str, str], Histogram] = {}
        self._rendering: asyncio.Future[bytes] | None = None  # that is due
        self._rendered_at = -math.inf
        self.add_routes(routes)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def add_routes(self, routes: Iterable[tuple[str, str]]) -> None:
        """Let more (method, path template) pairs be counted; only while the server is put together."""
        for method, path in [*routes, (OTHER, OTHER)]:
            self._exchanges |= {(method, path), (OTHER, path)}

    def http(self, method: str, route: str | None, status: int, seconds: float) -> None:
        """Count one HTTP exchange. `route` is the path template, None if no route matched."""
        path = route if route is not None and (OTHER, route) in self._exchanges else OTHER
        name = method if (method, path) in self._exchanges else OTHER
        group = f"{min(max(status // 100, 2), 5)}xx"
        self._http_counts[name, path, group] = self._http_counts.get((name, path, group), 0.0) + 1
        self._http_times.setdefault((name, path), Histogram(HTTP)).observe(seconds)

    def observe(self, event: str, facts: RequestFacts) -> None:
        """Take an event of AsyncEngine.observers."""
        if event == "rejected":
            counts, reason = self._values["admission_rejections"], facts.finish_reasons.get(0, "")
            counts["queued_tokens" if "tokens" in reason else "queued_reqs"] += 1
        self._requests.observe(event, facts)

    @contextlib.contextmanager
    def sleeping(self, operation: str) -> Iterator[None]:
        """Within: a move to "sleep", or to "wake_up", is being made; then it is counted, whatever came of it."""
        with self._timing("sleep_mode_operation", operation):
            yield

    @contextlib.contextmanager
    def updating(self, operation: str) -> Iterator[None]:
        """Within: a call for new weights is being answered, one of OPERATIONS."""
        with self._timing("rl_weight_update_operation", operation):
            yield

    @contextlib.contextmanager
    def _timing(self, name: str, operation: str) -> Iterator[None]:
        in_flight, began = self._values[f"{name}s_in_flight"], time.monotonic()
        in_flight[operation] += 1
        try:
            yield
        finally:
            in_flight[operation] -= 1
            self._by_label[f"{name}_duration_seconds"][operation].observe(time.monotonic() - began)

    def watch(self, engine: Watched) -> None:
        """Follow an engine: its events as they come, its figures whenever they are asked for."""
        self._engine = engine
        engine.observers.append(self.observe)

    def _read_engine(self) -> None:
        """Take the figures of the last heartbeat: gauges as they are, totals by how much they grew."""
        if self._engine is None:
            return
        stats, values = self._engine.stats, self._values
        for name, source in _GAUGES:
            values[name][""] = stats.get(source, 0.0)
        with contextlib.suppress(RuntimeError):  # no loop: it is asked for outside a server
            values["num_tasks"][""] = len(asyncio.all_tasks())
        level = int(stats.get("sleep_level", -1))  # a sleep of scheduling alone keeps everything
        state = {1: "weights_offloaded", 2: "discard_all"}.get(level, "awake")
        values["engine_sleep_state"] = {each: float(each == state) for each in values["engine_sleep_state"]}
        values["paused"][""] = stats.get("paused", 0.0)
        values["num_requests_waiting_by_reason"]["capacity"] = stats["num_waiting"]
        values["num_requests_waiting_by_reason"]["deferred"] = stats.get("num_loading", 0.0)
        for name, source in _COUNTERS:
            values[name][""] += self._grown(name, stats.get(source, 0.0))
        for name, source in (
            ("weight_update_bytes", "weight_bytes_by_"),
            ("weight_receive_seconds", "weight_seconds_by_"),
        ):
            for backend in values[name]:
                values[name][backend] += self._grown(source + backend, stats.get(source + backend, 0.0))
        accepted = values[ACCEPTED_PER_PLACE]
        if told := {place: count for place, count in accepted.items() if f"num_accepted_at_{place}" in stats}:
            values[ACCEPTED_PER_PLACE] = accepted = told  # a speculator may have fewer drafts than was asked for
        for place in accepted:
            accepted[place] += self._grown(f"accepted_at_{place}", stats.get(f"num_accepted_at_{place}", 0.0))
        outcomes = values["weight_update_requests"]
        sources = ("num_kept_at_update", "num_recomputed_at_update", "num_aborted_at_update")
        for outcome, source in zip(outcomes, sources, strict=True):
            outcomes[outcome] += self._grown(source, stats.get(source, 0.0))
        if self._engine.weights_version != self._version:
            self._version, self._tokens_before = self._engine.weights_version, values["generation_tokens"][""]
        steps, tokens = self._grown("steps", stats["num_steps"]), self._grown("tokens", stats["num_scheduled_tokens"])
        if steps > 0:
            self._histograms["iteration_tokens_total"].observe(tokens / steps, int(steps))

    def _cache_info(self) -> dict[str, str]:
        info = self._engine.info if self._engine is not None else None
        if info is None:
            return {}
        return {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "cache_dtype": info.dtype,
            "enable_prefix_caching": str(info.enable_prefix_caching),
        }

    def _grown(self, name: str, total: float) -> float:
        """How much a total of the engine process grew since it was last told; a fall is a restart from 0."""
        last = self._totals.get(name, 0.0)
        self._totals[name] = total
        return total - last if total >= last else total

    def collect(self) -> Iterator[Metric]:
        """Every family, for the registry."""
        self._read_engine()
        for family in FAMILIES:
            for name in filter(None, (family.name, family.alias)):
                yield self._metric(family, family.prefix + name)
        cache = self._cache_info()
        if cache:
            names, values = zip(*sorted(cache.items()), strict=True)
            info = GaugeMetricFamily(VLLM + "cache_config_info", "The cache", labels=["engine", *names])
            info.add_metric([self._labels[1], *values], 1.0)
            yield info
        if self._version:  # of the weights that serve alone: the set of series does not grow with updates
            labels = ["model_name", "engine", "version"]
            served = GaugeMetricFamily(OWN + "weights_version_info", "The weights that serve", labels=labels)
            served.add_metric([*self._labels, self._version], 1.0)
            yield served
            drawn = GaugeMetricFamily(OWN + "weights_version_tokens", "Tokens told since they serve", labels=labels)
            drawn.add_metric(
                [*self._labels, self._version], self._values["generation_tokens"][""] - self._tokens_before
            )
            yield drawn
        counts = CounterMetricFamily("http_requests", "HTTP requests", labels=["method", "handler", "status"])
        for key, value in self._http_counts.items():
            counts.add_metric(key, value)
        yield counts
        times = HistogramMetricFamily("http_request_duration_seconds", "HTTP time", labels=["method", "handler"])
        for pair, histogram in self._http_times.items():
            times.add_metric(pair, histogram.cumulative(), histogram.sum)
        yield times

    def _metric(self, family: Family, name: str) -> Metric:
        labels = ["model_name", "engine"]
        if family.kind == "histogram":
            if family.label:
                made = HistogramMetricFamily(name, family.help, labels=[*labels, family.label])
                for value, histogram in self._by_label[family.name].items():
                    made.add_metric([*self._labels, value], histogram.cumulative(), histogram.sum)
                return made
            histogram = self._histograms[family.name]
            made = HistogramMetricFamily(name, family.help, labels=labels)
            made.add_metric(self._labels, histogram.cumulative(), histogram.sum)
            return made
        kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
        single = kind(name, family.help, labels=labels + ([family.label] if family.label else []))
        for value, amount in self._values[family.name].items():
            single.add_metric([*self._labels, *([value] if family.label else [])], amount)
        return single

    def render(self) -> bytes:
        """The body of /metrics; its type is CONTENT_TYPE."""
        return generate_latest(self.registry)

    async def rendered(self) -> bytes:
        """As `render`, as of now or soon: all who ask within a while share what is made at its end."""
        if self._rendering is None:
            loop = asyncio.get_running_loop()
            self._rendering = loop.create_future()
            loop.call_at(self._rendered_at + _RENDER_SECONDS, self._render_for_all)
        return await asyncio.shield(self._rendering)

    def _render_for_all(self) -> None:
        due, self._rendering = self._rendering, None
        assert due is not None, "it is due once for those who wait"
        try:
            due.set_result(self.render())
        except Exception as error:
            due.set_exception(error)
        self._rendered_at = due.get_loop().time()

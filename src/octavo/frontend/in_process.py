"""InProcessClient: a core in this process, stepped by whoever owns it.

Owns the way from messages to an EngineCore's methods, for an `Engine` and within an engine process alike. `add`,
`abort` and `stats` may be used by any thread, the rest by the one that steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future

from octavo.engine import EngineCore
from octavo.frontend.messages import Add, EngineStats
from octavo.request.updates import RequestUpdate


class InProcessClient:
    """A CoreClient whose owner calls `core.step` and takes the updates."""

    def __init__(self, core: EngineCore) -> None:
        """`core` is stepped through itself."""
        self.core = core

    def add(self, request: Add) -> None:
        """Queue a checked request. Raises RuntimeError if a step has failed before, or the engine was closed."""
        self.core.add(
            request.sequence_ids,
            request.prompt_token_ids,
            request.params,
            max_tokens=request.max_tokens,
            priority=request.priority,
            cache_salt=request.cache_salt,
            coalesce_updates=request.coalesce_updates,
        )

    def abort(self, sequence_ids: list[str]) -> None:
        """End sequences as soon as possible, in any state, without an update. Unknown ids are ignored."""
        self.core.abort(sequence_ids)

    def take_untold(self, sequence_ids: Iterable[str]) -> list[RequestUpdate]:
        """What sequences with `coalesce_updates` have that no update told."""
        return self.core.take_untold(sequence_ids)

    def call(self, name: str, payload: bytes = b"") -> Future[bytes]:
        """Ask the core, at once; see EngineCore.begin_call."""
        try:
            return self.core.begin_call(name, payload)
        except Exception as error:  # the caller's, as it would come through a socket
            answer = Future[bytes]()
            answer.set_exception(error)
            return answer

    @property
    def stats(self) -> EngineStats:
        """The core's figures of this moment."""
        scheduler, times = self.core.scheduler, self.core.times
        stats, updates, moved = scheduler.stats(), self.core.weights.stats, scheduler.loads.connector.stats()
        return EngineStats(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            cache_usage=stats.cache_usage,
            num_free_blocks=scheduler.kv.num_free_blocks,
            rss_bytes=_rss_bytes(),
            num_steps=times.num_steps,
            num_preemptions=stats.num_preemptions,
            num_scheduled_tokens=stats.num_scheduled_tokens,
            num_prefix_queries=stats.num_prefix_queries,
            num_prefix_hits=stats.num_prefix_hits,
            num_drafts=stats.num_drafts,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            accepted_per_position=list(stats.accepted_per_position),
            schedule_seconds=times.schedule,
            execute_seconds=times.issue + times.wait,
            update_seconds=times.update,
            num_weight_updates=updates.num_updates,
            num_failed_weight_updates=updates.num_failed_updates,
            weight_update_bytes=updates.num_received_bytes,
            weight_update_seconds=updates.update_seconds,
            weight_receive_seconds=updates.receive_seconds,
            weight_pause_seconds=updates.pause_seconds,
            weights_received_by=updates.received_by,
            num_kept_at_update=updates.num_kept,
            num_recomputed_at_update=updates.num_recomputed,
            num_aborted_at_update=updates.num_aborted,
            weights_version=self.core.weights.version,
            weights_lost_because=self.core.gate.lost_because,
            num_loading=stats.num_loading,
            num_matched_tokens=stats.num_matched_tokens,
            num_loaded_tokens=stats.num_loaded_tokens,
            num_load_failures=stats.num_load_failures,
            num_load_misses=stats.num_load_misses,
            num_expired_holds=stats.num_expired_holds,
            num_kv_saved_blocks=moved.num_saved_blocks,
            num_kv_loaded_blocks=moved.num_loaded_blocks,
            kv_saved_bytes=moved.saved_bytes,
            kv_loaded_bytes=moved.loaded_bytes,
            kv_save_seconds=moved.save_seconds,
            kv_load_seconds=moved.load_seconds,
            num_kv_evicted_blocks=moved.num_evicted_blocks,
            kv_stored_bytes=moved.stored_bytes,
            num_kv_errors=moved.num_errors,
            num_kv_late_lookups=moved.num_late_lookups,
        )


def _rss_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0

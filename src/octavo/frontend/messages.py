"""The messages between a frontend and a core, and the frames that carry them where a socket lies between.

Owns the message types, their encoding (msgpack, typed and strict) and the framing on a stream socket: four bytes of
little-endian length, then the message. Knows neither processes nor engines. Nothing is ever unpickled. Invariant: a
frame that is too long, malformed or unknown is reported as such and never reaches more than its own bytes: the reader
stays in step with the stream and never holds more than MAX_FRAME_BYTES of it.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from octavo.request.fields import FieldSpec
from octavo.request.sampling_params import SamplingParams
from octavo.request.updates import RequestUpdate

WITHDRAWN = "withdrawn"  # the error of a call that was withdrawn, and was not carried out
PROTOCOL = 4
MAX_FRAME_BYTES = 64 << 20
MAX_TEXT = 2000  # characters of an error that a message carries
_LENGTH = struct.Struct("<I")


class Start(msgspec.Struct, frozen=True, tag="start", forbid_unknown_fields=True):
    """Front end to engine, the first message: the fields of EngineConfig that are not at their defaults."""

    config: dict[str, Any]
    num_past_updates: int = 0  # of the weights, by engines that are gone
    lost_version: str = ""  # of weights that one of them was given, and that are to come before anything is generated
    protocol: int = PROTOCOL


class Add(msgspec.Struct, frozen=True, tag="add", forbid_unknown_fields=True):
    """Generate: one sequence per id."""

    sequence_ids: list[str]
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    priority: int = 0
    cache_salt: str = ""
    coalesce_updates: bool = False  # one update for the first token and one at the end will do


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True):
    """End sequences; nothing is answered."""

    sequence_ids: list[str]


class Call(msgspec.Struct, frozen=True, tag="call", forbid_unknown_fields=True):
    """Ask the core by a call's name. Answered by CallDone, after a step that has seen all that was sent before."""

    call_id: int
    name: str
    payload: bytes = b""  # msgpack, as the name says


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw", forbid_unknown_fields=True):
    """Nobody waits for a call's answer: it is not begun, or what it waits for is cut short; else nothing changes."""

    call_id: int


class Stop(msgspec.Struct, frozen=True, tag="stop", forbid_unknown_fields=True):
    """Finish the step that runs and exit."""


ToEngine = Start | Add | Abort | Call | Withdraw | Stop


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine came up with."""

    device: str
    dtype: str
    attention_backend: str
    quantization: str | None = None
    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    block_size: int
    num_blocks: int  # the null block included
    weight_bytes: int = 0
    request_fields: list[FieldSpec] = []
    experts: tuple[int, int] = (0, 0)  # Limits'
    numerics_contract: dict[str, str] = {}
    phases: list[tuple[str, float, int]] = []  # of the start: name, seconds, depth


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of this moment, and counters since the start of the engine process."""

    num_running: int = 0
    num_waiting: int = 0
    cache_usage: float = 0.0  # share of the blocks that are held, 0 to 1
    num_free_blocks: int = 0
    rss_bytes: int = 0  # of the engine process
    num_steps: int = 0
    num_preemptions: int = 0
    num_scheduled_tokens: int = 0
    num_prefix_queries: int = 0  # tokens
    num_prefix_hits: int = 0  # tokens
    num_bad_frames: int = 0  # messages of the front end that were dropped
    num_unknown_aborts: int = 0  # aborts of sequences that were not there (any more)
    schedule_seconds: float = 0.0
    execute_seconds: float = 0.0
    update_seconds: float = 0.0
    num_weight_updates: int = 0
    num_failed_weight_updates: int = 0
    weight_update_bytes: int = 0  # received from trainers
    weight_update_seconds: float = 0.0  # from the start of updates to their ends
    weight_receive_seconds: float = 0.0
    weight_pause_seconds: float = 0.0  # in which weights were applied, and no step could run
    weights_received_by: dict[str, tuple[int, float]] = {}  # backend -> bytes, seconds
    num_kept_at_update: int = 0  # requests that ran at updates and went on with the K and V that they had
    num_recomputed_at_update: int = 0
    num_aborted_at_update: int = 0
    weights_version: str = ""
    weights_lost_because: str = ""  # "": they are whole, or about to be changed
    num_drafts: int = 0  # rows' steps that verified drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = []
    num_loading: int = 0  # requests that wait for blocks from elsewhere
    num_matched_tokens: int = 0  # that a connector was asked for
    num_loaded_tokens: int = 0  # that it brought
    num_load_failures: int = 0
    num_load_misses: int = 0
    num_expired_holds: int = 0
    num_kv_saved_blocks: int = 0
    num_kv_loaded_blocks: int = 0
    kv_saved_bytes: int = 0
    kv_loaded_bytes: int = 0
    kv_save_seconds: float = 0.0
    kv_load_seconds: float = 0.0
    num_kv_evicted_blocks: int = 0
    num_kv_errors: int = 0
    num_kv_late_lookups: int = 0
    kv_stored_bytes: int = 0


# Of EngineStats: what goes on over restarts.
COUNTERS = (
    "num_steps",
    "num_preemptions",
    "num_scheduled_tokens",
    "num_prefix_queries",
    "num_prefix_hits",
    "num_bad_frames",
    "num_unknown_aborts",
    "schedule_seconds",
    "execute_seconds",
    "update_seconds",
    "num_weight_updates",
    "num_failed_weight_updates",
    "weight_update_bytes",
    "weight_update_seconds",
    "weight_receive_seconds",
    "weight_pause_seconds",
    "num_kept_at_update",
    "num_recomputed_at_update",
    "num_aborted_at_update",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_matched_tokens",
    "num_loaded_tokens",
    "num_load_failures",
    "num_load_misses",
    "num_expired_holds",
    "num_kv_saved_blocks",
    "num_kv_loaded_blocks",
    "num_kv_evicted_blocks",
    "num_kv_errors",
    "num_kv_late_lookups",
    "kv_saved_bytes",
    "kv_loaded_bytes",
    "kv_save_seconds",
    "kv_load_seconds",
)


class Ready(msgspec.Struct, frozen=True, tag="ready", forbid_unknown_fields=True):
    """The engine is loaded and takes requests."""

    info: EngineInfo
    protocol: int = PROTOCOL


class Updates(msgspec.Struct, frozen=True, tag="updates", forbid_unknown_fields=True):
    """What one step gave: one frame, unless it would be too long for one."""

    step: int
    updates: list[RequestUpdate]


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", forbid_unknown_fields=True):
    """Sent four times a second by a thread of its own, and when the engine falls idle."""

    num_turns: int  # of the engine's loop: stands still while a step hangs
    busy: bool  # there is something to step for
    stats: EngineStats


class CallDone(msgspec.Struct, frozen=True, tag="call_done", forbid_unknown_fields=True):
    """The answer to a call: its result, or why there is none."""

    call_id: int
    result: bytes = b""  # msgpack, as the call's name says
    error: str = ""
    is_users: bool = False  # with `error`: the name or the payload cannot be used; else our fault


class Failed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    """The last message: why the engine ends."""

    text: str
    is_users: bool = False  # a setting or a model folder that cannot be used; else our fault


FromEngine = Ready | Updates | Heartbeat | CallDone | Failed

_ENCODER = msgspec.msgpack.Encoder()
_TO_ENGINE = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE = msgspec.msgpack.Decoder(FromEngine)


class BadFrameError(ValueError):
    """A frame that is no message. Says of which kind the defect is, not what the frame held."""


def encode(message: ToEngine | FromEngine) -> bytearray:
    """The frame of a message. Raises BadFrameError if it would be longer than MAX_FRAME_BYTES."""
    frame = bytearray(_LENGTH.size)
    _ENCODER.encode_into(message, frame, _LENGTH.size)
    length = len(frame) - _LENGTH.size
    if length > MAX_FRAME_BYTES:
        raise BadFrameError(f"a message of {length} bytes is longer than {MAX_FRAME_BYTES}")
    _LENGTH.pack_into(frame, 0, length)
    return frame


def decode_to_engine(frame: bytes | None) -> ToEngine:
    """The message of the front end in a frame that FrameReader gave. Raises BadFrameError."""
    return _decode(_TO_ENGINE, frame)


def decode_from_engine(frame: bytes | None) -> FromEngine:
    """The message of the engine in a frame that FrameReader gave. Raises BadFrameError."""
    return _decode(_FROM_ENGINE, frame)


def _decode(decoder: msgspec.msgpack.Decoder, frame: bytes | None) -> Any:
    if frame is None:
        raise BadFrameError(f"longer than {MAX_FRAME_BYTES} bytes")
    try:
        return decoder.decode(frame)
    except (ValueError, TypeError, RecursionError, OverflowError, MemoryError) as error:
        raise BadFrameError(f"{type(error).__name__} in a message of {len(frame)} bytes") from None


class FrameReader:
    """Takes a byte stream apart into frames."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        """Longer frames are skipped as they arrive, and reported as None."""
        self._max = max_frame_bytes
        self._buffer = bytearray()
        self._skip = 0  # bytes of a frame that is too long, still to come

    def feed(self, data: bytes) -> list[bytes | None]:
        """The frames that end in `data`, each whole."""
        if self._skip:
            num_skipped = min(self._skip, len(data))
            self._skip -= num_skipped
            data = data[num_skipped:]
        buffer = self._buffer
        buffer += data
        frames: list[bytes | None] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if length > self._max:
                frames.append(None)
                self._skip = max(end - len(buffer), 0)
                start = min(end, len(buffer))
                continue
            if end > len(buffer):
                break
            frames.append(bytes(memoryview(buffer)[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return frames

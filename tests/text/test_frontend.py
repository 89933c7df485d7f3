"""Frontend over a core that only takes notes: what enters, what is aborted, what stays behind."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from octavo.frontend.frontend import Frontend, Prompt
from octavo.frontend.messages import Add, EngineStats
from octavo.request.outputs import OUTPUT_FAILED
from octavo.request.sampling_params import Limits, ParameterError, RequestOutputKind, SamplingParams
from octavo.request.updates import RequestUpdate
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.tokenizer import Tokenizer
from tiny_tokenizers import byte_level

TOKENIZER = Tokenizer(byte_level(), {})
LIMITS = Limits(vocab_size=400, max_model_len=64)
PROMPT = Prompt([1, 2, 3], "abc", "salt")
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class Notes:
    """A CoreClient without a core. `error` is what `add` raises."""

    stats = EngineStats()

    def __init__(self, error: Exception | None = None) -> None:
        self.added: list[Add] = []
        self.aborted: list[list[str]] = []
        self.untold: dict[str, list[int]] = {}
        self.error = error

    def add(self, request: Add) -> None:
        if self.error is not None:
            raise self.error
        self.added.append(request)

    def abort(self, sequence_ids: list[str]) -> None:
        self.aborted.append(sequence_ids)

    def take_untold(self, sequence_ids: Any) -> list[RequestUpdate]:
        return [RequestUpdate(name, self.untold[name]) for name in sequence_ids if name in self.untold]

    def call(self, name: str, payload: bytes = b"") -> Future[bytes]:
        return Future()


def make(core: Notes, **options: Any) -> Frontend:
    return Frontend(core, TOKENIZER, LIMITS, **options)


def queue(frontend: Frontend, request_id: str = "r", prompt: Prompt = PROMPT, **fields: Any) -> list[str]:
    return frontend.queue(request_id, frontend.check(prompt, SamplingParams(**{"max_tokens": 8, **fields}), priority=3))


def test_a_core_is_told_all_of_a_request_and_its_sequences_by_name() -> None:
    core = Notes()
    frontend = make(core)
    assert queue(frontend) == ["r"] and queue(frontend, "s", n=2) == ["0_s", "1_s"]
    first, second = core.added
    assert first == Add(["r"], [1, 2, 3], first.params, 8, 3, "salt") and second.sequence_ids == ["0_s", "1_s"]
    assert frontend.num_sequences == 3 and frontend.request_of("1_s") == "s" and frontend.request_of("2_s") is None


@pytest.mark.parametrize(
    ("fields", "coalesced"),
    [({}, True), ({"output_kind": DELTA}, False), ({"stop": "x"}, False), ({"logprobs": 1}, False)],
)
def test_a_core_tells_of_several_tokens_at_once_only_where_nobody_looks(
    fields: dict[str, Any], coalesced: bool
) -> None:
    for coalesces in (False, True):
        core = Notes()
        queue(make(core, coalesces=coalesces), **{"output_kind": FINAL, **fields})
        assert core.added[0].coalesce_updates == (coalesces and coalesced)


def test_what_the_core_does_not_take_leaves_nothing_behind() -> None:
    """A request that could not be queued was held, with its id, for ever."""
    core = Notes(RuntimeError("the engine stopped"))
    frontend = make(core)
    for error in (RuntimeError("the engine stopped"), ParameterError("prompt", "is too large")):
        core.error = error
        with pytest.raises(type(error)):
            queue(frontend, n=2)
    core.error = None
    assert frontend.num_sequences == 0 and not core.aborted
    assert queue(frontend, n=2) == ["0_r", "1_r"]
    with pytest.raises(ParameterError, match="in use"):
        queue(frontend)
    assert frontend.num_sequences == 2


def test_a_stop_string_ends_its_sequence_in_the_core() -> None:
    core = Notes()
    frontend = make(core)
    queue(frontend, stop="fox", output_kind=FINAL)
    (output,) = frontend.take([RequestUpdate("r", TOKENIZER.encode("the fox jumps"))])
    assert output.finished and output.outputs[0].stop_reason == "fox" and core.aborted == [["r"]]
    assert frontend.take([RequestUpdate("r", [5])]) == [] and frontend.num_sequences == 0


def test_aborted_requests_say_what_no_update_told_and_dropped_ones_nothing() -> None:
    core = Notes()
    frontend = make(core, coalesces=True)
    for name in ("told", "untold", "dropped"):
        queue(frontend, name, output_kind=FINAL, detokenize=False)
    core.untold = {"untold": [7, 8]}
    outputs = {output.request_id: output.outputs[0] for output in frontend.abort(["told", "untold", "unknown"])}
    assert {name: (one.token_ids, one.finish_reason) for name, one in outputs.items()} == {
        "told": ([], "abort"),
        "untold": ([7, 8], "abort"),
    }
    frontend.drop(["dropped", "unknown"])
    assert core.aborted == [["told", "untold"], ["dropped"]] and frontend.num_sequences == 0
    frontend.drop(["dropped"])
    assert frontend.abort(["told"]) == [] and len(core.aborted) == 2


class Panic(BaseException):
    """Panics of the tokenizers' library are no Exceptions."""


class Panicking:
    def add(self, token_id: int) -> str:
        raise Panic

    flush = add


@pytest.mark.parametrize("kind", [DELTA, FINAL])
@pytest.mark.parametrize("ends_by", ["token", "abort"])
def test_text_that_cannot_be_made_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, kind: RequestOutputKind, ends_by: str
) -> None:
    make_detokenizer = TOKENIZER.detokenizer
    monkeypatch.setattr(
        TOKENIZER, "detokenizer", lambda prompt, *more: Panicking() if 9 in prompt else make_detokenizer(prompt, *more)
    )
    core = Notes()
    frontend = make(core)
    queue(frontend, "bad", Prompt([9]), n=2, output_kind=kind)
    queue(frontend, "good", output_kind=kind)
    last = RequestUpdate("good", TOKENIZER.encode("fine"), finish_reason="length")
    if ends_by == "token":
        outputs = frontend.take([RequestUpdate("1_bad", [5]), last, RequestUpdate("0_bad", [5])])
    else:
        outputs = frontend.abort(["bad"]) + frontend.take([last])
    bad, good = outputs
    assert (bad.request_id, bad.finished, good.outputs[0].text) == ("bad", True, "fine")
    assert [(one.finish_reason, one.stop_reason) for one in bad.outputs] == [("error", OUTPUT_FAILED)] * 2
    assert core.aborted == [["0_bad", "1_bad"]] and frontend.num_sequences == 0


def test_without_a_tokenizer_text_is_refused_before_anything_is_queued() -> None:
    core = Notes()
    frontend = Frontend(core, NoTokenizer(), LIMITS)
    with pytest.raises(ParameterError, match="detokenize"):
        queue(frontend)
    assert queue(frontend, detokenize=False) == ["r"]

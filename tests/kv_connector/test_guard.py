"""What goes wrong again and again is told in few lines, and each of them with a count."""

from __future__ import annotations

import re
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.config.kv_transfer import EXTRA, read_kv_transfer
from octavo.config.quoted import describe, said
from octavo.kv_connector import LATER, SilentConnector
from octavo.kv_connector.guard import Guarded, Troubles
from octavo.kv_connector.multi import Multi
from patience import patient


def test_one_kind_is_told_at_once_then_once_in_a_period_with_how_many_there_were(caplog: pytest.LogCaptureFixture):
    now = 0.0
    troubles = Troubles("there", clock=lambda: now)
    for number in range(5):
        troubles.tell(f"read OSError /a/b{number}", f"read {number}")
    troubles.tell("write OSError", "write 0")
    assert [record.message for record in caplog.records] == [
        f"kv_connector there: {way} 0" for way in ("read", "write")
    ]
    now = 61.0
    troubles.tell("read OSError /a/b7", "read 7")
    assert caplog.records[2].message == "kv_connector there: read 7 (4 more like it since the last such line)"
    troubles.tell("read OSError /a/b8", "read 8")
    troubles.close()
    assert caplog.records[3].message == "kv_connector there: read 7 (1 more like it since the last such line)"
    assert len(caplog.records) == 4 and troubles.num == 8


class NoText(Exception):
    """One of a library whose message cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


def test_a_message_however_long_holds_nobody_up(caplog: pytest.LogCaptureFixture):
    """Its kind was found in quadratic time, with the interpreter held: every step waited for seconds."""
    error = OSError("body=" + "x" * 200_000)
    started = time.thread_time()
    Troubles("there").tell(f"save {said(error)}", describe(error))
    Troubles("there").tell(f"save {error}", "as it is")
    assert time.thread_time() - started < patient(1)
    assert max(map(len, caplog.messages)) < 400


def test_an_error_without_a_text_is_told_by_its_name():
    try:
        raise NoText
    except NoText as error:
        told = describe(error)
    assert re.fullmatch(r"NoText: \(its text cannot be had: ValueError\) at test_guard.py:\d+", told)
    assert (said(KeyboardInterrupt()), said(OSError("a\nb  c"))) == ("KeyboardInterrupt", "OSError: a b c")


def test_where_each_is_told_none_is_counted(caplog: pytest.LogCaptureFixture):
    troubles = Troubles("there", period=0)
    for _ in range(3):
        troubles.tell("load", "gone")
    troubles.close()
    assert [record.message for record in caplog.records] == ["kv_connector there: gone"] * 3


def test_the_children_of_a_multi_take_as_long_as_it_says():
    host = {"kv_connector": "host", "kv_role": "kv_both", EXTRA: {"cpu_bytes_to_use": "4M"}}
    given = {"kv_connector": "multi", "kv_role": "kv_both", "kv_transfer_timeout": 7, EXTRA: {"connectors": [host]}}
    assert [child.timeout for child in Multi(read_kv_transfer(given))._transfers] == [7.0]


def test_C_8_a_look_up_that_ends_while_another_request_asks_is_no_answer_to_it(monkeypatch: pytest.MonkeyPatch):
    """It would be told of tokens that the store has of another prompt, and read blocks that nobody has filled."""
    gate, inner = threading.Event(), SilentConnector()
    requests: dict[str, Any] = {name: SimpleNamespace(request_id=name) for name in ("has 64", "has none")}

    def finds(request: Any, num_local: int) -> int:
        assert gate.wait(60)
        return 64 if request.request_id == "has 64" else 0

    inner.match = finds  # type: ignore[method-assign]
    guarded = Guarded(inner, "somebody's", lookup=60.0)
    assert guarded.match(requests["has 64"], 0) is LATER
    looking: Any = guarded._looking
    ends, num_looks = looking.ends, 0

    def ends_behind_the_first_look(seconds: float = 0.0) -> bool:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 1:
            return False
        gate.set()
        return bool(ends(60.0))

    monkeypatch.setattr(looking, "ends", ends_behind_the_first_look)
    assert guarded.match(requests["has none"], 0) in (LATER, 0)
    gate.set()
    for name, count in (("has 64", 64), ("has none", 0)):
        while (found := guarded.match(requests[name], 0)) is LATER:
            guarded.wait(0.01)
        assert found == count

"""What goes wrong again and again is told in few lines, and each of them with a count."""

from __future__ import annotations

import pytest

from octavo.config.kv_transfer import EXTRA, read_kv_transfer
from octavo.kv_connector.guard import Troubles
from octavo.kv_connector.multi import Multi


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

"""Names of blocks that every process gives alike that has the same secret and the same cache."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from octavo.sched.identity import CacheIdentity
from octavo.sched.kv_manager import KVManager
from sched_harness import full, make_request

PROMPT = list(range(100, 120))
IDENTITY = CacheIdentity(numerics_id="n", model="m", cache_dtype="bfloat16", cache="c", mods="", weights_version="")
SCRIPT = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from test_identity import names
print(json.dumps([name.hex() for name in names(secret=sys.argv[2].encode())]))
"""


def names(identity: CacheIdentity = IDENTITY, *, secret: bytes = b"secret", salt: str = "") -> list[bytes]:
    request = make_request(PROMPT, salt=salt)
    KVManager((full(),), 9, secret=secret, identity=identity).name_blocks(request)
    assert len(request.block_hashes) == 5
    return request.block_hashes


def test_two_processes_with_one_secret_name_blocks_alike_and_with_two_share_none():
    def ask(secret: str) -> set[str]:
        command = [sys.executable, "-c", SCRIPT, json.dumps(sys.path), secret]
        return set(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))

    assert ask("secret") == {name.hex() for name in names()}
    assert not ask("another") & {name.hex() for name in names()}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CacheIdentity)])
def test_each_part_alone_changes_every_name(field):
    other = dataclasses.replace(IDENTITY, **{field: getattr(IDENTITY, field) + "x"})
    assert not set(names(other)) & set(names())


def test_parts_do_not_run_together():
    shifted = dataclasses.replace(IDENTITY, numerics_id="nm", model="")
    assert shifted.encode() != IDENTITY.encode() and not set(names(shifted)) & set(names())


def test_a_salt_changes_every_name_and_so_does_no_secret():
    assert not set(names(salt="tenant")) & set(names())
    assert not set(names(secret=b"")) & set(names(secret=b""))

"""What an engine with a connector keeps once it is closed and dropped: nothing, and nobody needs to look for cycles."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from engine_checks import GOOD_PROMPT, GREEDY
from insides import runner_of
from octavo import LLM

EXTRA = "kv_connector_extra_config"
BOTH = {"kv_role": "kv_both"}


def configs(folder: Path) -> dict[str, dict[str, Any]]:
    host = {"kv_connector": "host", **BOTH, EXTRA: {"cpu_bytes_to_use": "4M"}}
    behind = {"kv_connector": "host", **BOTH, EXTRA: {"cpu_bytes_to_use": "4M", "storage_path": str(folder / "behind")}}
    files = {"kv_connector": "shared_storage", **BOTH, EXTRA: {"shared_storage_path": str(folder / "files")}}
    return {
        "host": host,
        "host with files": behind,
        "files": files,
        "both": {"kv_connector": "MultiConnector", **BOTH, EXTRA: {"connectors": [host, files]}},
        "p2p": {"kv_connector": "p2p", **BOTH, "kv_port": 0},
    }


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Python's collector of cycles rests."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", configs(Path()))
@pytest.mark.usefixtures("no_collections")
def test_the_cache_goes_with_the_engine(name: str, tmp_path: Path) -> None:
    """Its threads' work referred to the connector that held them, so the memory waited for the collector."""
    fields: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 64}
    llm = LLM(**fields, kv_transfer_config=configs(tmp_path)[name])
    llm.generate([GOOD_PROMPT * 9, GOOD_PROMPT * 9], GREEDY, use_tqdm=False)
    pool = runner_of(llm.engine)._pool
    memory, owner = StorageWeakRef(pool.buffer.untyped_storage()), weakref.ref(pool)
    del pool
    llm.close()
    del llm
    assert owner() is None and memory.expired()

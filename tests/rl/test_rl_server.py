"""RL.N10: a converted model compared with a running server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from octavo import rl
from rl_rig import random_ids, tiny

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))

from server_rig import RunningServer


def test_RL_N10_assert_same_with_a_server() -> None:
    """The server prints log-probabilities so that they come back in bits; one of another dtype is caught."""
    sequences = random_ids(40, 9, 300, vocab_size=4096)
    with RunningServer("--dtype", "float32") as server:
        url = f"http://127.0.0.1:{server.port}"
        assert rl.assert_same(rl.convert(tiny(torch.float32)), url, sequences) == 39 + 8 + 299
        assert rl.assert_same(rl.convert(tiny(torch.float32)), f"{url}/") == 32
        with pytest.raises(rl.DifferenceError, match=r"of 346 log-probabilities differ, by at most 0\."):
            rl.assert_same(rl.convert(tiny(torch.bfloat16)), url, sequences)
        with pytest.raises(ValueError, match="answered 404"):
            rl.assert_same(rl.convert(tiny()), f"{url}/nowhere")

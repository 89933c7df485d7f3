"""What a server logs of a trainer's moves, and of its own end."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from safetensors.torch import load_file, save_file

from octavo.checkpoint.hub import find_model
from patience import patient
from server_rig import RunningServer

TINY = find_model("octavo-tiny", None, None)
MOVES = ("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/start_weight_update")


def test_RL_W9_moves_are_logged_with_their_status_and_a_stop_loses_no_weights(tmp_path: Path) -> None:
    weights = {name: weight * 1.25 for name, weight in load_file(TINY / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors")
    with RunningServer("--dtype", "bfloat16", "--max-model-len", "256", "--log-level", "info") as server:
        server.wait_ready()
        for path in MOVES:
            assert server.post(path, {}).status == 200, path
        came = server.post("/update_weights", {"update_info": {"path": str(tmp_path), "colour": "red"}})
        assert (came.status, came.json()["warnings"]) == (200, ["update_info.colour: unknown field, ignored"])
        assert server.post("/finish_weight_update", {"weight_version": "mine"}).status == 200
        assert server.post("/finish_weight_update", {}).status == 409
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(patient(60)) == 0
        logged = server.stderr()
    for path in (*MOVES, "/update_weights", "/finish_weight_update"):
        assert f"route={path} status=200" in logged, path
    assert re.search(r"cache holds \d+ tokens: [\d.]+ requests of max_model_len=256\n", logged)
    assert "route=/finish_weight_update status=409" in logged and "status=499" not in logged
    assert "were lost" not in logged and " ERROR " not in logged

"""TRL's asynchronous GRPO over Octavo without NCCL: weights by any of Octavo's transports.

    octavo serve MODEL --port 8000 --logprobs-mode processed_logprobs --weight-transfer-config '{"backend": "gloo"}'

    trainer = AsyncGRPOTrainer(..., weight_transfer=OctavoWeights("http://127.0.0.1:8000", "gloo"))

Where NCCL is there, `octavo serve` answers TRL's own client as well, and this is not needed.
"""

from __future__ import annotations

import itertools
import urllib.request
from collections.abc import Iterator

import torch

from octavo import rl


class OctavoWeights:
    """trl.experimental.async_grpo's WeightTransferProtocol."""

    def __init__(self, url: str, backend: str = "gloo") -> None:
        """`url`: of `octavo serve`; backend: as its --weight-transfer-config."""
        self.url, self._sender = url.rstrip("/"), rl.Sender(url, backend)
        self._versions = itertools.count(1)

    def init_weight_transfer(self) -> None:
        """The sender meets its engine at the first update."""

    def pause(self) -> None:
        """Freeze what runs: its tokens stay, and are computed again under the new weights."""
        self._post("/pause?mode=keep")

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """One update, all or nothing."""
        self._sender.send(iterator, f"update-{next(self._versions)}")

    def resume(self) -> None:
        """Go on."""
        self._post("/resume")

    def destroy(self) -> None:
        """Leave the group."""
        self._sender.close()

    def _post(self, path: str) -> None:
        urllib.request.urlopen(urllib.request.Request(self.url + path, b"", method="POST")).close()

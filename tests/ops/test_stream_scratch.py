"""StreamScratch: launches of two streams share nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from octavo.ops.compile import stream_scratch
from octavo.ops.compile.stream_scratch import StreamScratch


def test_launches_on_two_streams_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine rehearses its graphs on a stream of its own, while another one of the process decodes."""
    state, device = SimpleNamespace(stream=0, capturing=False), torch.device("cpu")
    monkeypatch.setattr(stream_scratch, "_stream", lambda device: state.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    scratch = StreamScratch(lambda device: torch.zeros(3, device=device))
    state.stream, state.capturing = 7, True
    with pytest.raises(RuntimeError, match="a capture on cpu needs scratch memory of launches before it: rehearse"):
        scratch.of(device)
    state.stream, state.capturing = 0, False
    of_steps = scratch.of(device)
    state.stream, state.capturing = 7, True
    assert scratch.of(device) is of_steps, "what a capture makes has no zeros before the graph runs"
    state.capturing = False
    rehearsed = scratch.of(device)
    assert rehearsed.data_ptr() != of_steps.data_ptr()
    state.capturing = True
    assert scratch.of(device) is rehearsed
    state.stream, state.capturing = 0, False
    assert scratch.of(device) is of_steps


def test_a_device_without_streams_has_one() -> None:
    scratch = StreamScratch(lambda device: torch.zeros(3, device=device))
    assert scratch.of(torch.device("cpu")) is scratch.of(torch.device("cpu"))

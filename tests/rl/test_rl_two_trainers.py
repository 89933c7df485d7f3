"""A trainer whose update is refused, or which takes back one that never began, touches nothing of another trainer's."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import pytest

from octavo import LLM
from octavo.rl import Sender, WeightSource, sender
from octavo.rl.session import WeightConflictError, WeightUpdateError
from weights_rig import other_weights

FIELDS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256}


class _Local(sender._Server):
    """The calls that a server would get, made to an engine of this process."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def begin_update(self, request: dict[str, Any]) -> Any:
        return functools.partial(self.llm.update_weights, request)

    def abort_weight_update(self, *, session: str | None = None) -> None:
        self.llm.abort_weight_update(session=session)


def test_a_refused_trainer_ends_its_own_group_and_not_the_others_update() -> None:
    with LLM(**FIELDS, weight_transfer_config={"backend": "gloo", "timeout": 20}) as llm:
        trainer = Sender(llm, "gloo", timeout=20)
        trainer.send(WeightSource(other_weights(2)), "1")
        trainer._engine = _Local(llm)
        other = llm.start_weight_update()  # of another trainer, which is about to tell of a folder
        with pytest.raises(WeightUpdateError):
            trainer.send(WeightSource(other_weights(3)), "2")
        until = time.monotonic() + 2.5  # looks at trainers stand a second apart
        while time.monotonic() < until:
            assert llm.weight_state()["state"] == "open"
            time.sleep(0.1)
        assert not llm.weight_state()["stats"]["num_failed_updates"]
        llm.abort_weight_update(session=other)


def test_an_abort_of_a_session_that_is_not_open_cuts_no_meeting() -> None:
    with LLM(**FIELDS, weight_transfer_config={"backend": "gloo", "timeout": 3}) as llm:
        told = list[str]()

        def meet() -> None:
            where = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
            try:
                llm.init_weight_transfer_engine({"init_info": where})
            except Exception as error:
                told.append(str(error))

        meeting = threading.Thread(target=meet)
        meeting.start()
        time.sleep(0.5)
        with pytest.raises(WeightConflictError):
            llm.abort_weight_update(session="never opened")
        meeting.join()
        assert told and "abort" not in told[0]

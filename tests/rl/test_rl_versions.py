"""Which weights drew which token, and what becomes of requests and blocks when the weights change."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.frontend.control import PauseOrder, WrongStateError
from octavo.ops.gemm import LinearWeight
from octavo.request.outputs import RequestOutput, WeightsSpan
from octavo.rl import Sender, WeightSource
from octavo.rl.session import WeightConflictError, WeightUpdateError
from octavo.rl.transport.local import Handed
from patience import patient
from weights_rig import answers, give, other_weights, params, prompts

FIELDS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256, "weight_transfer_config": {"backend": "disk"}}
WEIGHTS = [other_weights(seed) for seed in range(3)]


def _long(**own: Any) -> SamplingParams:
    return params(**{"max_tokens": 24, "seed": 7} | own)


def _steps_between(llm: LLM, num_steps: int, change: Any, **own: Any) -> RequestOutput:
    """One request, whose engine is changed behind `num_steps` steps."""
    engine, last = llm.engine, None
    engine.add("x", list(range(3, 60)), _long(**own))
    for _ in range(num_steps):
        engine.step()
    change()
    while engine.has_unfinished:
        for output in engine.step():
            last = output
    assert last is not None
    return last


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**FIELDS) as made:
        yield made


DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}


@pytest.mark.parametrize("own", [{}, {"async_scheduling": True}, DRAFTS], ids=["plain", "async", "drafts"])
def test_tokens_say_which_weights_drew_them(own: dict[str, Any]) -> None:
    """RL.V1, RL.V3: exactly, with a step in flight or drafts too; what is computed again keeps the stamps of before."""
    with LLM(**FIELDS, **own) as llm:
        give(llm, WEIGHTS[0], "a")
        output = _steps_between(llm, 5, lambda: give(llm, WEIGHTS[1], "b"))
        spans = output.outputs[0].weight_versions
        assert [span.version for span in spans] == ["a", "b"] and (spans[0].start, spans[1].end) == (0, 24)
        assert spans[0].end == spans[1].start > 0
        drawn = spans[0].end
        again = [*output.prompt_token_ids, *output.outputs[0].token_ids[:drawn]]
        with LLM(**FIELDS) as fresh:
            give(fresh, WEIGHTS[1])
            rest = answers(fresh, [{"prompt_token_ids": again}], max_tokens=24 - drawn, seed=7)[0]
        assert rest[0] == output.outputs[0].token_ids[drawn:], "as a fresh request's"
        before = answers(llm)
        llm.update_weight_version("c")
        assert answers(llm) == before and llm.get_weight_version() == "c"


def test_requests_that_go_on_with_old_keys_and_values_say_so(llm: LLM) -> None:
    """RL.V3: `keep_kv` flags what is mixed, `abort` ends what runs with what it has, and none of it is found later."""
    give(llm, WEIGHTS[0], "a")
    kept = _steps_between(llm, 4, lambda: give(llm, WEIGHTS[1], "b", on_running="keep_kv")).outputs[0]
    first, second = kept.weight_versions
    assert (first.version, first.mixed, second.version, second.mixed) == ("a", False, "b", True)
    prompt = [{"prompt_token_ids": list(range(3, 60)) + list(kept.token_ids)}]
    after = answers(llm, prompt)
    with LLM(**FIELDS) as fresh:
        give(fresh, WEIGHTS[1])
        assert answers(fresh, prompt) == after, "blocks of two versions are found by nobody"
    ended = _steps_between(llm, 4, lambda: give(llm, WEIGHTS[2], "c", on_running="abort")).outputs[0]
    assert ended.finish_reason == "abort" and 0 < len(ended.token_ids) < 24
    assert ended.weight_versions == [WeightsSpan("b", 0, len(ended.token_ids))]
    stats = llm.weight_state()["stats"]
    assert (stats["num_kept"], stats["num_aborted"]) == (1, 1)


def test_streams_say_the_version_of_what_is_new(llm: LLM) -> None:
    """RL.V1: spans of a delta count from the completion's first token."""
    give(llm, WEIGHTS[0], "a")
    spans: list[WeightsSpan] = []
    for index, output in enumerate(llm.stream({"prompt_token_ids": [5, 6, 7]}, _long(max_tokens=6))):
        spans += output.outputs[0].weight_versions
        if index == 2:
            give(llm, WEIGHTS[1], "b")
    assert [span.version for span in spans] == ["a"] * 3 + ["b"] * 3
    assert [(span.start, span.end) for span in spans] == [(i, i + 1) for i in range(6)]


def test_no_answer_under_new_weights_reads_old_blocks(llm: LLM) -> None:
    """RL.V2: random prompts and updates, without any reset, against engines that never had other weights."""
    rng, asked = random.Random(4), prompts(40, 70, 100, 33)
    cold = []
    for weights in WEIGHTS:
        with LLM(**FIELDS, enable_prefix_caching=False) as fresh:
            give(fresh, weights)
            cold.append({len(p["prompt_token_ids"]): answers(fresh, [p])[0] for p in asked})
    for turn in range(8):
        which = rng.randrange(3)
        give(llm, WEIGHTS[which], "one label for all")
        for _ in range(2):
            prompt = rng.choice(asked)
            assert answers(llm, [prompt])[0] == cold[which][len(prompt["prompt_token_ids"])], (turn, which)


def test_weights_seen_before_find_their_blocks(llm: LLM) -> None:
    """RL.V4: whatever the label."""
    prompt = [{"prompt_token_ids": [(5 * i) % 190 + 3 for i in range(120)]}]

    def num_cached() -> int:
        return llm.generate(prompt, _long(max_tokens=1), use_tqdm=False)[0].num_cached_tokens or 0

    give(llm, WEIGHTS[0], "x")
    num_cached()
    give(llm, WEIGHTS[1], "y")
    assert num_cached() == 0
    give(llm, WEIGHTS[0], "z")
    assert num_cached() == 112


def test_an_update_beside_threads_that_generate(llm: LLM) -> None:
    """RL.P1: nobody's request is lost, and each token's version is one that there was."""
    found: list[RequestOutput] = []

    def run(index: int) -> None:
        found.extend(llm.generate({"prompt_token_ids": [3 + index, 9]}, _long(max_tokens=60), use_tqdm=False))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(6):
        give(llm, WEIGHTS[turn % 3], f"turn {turn}")
    for thread in threads:
        thread.join()
    assert [len(output.outputs[0].token_ids) for output in found] == [60] * 4
    for output in found:
        spans = output.outputs[0].weight_versions
        assert spans[0].start == 0 and spans[-1].end == 60
        assert all(a.end == b.start and a.version != b.version for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_without_room_for_both_a_failed_update_stops_the_engine_until_a_whole_one(quantization: str | None) -> None:
    """RL.W1: nothing is computed with half of the weights; requests say why; a whole update repairs all of it."""
    fields = FIELDS | {"weight_transfer_config": {"backend": "disk", "staging": "none"}, "quantization": quantization}
    with LLM(**fields) as llm, LLM(**FIELDS | {"quantization": quantization}) as fresh:
        give(fresh, WEIGHTS[1])
        wanted = answers(fresh)
        give(llm, WEIGHTS[1], "1")
        assert answers(llm) == wanted, "received in place"
        names = list(WEIGHTS[0])

        def breaks() -> None:
            with pytest.raises(WeightUpdateError, match="NaN or Inf"), llm.weights() as load:
                for name in names:
                    nan = name == names[-1]
                    load(name, WEIGHTS[0][name] * (float("nan") if nan else 1))
                    assert llm.weight_state()["state"] in ("open", "held")

        ended = _steps_between(llm, 3, breaks).outputs[0]
        assert (ended.finish_reason, ended.stop_reason) == ("error", "weights_broken")
        with pytest.raises(WrongStateError, match="an update had overwritten some weights when it failed"):
            answers(llm)
        with pytest.raises(WeightConflictError, match="partial=True needs whole weights"):
            llm.start_weight_update(partial=True)
        give(llm, WEIGHTS[1], "2")
        assert answers(llm) == wanted


def test_a_session_that_went_silent_ends_for_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """RL.W8: its trainer has overwritten a weight and gone; nobody starts another one, and nobody waits for ever."""
    fields = FIELDS | {"weight_transfer_config": {"backend": "disk", "staging": "none"}}
    name = "model.norm.weight"
    with LLM(**fields) as llm, ThreadPoolExecutor(2) as pool:
        llm.start_weight_update()
        with Handed({name: WEIGHTS[0][name]}) as update_info:
            llm.update_weights({"update_info": update_info})
        assert llm.weight_state()["state"] == "held"
        waiting = [pool.submit(llm.generate, [[5, 6, 7]], _long(), use_tqdm=False) for _ in range(2)]
        while llm.engine.scheduler.num_unfinished < 2:  # who comes later is refused
            threading.Event().wait(0.001)
        monkeypatch.setattr(llm.engine.core.weights, "_hold_timeout", 0.3)  # type: ignore[attr-defined]
        for each in waiting:
            ended = each.result(patient(20))[0].outputs[0]
            assert (ended.finish_reason, ended.stop_reason) == ("error", "weights_broken")
        assert llm.weight_state()["state"] == "ready"
        assert "nothing was heard of it for 0.3 s" in llm.weight_state()["lost_because"]
        with pytest.raises(WeightConflictError, match="needs an open update, and there is none"):
            llm.finish_weight_update()
        llm.engine.add("came meanwhile", [5, 6, 7], _long())
        (late,) = llm.engine.step()
        assert late.outputs[0].stop_reason == "weights_broken"
        give(llm, WEIGHTS[1])
        assert len(answers(llm)) == 3


def test_a_pause_that_waits_is_over_with_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """RL.S1, RL.W8: an update breaks while a pause waits for requests; they end, those behind the pause too."""
    fields = FIELDS | {"weight_transfer_config": {"backend": "disk", "staging": "none"}}
    name, ended = "model.norm.weight", dict[str, object]()
    with LLM(**fields) as llm:
        engine = llm.engine
        engine.add("ran", [5, 6, 7], _long())
        engine.step()
        assert not engine.ask("pause", PauseOrder(wait=True)).settled
        engine.add("came behind", [5, 6, 7], _long())
        llm.start_weight_update()
        with Handed({name: WEIGHTS[0][name]}) as update_info:
            llm.update_weights({"update_info": update_info})
        with monkeypatch.context() as patch:
            patch.setattr(engine.core.weights, "_hold_timeout", 0.0)  # type: ignore[attr-defined]
            assert llm.weight_state()["lost_because"]
        while engine.has_unfinished:
            ended |= {each.request_id: each.outputs[0].stop_reason for each in engine.step() if each.finished}
        assert ended == {"ran": "weights_broken", "came behind": "weights_broken"}
        standing = engine.ask("standing")
        assert standing.settled and standing.paused
        give(llm, WEIGHTS[1])
        llm.resume_generation()
        assert len(answers(llm)) == 3


@pytest.mark.parametrize("staging", ["none", "host"])
def test_an_open_update_keeps_the_memory_of_the_weights(staging: str) -> None:
    """RL.S3: a sleep would discard what has come in place, and what is to be applied has nowhere to go."""
    with LLM(**FIELDS | {"weight_transfer_config": {"backend": "disk", "staging": staging}}) as llm:
        give(llm, WEIGHTS[1])
        wanted = answers(llm)
        give(llm, WEIGHTS[0])
        with llm.weights() as load:
            for index, (name, tensor) in enumerate(WEIGHTS[1].items()):
                load(name, tensor)
                if index == 3:
                    llm.sleep(1)
                    with pytest.raises(WrongStateError, match="sleep: an update of the weights is open: finish or"):
                        llm.sleep(2)
                    assert llm.wake_up()
        assert answers(llm) == wanted


def test_addresses_and_what_no_checkpoint_holds_stay(llm: LLM) -> None:
    """RL.W3, RL.W7, RL.W11: over 20 updates no tensor of the model moves, and rotary tables keep their bytes."""
    model = _model(llm)
    where = _addresses(model)
    tables = {name: table.clone() for name, table in where.items() if "rotary" in name}
    sender = Sender(llm, "local")
    for turn in range(20):
        sender.send(WeightSource(WEIGHTS[turn % 3]))
    after = _addresses(model)
    assert {name: t.data_ptr() for name, t in after.items()} == {name: t.data_ptr() for name, t in where.items()}
    assert tables and all(torch.equal(after[name], table) for name, table in tables.items())


def _model(llm: LLM) -> torch.nn.Module:
    model = llm.engine.core._executor._worker._model  # type: ignore[attr-defined]
    assert isinstance(model, torch.nn.Module)
    return model


def _addresses(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {}
    for path, layer in model.named_modules():
        for name, value in vars(layer).items():
            if isinstance(value, LinearWeight | Tensor):
                found[f"{path}.{name}"] = value.storage if isinstance(value, LinearWeight) else value
    return found


def test_a_file_of_the_weights_and_a_session_agree(llm: LLM, tmp_path: Any) -> None:
    """RL.W5: the same tensors from disk."""
    give(llm, WEIGHTS[2])
    wanted = answers(llm)
    give(llm, WEIGHTS[0])
    save_file(WEIGHTS[2], tmp_path / "model.safetensors")
    llm.start_weight_update()
    llm.update_weights({"update_info": {"path": str(tmp_path)}})
    llm.finish_weight_update()
    assert answers(llm) == wanted
    with pytest.raises(WeightUpdateError, match="nothing: cannot read: No such file"):
        llm.start_weight_update()
        llm.update_weights({"update_info": {"path": str(tmp_path / "nothing")}})

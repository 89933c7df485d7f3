"""Weights from a trainer's process: the same weights by every transport, and what is left when the trainer dies."""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import LLM
from octavo.checkpoint.loader import Target
from octavo.rl import Sender, WeightSource
from octavo.rl import sender as sender_module
from octavo.rl.plan import Incoming, Staged
from octavo.rl.session import WeightConflictError, WeightTransferError, WeightUpdateError
from octavo.rl.transport import split
from octavo.rl.transport.extent import Rooms
from patience import patient
from rl_rig import TINY
from weights_rig import Weights, answers, old_weights, other_weights

SENDER = Path(__file__).parent / "weight_sender.py"
FIELDS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**FIELDS, weight_transfer_config={"backend": "gloo", "timeout": 20}) as made:
        yield made


@pytest.fixture(scope="module")
def new() -> Weights:
    return other_weights(2)


class Trainer:
    """A process of weight_sender.py."""

    def __init__(self, how: str, packed: str = "packed", *more: str) -> None:
        command = [sys.executable, str(SENDER), TINY, how, packed, *more]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def kill_when_it_has_stopped(self) -> None:
        self.hear()
        self.process.send_signal(signal.SIGKILL)

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        heard: dict[str, Any] = json.loads(self.process.stdout.readline())
        return heard


@pytest.mark.parametrize("packed", ["packed", "single"])
def test_a_trainers_process_sends_by_gloo(llm: LLM, packed: str) -> None:
    """RL.W5: rank 0 broadcasts, in buffers of many tensors and one by one."""
    before = answers(llm)
    with Trainer("whole", packed) as trainer:
        llm.init_weight_transfer_engine({"init_info": trainer.hear()})
        llm.start_weight_update()
        told = llm.update_weights({"update_info": trainer.hear()})
        llm.finish_weight_update("same")
        assert trainer.process.wait(patient(30)) == 0
    assert told["num_tensors"] == 79 and answers(llm) == before
    llm.shutdown_weight_transfer_engine()


@pytest.mark.parametrize("backend", ["local", "shm", "gloo", "disk"])
def test_a_sender_brings_the_same_weights_by_every_transport(
    llm: LLM, new: Weights, backend: str, tmp_path: Path
) -> None:
    """RL.W5: those that hand over, share memory, broadcast and write files; twice, and back again."""
    before, wanted = answers(llm), None
    sender = Sender(llm, backend, timeout=20, folder=tmp_path if backend == "disk" else None)
    for version in ("1", "2"):
        sender.send(WeightSource(new), version)
        wanted = wanted or answers(llm)
        assert answers(llm) == wanted != before and llm.get_weight_version() == version
    sums = llm.get_weight_checksums()
    sender.send(WeightSource(old_weights()), "0")
    assert answers(llm) == before
    sender.close()
    with LLM(**FIELDS, weight_transfer_config={"backend": "disk"}) as other:
        with other.weights() as load:
            for name, tensor in new.items():
                load(name, tensor)
        assert answers(other) == wanted
        assert other.get_weight_checksums() | {"weight_version": ""} == sums | {"weight_version": ""}


@pytest.mark.parametrize("backend", ["local", "shm", "gloo"])
def test_tensors_may_come_one_by_one_in_the_same_memory(
    llm: LLM, new: Weights, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RL.W5: as a trainer gathers them; and what its iterator raises ends the update."""
    monkeypatch.setattr(sender_module, "BUFFER_BYTES", 1 << 20)
    before, sender = answers(llm), Sender(llm, backend, timeout=20)
    sender.send(WeightSource(new), "1")
    wanted = answers(llm)
    sender.send(WeightSource(old_weights()), "0")
    memory = torch.empty(max(each.numel() for each in new.values()))

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, each in new.items():
            own = memory[: each.numel()].view(each.shape)
            yield name, own.copy_(each)

    sender.send(gathered(), "2")
    assert answers(llm) == wanted != before

    def fails() -> Iterator[tuple[str, torch.Tensor]]:
        yield from itertools.islice(new.items(), 30)
        raise KeyError("a trainer's own")

    with pytest.raises(KeyError, match="a trainer's own"):
        sender.send(fails(), "3")
    assert llm.weight_state()["state"] == "ready" and answers(llm) == wanted
    sender.send(old_weights().items(), "0")
    assert answers(llm) == before
    sender.close()


@pytest.mark.parametrize("num_times", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_trainer_killed_in_the_middle_leaves_the_old_weights(llm: LLM, num_times: int) -> None:
    """RL.W8: at random points; the error names the peer and a tensor, and a new group needs no new engine."""
    before, rng = answers(llm), random.Random(num_times)
    for _ in range(num_times):
        with Trainer("stops", rng.choice(["packed", "single"]), str(rng.randrange(79))) as trainer:
            llm.init_weight_transfer_engine({"init_info": trainer.hear()})
            info = trainer.hear()
            llm.start_weight_update()
            killer = threading.Thread(target=trainer.kill_when_it_has_stopped)
            killer.start()
            began = time.monotonic()
            with pytest.raises(WeightTransferError, match=r"rank 0 of 2 at 127\.0\.0\.1:\d+ failed.*while model\."):
                llm.update_weights({"update_info": info})
            assert time.monotonic() - began < patient(20)
            killer.join()
        assert llm.weight_state()["state"] == "ready" and answers(llm) == before
    with pytest.raises(WeightUpdateError, match="there is no group, or it failed"):
        llm.start_weight_update()
        llm.update_weights({"update_info": info})


def test_a_trainer_that_is_silent_meets_the_deadline() -> None:
    """RL.W8: nobody there, and one that stops sending without going."""
    with LLM(**FIELDS, weight_transfer_config={"backend": "gloo", "timeout": 1.0}) as llm:
        nobody = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
        with pytest.raises(WeightTransferError, match=r"rank 0 of 2 at 127.0.0.1:1 was not met within 1 s"):
            llm.init_weight_transfer_engine({"init_info": nobody})
    with LLM(**FIELDS, weight_transfer_config={"backend": "gloo", "timeout": 60.0}) as llm:  # in which it surely meets
        before = answers(llm)
        with Trainer("stops", "packed", "3") as trainer:
            llm.init_weight_transfer_engine({"init_info": trainer.hear()})
            receiver = llm.engine.core._executor._worker._calls._receiver  # type: ignore[attr-defined]
            receiver._transport._options = {"timeout": 1.0}
            info = trainer.hear()
            llm.start_weight_update()
            with pytest.raises(WeightTransferError, match="was silent for 1 s, while model"):
                llm.update_weights({"update_info": info})
        assert answers(llm) == before


def test_what_is_refused_waits_for_no_further_buffer() -> None:
    """RL.W8: the next one is asked for already when the first one's values are looked at."""
    with LLM(**FIELDS, weight_transfer_config={"backend": "gloo", "timeout": 60.0}) as llm:
        before = answers(llm)
        with Trainer("spoils", "packed", "1") as trainer:
            llm.init_weight_transfer_engine({"init_info": trainer.hear()})
            llm.start_weight_update()
            began = time.monotonic()
            with pytest.raises(WeightUpdateError, match="holds NaN or Inf"):
                llm.update_weights({"update_info": trainer.hear()})
            assert time.monotonic() - began < 60  # which it would wait for a further buffer
            with pytest.raises(WeightUpdateError, match="there is no group, or it failed"):
                llm.start_weight_update()
                llm.update_weights({"update_info": {"names": [], "dtype_names": [], "shapes": []}})
        assert answers(llm) == before


def test_masters_are_rounded_before_they_travel(llm: LLM, new: Weights) -> None:
    """RL.W6: where the engine rounds them, by its own word: half the bytes, and the bits of a file of masters."""
    sender = Sender(llm, "gloo", timeout=20)
    sender.send(WeightSource(new), "1")
    wanted, start = answers(llm), llm.weight_state()["stats"]["num_received_bytes"]
    sender.send(WeightSource(new), "2")
    received = llm.weight_state()["stats"]["num_received_bytes"] - start
    vectors = sum(each.nbytes for each in new.values() if each.dim() == 1)  # norms, which an engine has in float32
    assert received == vectors + sum(each.nbytes // 2 for each in new.values() if each.dim() > 1)
    sender._dtypes = {}
    sender.send(WeightSource(new), "3")
    assert answers(llm) == wanted and llm.weight_state()["stats"]["num_received_bytes"] - start > 1.9 * received
    sender.send(WeightSource(old_weights()), "0")
    sender.close()


def test_RL_W2_a_sender_is_given_each_weight_once_and_no_whole_numbers(llm: LLM, new: Weights) -> None:
    before = answers(llm)
    name, sender = next(iter(new)), Sender(llm, "local")
    twice = [*new.items(), (name, new[name] + 1)]
    with pytest.raises(WeightUpdateError, match=f"{name}: came before in this update"):
        sender.send(iter(twice), "twice")
    with pytest.raises(WeightUpdateError, match=r"counter: expected floating-point values, got torch\.int64"):
        sender.send(iter([*new.items(), ("counter", torch.tensor(3))]), "counts")
    assert answers(llm) == before


@pytest.fixture
def team() -> Iterator[None]:
    """Torch shares out what is large among threads, whatever the machine and its environment say."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
@pytest.mark.parametrize("num_rows", [1, 1 << 11])
def test_a_tensor_is_gathered_by_the_thread_that_sends(team: None, num_rows: int) -> None:
    """A thread's team of OpenMP is as many as there are cores: where others use those, each copy waits for its last."""
    value = torch.randn(num_rows, 512, generator=torch.Generator().manual_seed(0))
    source, threads, gathered = WeightSource({"a": value}, torch.bfloat16), list[set[str]](), list[Tensor]()

    def gather() -> None:  # in a thread that has no team yet
        threads.append(set(os.listdir("/proc/self/task")))
        gathered.append(source.gather("a"))
        source.gather_into("a", into)
        threads.append(set(os.listdir("/proc/self/task")))

    into = torch.empty(2 * value.numel(), dtype=torch.uint8)
    thread = threading.Thread(target=gather)
    thread.start()
    thread.join()
    assert threads[1] <= threads[0], "one of an earlier test may have ended"
    for found in (gathered[0], into.view(torch.bfloat16).view(value.shape)):
        assert torch.equal(found, value.to(torch.bfloat16))


def test_a_source_rounds_to_what_is_narrower_alone() -> None:
    given = {
        "a.0.w": torch.randn(3, 5),
        "a.1.w": torch.randn(1, 7).bfloat16(),
        "b.w": torch.randn(3),
        "c": torch.ones(1),
    }
    source = WeightSource(given).rounded({"a.*.w": torch.bfloat16, "b.w": torch.float32})
    assert [each.dtype for each in source.incoming] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    assert torch.equal(source.gather("a.0.w"), given["a.0.w"].bfloat16())
    packed = sender_module._packed(source, source.incoming, "cpu")
    assert len(packed) == 30 + 14 + 12 + 4
    for (name, own), (each, sent) in zip(given.items(), split(packed, source.incoming), strict=True):
        assert each.name == name and torch.equal(sent, own.to(each.dtype)), name
    odd = WeightSource({"a": torch.ones(3).bfloat16(), "b": torch.randn(5)})  # begins in the middle of a word
    packed = sender_module._packed(odd, odd.incoming, "cpu")
    assert [torch.equal(sent, odd.tensors[each.name]) for each, sent in split(packed, odd.incoming)] == [True, True]


def test_a_senders_buffers_lie_where_its_last_ones_did() -> None:
    """RL.W4: memory that has its pages already; what is still on its way stays as it is."""
    source, rooms = WeightSource({"a": torch.ones(3), "b": torch.randn(5000)}), Rooms()
    first = sender_module._packed(source, source.incoming, "cpu", rooms)
    second = sender_module._packed(source, source.incoming, "cpu", rooms)
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2 and torch.equal(first, second)
    del first, second
    both = [sender_module._packed(source, source.incoming, "cpu", rooms) for _ in range(2)]
    assert {each.data_ptr() for each in both} == places


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"shm_name": "../../etc/passwd"}, "shm_name must be octavo-weights-"),
        ({"shm_name": "octavo-weights-" + "0" * 32}, "its sender may have gone"),
        ({}, "shm_name must be str"),
    ],
)
def test_shared_memory_is_read_by_name_and_size_alone(llm: LLM, info: dict[str, Any], words: str) -> None:
    """RL.W10: no path leaves the folder, and nothing is mapped or unpickled."""
    llm.init_weight_transfer_engine({"backend": "shm", "init_info": {}})
    llm.start_weight_update()
    with pytest.raises(WeightUpdateError, match=words):
        llm.update_weights({"update_info": {"names": [], "dtype_names": [], "shapes": [], **info}})


@pytest.mark.parametrize(("backend", "other"), [("nccl", "gloo"), ("ipc", "shm")])
def test_transports_of_a_gpu_say_so_on_a_cpu(llm: LLM, backend: str, other: str) -> None:
    """RL.W5."""
    with pytest.raises(WeightUpdateError, match=f"backend '{backend}' needs a GPU.*take '{other}'"):
        llm.init_weight_transfer_engine({"backend": backend, "init_info": {}})


def test_a_sender_keeps_its_connection_and_sees_when_its_server_has_closed_it() -> None:
    """Calls of an update are one connection; one that was closed meanwhile is made anew, and nothing is sent twice."""
    heard: list[tuple[int, str]] = []

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            heard.append((self.client_address[1], self.path))
            self.close_connection = len(heard) == 3  # and says nothing of it
            refuses = self.path.endswith("abort_weight_update")
            self.send_response(409 if refuses else 200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever, 0.01)
        sender = Sender(f"http://127.0.0.1:{server.server_address[1]}/behind/", "local")
        engine = sender._engine
        for _ in range(2):
            for each in range(2):
                engine.begin_update({"update_info": {}, "number": each}, each * 10**11)()
                assert engine._idle[-1].sock.gettimeout() == 2 * (60 + each * 100), "an answer may take as its bytes do"
            engine.finish_weight_update("1")
            assert engine._idle[-1].sock.gettimeout() == 120
            closed = engine._idle[-1].sock
            select.select([closed], [], [], patient(5) if len(heard) == 3 else 0)
        with pytest.raises(WeightUpdateError, match=r"/behind/abort_weight_update answered 409: \{\}"):
            engine.abort_weight_update()
        server.shutdown()
    ports, paths = zip(*heard, strict=True)
    assert len(set(ports[:3])) == 1 and len(set(ports[3:])) == 1 and ports[0] != ports[3]
    assert [path.rpartition("/")[2] for path in paths] == [
        *["update_weights", "update_weights", "finish_weight_update"] * 2,
        "abort_weight_update",
    ]
    with pytest.raises(WeightUpdateError, match=r"begins with http:// or https://, got '127\.0\.0\.1:8000'"):
        Sender("127.0.0.1:8000", "gloo")


def _answering(status: int, gathered: threading.Event, heard: list[tuple[str, bool]]) -> type[BaseHTTPRequestHandler]:
    """Answers with a status, once a first buffer was gathered, and says whether that was so."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            heard.append((self.path, gathered.wait(patient(5))))
            self.send_response(status)
            self.send_header("Content-Length", "15")
            self.end_headers()
            self.wfile.write(b'{"session":"a"}')

        def log_message(self, *_: object) -> None:
            pass

    return Answers


@pytest.mark.parametrize("refuses", [True, False])
def test_a_sender_gathers_while_its_server_answers_and_leaves_a_group_that_failed(refuses: bool) -> None:
    """RL.W4, RL.W8: one call is a whole update; what goes wrong at either end ends it at both."""
    gathered, heard, touched = threading.Event(), list[tuple[str, bool]](), list[str]()

    class Source(WeightSource):
        def gather(self, name: str) -> Tensor:
            gathered.set()
            if not refuses:
                raise RuntimeError("no gradient came")
            return super().gather(name)

    class Waits:
        check: Callable[[], None]

        def begin_broadcast(self, *_: object) -> Callable[[], None]:
            def wait() -> None:
                while True:
                    self.check()
                    time.sleep(0.001)

            return wait

        def close(self) -> None:
            touched.append("close")

    handler = _answering(409 if refuses else 200, gathered, heard)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever, 0.01)
        try:
            sender = Sender(f"http://127.0.0.1:{server.server_address[1]}", "gloo")
            sender._has_met, sender._group = True, Waits()  # type: ignore[assignment]
            expected = (WeightConflictError, "update_weights answered 409") if refuses else (RuntimeError, "grad")
            with pytest.raises(expected[0], match=expected[1]):
                sender.send(Source({"model.norm.weight": torch.zeros(3)}))
        finally:
            server.shutdown()
    assert heard == [("/update_weights", True), ("/abort_weight_update", True)] and touched == ["close"]


@pytest.mark.parametrize(("given", "order"), [(True, "qkv"), (True, "vkq"), (False, "qkv"), (False, "kqv")])
def test_values_stay_in_the_buffer_that_is_given_and_make_the_same_weights(given: bool, order: str) -> None:
    """Nothing is copied where a weight's tensors follow each other; what its sender uses again is copied."""
    sizes = {"q": 4, "k": 2, "v": 3}
    starts = dict(zip(sizes, (0, 4, 6), strict=True))
    plan: Any = SimpleNamespace(
        targets={name: Target("a.weight", starts[name], (rows, 8)) for name, rows in sizes.items()},
        shapes={"a.weight": (9, 8)},
        dtypes={"a.weight": torch.bfloat16},
        num_tensors={"a.weight": 3},
        known=lambda name: name,
        pieces=lambda name: (),
        kept_narrower=lambda parameter: False,
    )
    incoming = [Incoming(name, torch.bfloat16, (sizes[name], 8)) for name in order]
    buffer = torch.randn(9, 8).bfloat16().view(-1).view(torch.uint8)
    named = {each.name: tensor for each, tensor in split(buffer, incoming)}
    expected = torch.cat([named[name] for name in "qkv"])
    staged = Staged(plan, partial=False)
    for each in incoming:
        staged.put(each, named[each.name], given=given)
        staged.put(each, named[each.name].clone(), given=given)  # the same again
        with pytest.raises(WeightUpdateError, match="came before with other values"):
            staged.put(each, named[each.name] + 1)
    whole = staged._values["a.weight"]
    assert torch.equal(whole, expected) and whole.is_contiguous()
    is_in_buffer = whole.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert is_in_buffer == (given and order == "qkv")
    if not given:
        buffer.zero_()
        assert torch.equal(whole, expected)


def test_buffers_of_which_little_is_kept_are_let_go(llm: LLM, new: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters of float32 that a trainer sends as they are: a norm's few values would hold a whole buffer."""
    buffers_seen, held, sender = list[torch.UntypedStorage](), list[bool](), Sender(llm, "shm")
    put, apply = Staged.put, Staged.apply

    def seen(self: Staged, incoming: Incoming, tensor: Tensor, *, given: bool = False) -> None:
        buffers_seen.append(tensor.untyped_storage())
        put(self, incoming, tensor, given=given)

    def applied(self: Staged, *args: Any) -> None:
        addresses = {storage.data_ptr() for storage in buffers_seen}
        held.append(any(value.untyped_storage().data_ptr() in addresses for value in self._values.values()))
        apply(self, *args)

    monkeypatch.setattr(Staged, "put", seen)
    monkeypatch.setattr(Staged, "apply", applied)
    for _ in range(2):
        buffers_seen.clear()
        sender.send(WeightSource(new))
        assert len({storage.data_ptr() for storage in buffers_seen}) == 1
        sender._dtypes = {}  # as a sender that does not know what the engine rounds to
    sender.send(WeightSource(old_weights()), "0")
    sender.close()
    assert held[:2] == [True, False]

"""New weights for an engine on a GPU, by CUDA IPC and NCCL from another process; a pause that keeps 256 requests."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import TCPStore  # type: ignore[attr-defined]

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rl"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from octavo import LLM, SamplingParams
from octavo.bench.engine import dummy_model
from octavo.checkpoint.safetensors import Checkpoint
from octavo.rl import Sender, WeightSource
from octavo.rl.plan import Incoming
from octavo.rl.transport import ipc, split
from octavo.rl.transport.group import Group
from octavo.rl.transport.nccl import make_nccl
from octavo.rl.transport.pieces import PIECE_BYTES, read_ahead
from rl_rig import TINY
from trainer_model import make_model
from weights import Trainer, write_files
from weights_rig import answers, give, old_weights, other_weights, prompts

pytestmark = pytest.mark.gpu
FIELDS: dict[str, Any] = {  # memory of their own, since others run beside these
    "kv_cache_memory_bytes": 1 << 30,
    "max_model_len": 512,
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
}
ASKED = prompts(5, 40, 90)


@pytest.mark.parametrize("backend", ["ipc", "nccl"])
def test_RL_W5_weights_of_another_process(backend: str) -> None:
    """The bits of the same weights handed over in this one; again and again, in graphs that were captured before."""
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    expected = []
    config = {"backend": backend, "staging": "none", "timeout": 30}
    with dummy_model("tiny", weight_transfer_config=config, **FIELDS) as llm:
        for seed in (1, 2):
            Sender(llm, "local").send(WeightSource(make_model("tiny", seed)), f"local-{seed}")
            expected.append(answers(llm, ASKED))
        assert expected[0] != expected[1]
        with Trainer("tiny", 1 if backend == "nccl" else 0) as trainer:
            trainer.meet(llm)
            for seed in (1, 2, 1):
                trainer.send(seed, backend)
                assert answers(llm, ASKED) == expected[seed - 1]
            assert llm.get_weight_version() == "seed-1"
            free = []
            for _ in range(10):
                trainer.send(2, backend)
                torch.cuda.synchronize()
                free.append(torch.cuda.mem_get_info()[0])
            assert max(free) - min(free[1:]) <= 64 << 20, free
            assert answers(llm, ASKED) == expected[1]


def test_RL_W11_a_thousand_updates_by_ipc() -> None:
    """The device's and the host's memory stay as they are, and so do the answers."""
    with dummy_model("tiny", weight_transfer_config={"timeout": 30}, **FIELDS) as llm, Trainer("tiny", 0) as trainer:
        trainer.meet(llm)
        trainer.send(1, "ipc", 100)
        expected, process, held = answers(llm, ASKED), psutil.Process(), list[tuple[int, int, int]]()
        for _ in range(9):
            trainer.send(1, "ipc", 100)
            torch.cuda.synchronize()
            held.append((torch.cuda.mem_get_info()[0], process.memory_info().rss, process.num_fds()))
        found = answers(llm, ASKED)
        assert found == expected
        device, host, files = (max(each[1:]) - min(each[1:]) for each in zip(*held, strict=True))
        print(f"900 updates: the device's memory moved by {device} bytes, the host's by {host}, files by {files}")
        assert device <= 64 << 20 and host <= 64 << 20 and files <= 2


def test_RL_W5_nccl_of_one_process() -> None:
    """What one GPU can show: a communicator that meets in time, a broadcast over it, its end, and the next one."""
    for turn in range(2):
        store = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
        group = Group(make_nccl, "127.0.0.1", store.port, 0, 1, 30.0, store=store)
        sent = torch.full((5, 7), float(turn), device="cuda")
        group.broadcast(sent, "a weight", 30.0)
        assert sent.tolist() == [[float(turn)] * 7] * 5
        group.close()


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="of one GPU")
def test_RL_W8_two_processes_on_one_gpu_are_refused_in_time() -> None:
    """NCCL refuses them; the engine says so within its deadline, serves on, and is met by another backend."""
    config = {"backend": "nccl", "staging": "none", "timeout": 20}
    with dummy_model("tiny", weight_transfer_config=config, **FIELDS) as llm, Trainer("tiny", 0) as trainer:
        Sender(llm, "local").send(WeightSource(make_model("tiny", 1)))
        before, began = answers(llm, ASKED), time.monotonic()
        trainer.meet(llm)
        with pytest.raises(RuntimeError, match="the trainer ended"):
            trainer.send(1, "nccl")
        took = time.monotonic() - began
        assert took < 60 and answers(llm, ASKED) == before, took
        with Trainer("tiny", 0) as other:
            other.meet(llm)
            other.send(1, "ipc")
            assert answers(llm, ASKED) == before


def test_RL_W5_files_reach_a_gpu_through_pinned_memory(tmp_path: Path) -> None:
    """Tensors smaller and larger than a piece, and all of it larger than what is read ahead; then into an engine."""
    sizes = [1, 5000, PIECE_BYTES // 2 + 3, 3 * PIECE_BYTES + 7, 20 * PIECE_BYTES, 11]
    tensors = {f"w{index}": torch.randn(size, device="cuda").to(torch.bfloat16) for index, size in enumerate(sizes)}
    write_files(tmp_path, tensors)
    checkpoint = Checkpoint(tmp_path)
    incoming = [Incoming(name, torch.bfloat16, tuple(tensors[name].shape)) for name in checkpoint.entries]
    found = {each.name: tensor.clone() for each, tensor in read_ahead(checkpoint, incoming, torch.device("cuda"))}
    checkpoint.close()
    assert all(found[name].is_cuda and torch.equal(found[name], own) for name, own in tensors.items())
    model, folder = make_model("tiny", 1), tmp_path / "model"
    folder.mkdir()
    write_files(folder, WeightSource(model).tensors)
    with dummy_model("tiny", weight_transfer_config={"staging": "none"}, **FIELDS) as llm:
        Sender(llm, "local").send(WeightSource(model))
        expected = answers(llm, ASKED)
        Sender(llm, "local").send(WeightSource(make_model("tiny", 2)))
        assert answers(llm, ASKED) != expected
        llm.start_weight_update()
        llm.update_weights({"update_info": {"path": str(folder)}})
        llm.finish_weight_update()
        assert answers(llm, ASKED) == expected


def test_RL_W5_a_handle_names_a_part_of_memory() -> None:
    """A parameter may be a view into one flat buffer, as sharding keeps them."""
    flat = torch.arange(4096, dtype=torch.uint8, device="cuda")
    whole, part = ipc.handle_of(flat), ipc.handle_of(flat[256:1024])
    assert (part["size"], part["offset"] - whole["offset"]) == (768, 256)
    incoming = [Incoming("a", torch.bfloat16, (2, 3)), Incoming("b", torch.uint8, (4,))]
    assert [(each.name, tensor.numel()) for each, tensor in split(flat[:16], incoming)] == [("a", 6), ("b", 4)]


@pytest.mark.parametrize("cache", ["fp8", "int8"])
def test_RL_W6_a_quantized_cache_has_the_scales_of_the_weights_that_serve(cache: str, tmp_path: Path) -> None:
    """Graphs that were captured with the old scales, and an engine that is asleep but for its weights."""
    new = other_weights(3)
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    save_file(new, tmp_path / "model.safetensors")
    with LLM(str(tmp_path), **FIELDS, kv_cache_dtype=cache) as fresh:
        expected = answers(fresh, ASKED)
    with LLM(TINY, **FIELDS, kv_cache_dtype=cache, enable_sleep_mode=True) as llm:
        before = answers(llm, ASKED)
        give(llm, new, "new")
        found = answers(llm, ASKED)
        assert found == expected and found != before
        llm.sleep(2)
        llm.wake_up(["weights"])
        give(llm, old_weights(), "old again")
        llm.wake_up()
        assert answers(llm, ASKED) == before


def test_RL_P1_a_kept_pause_loses_none_of_256() -> None:
    """Nor a token, nor its bits."""
    asked = prompts(*range(3, 259))
    drawn = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True, detokenize=False)

    def tokens(llm: LLM) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.generate(asked, drawn, use_tqdm=False)]

    with LLM(TINY, **FIELDS) as llm:
        expected, found = tokens(llm), list[list[list[int]]]()
        for clear_cache in (False, True):
            before = llm.engine.times.num_steps
            thread = threading.Thread(target=lambda: found.append(tokens(llm)))
            thread.start()
            for turn in range(5):
                while llm.engine.times.num_steps < before + 8 * (turn + 1) and thread.is_alive():
                    pass
                llm.pause_generation("keep", clear_cache=clear_cache)
                steps = llm.engine.times.num_steps
                torch.cuda.synchronize()
                assert llm.engine.times.num_steps == steps
                llm.resume_generation()
            thread.join(60)
            assert found and found[-1] == expected

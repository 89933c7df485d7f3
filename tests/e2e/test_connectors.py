"""Connectors in whole engines: the same bits, whatever came from elsewhere (C.13), and blocks that always come back."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import random_models
from engine_checks import GOOD_PROMPT, assert_idle
from octavo import LLM, SamplingParams
from octavo.config.settings import ConfigError
from octavo.kv_connector import NO_RESULTS, ConnectorStats
from octavo.kv_connector.worker.block_files import BlockFiles
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.sched.work import SchedulerStats

EXTRA = "kv_connector_extra_config"
PARAMS = [
    SamplingParams(temperature=0.8, seed=7, max_tokens=24, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=1.1, top_p=0.9, seed=3, max_tokens=9, logprobs=1),
]
PROMPTS = [GOOD_PROMPT * 9, GOOD_PROMPT * 3 + "x = 1", "nothing that was said before"]
Make = Callable[..., LLM]


def host(size: str = "64M", **extra: object) -> dict[str, Any]:
    return {"kv_connector": "host", "kv_role": "kv_both", EXTRA: {"cpu_bytes_to_use": size, **extra}}


def storage(folder: Path, **extra: object) -> dict[str, Any]:
    given = {"shared_storage_path": str(folder), **extra}
    return {"kv_connector": "shared_storage", "kv_role": "kv_both", EXTRA: given}


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", EXTRA: {"connectors": list(children)}}


def bits(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def settle(llm: LLM) -> tuple[SchedulerStats, ConnectorStats]:
    """Let the transfers end that are under way; then nothing holds a block."""
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert_idle(llm)
    scheduler = llm.engine.scheduler
    return scheduler.stats(), scheduler.loads.connector.stats()


SETTINGS: dict[str, dict[str, Any]] = {
    "LBHNC": {"kv_cache_layout": "LBHNC"},
    "BLHNC": {"kv_cache_layout": "BLHNC"},
    "BLNHC": {"kv_cache_layout": "BLNHC"},
    "r2": {"block_size": 32, "attention_config": {"kernel_block_size": 16}},
    "r8": {"block_size": 64, "attention_config": {"kernel_block_size": 8}, "kv_cache_layout": "LBNHC"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "int8": {"kv_cache_dtype": "int8"},
    "chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 3},
    "async": {"async_scheduling": True},
    "zeroed": {"attention_backend": "flex"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_C_13_E_4_loaded_blocks_give_the_bits_of_computed_ones_under_every_setting(name, make_llm: Make, tmp_path):
    fields = {"max_model_len": 512, **SETTINGS[name]}
    expected = bits(make_llm(**fields))
    for config in (host(), storage(tmp_path)):
        llm = make_llm(**fields, kv_transfer_config=config)
        assert bits(llm) == expected  # a miss, and what is saved meanwhile
        _, moved = settle(llm)
        assert moved.num_saved_blocks >= 1 and llm.reset_prefix_cache()
        assert bits(llm) == expected  # a hit
        stats, moved = settle(llm)
        assert stats.num_loaded_tokens >= 64 and moved.num_loaded_blocks and not stats.num_load_failures
        assert bits(llm) == expected and settle(llm)[0].num_loaded_tokens == stats.num_loaded_tokens  # found here


def test_E_1_two_engines_share_a_folder_and_a_longer_prompt_is_a_partial_hit(make_llm: Make, tmp_path):
    expected = bits(make_llm(max_model_len=512))
    first = make_llm(max_model_len=512, kv_transfer_config=storage(tmp_path))
    short = [prompt[: len(prompt) // 2] for prompt in PROMPTS]
    first.generate(short, PARAMS)
    settle(first)
    second = make_llm(max_model_len=512, kv_transfer_config=storage(tmp_path))
    assert bits(second) == expected
    stats, _ = settle(second)
    assert 16 <= stats.num_loaded_tokens < stats.num_matched_tokens


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
def test_C_13_of_a_prompt_of_whole_blocks_one_token_is_computed_and_of_another_what_is_behind_them(
    layout, make_llm: Make, tmp_path
):
    """The last token stores its K and V once more, the same bits, in a block that came from elsewhere."""
    fields: dict[str, Any] = {"max_model_len": 512, "block_size": 16, "kv_cache_layout": layout}
    prompts = {1: list(range(100, 164)), 5: list(range(200, 269))}
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2)

    def answer(llm: LLM, prompt: list[int]) -> Any:
        output = llm.generate(prompt, params)[0].outputs[0]
        return output.token_ids, output.logprobs

    alone = make_llm(**fields)
    expected = {count: answer(alone, prompt) for count, prompt in prompts.items()}
    for config in (host(), storage(tmp_path)):
        llm = make_llm(**fields, kv_transfer_config=config)
        for count, prompt in prompts.items():
            assert answer(llm, prompt) == expected[count]
            settle(llm)
            for _ in range(2):
                assert llm.reset_prefix_cache()
                before = llm.engine.scheduler.stats()
                assert answer(llm, prompt) == expected[count]
                stats, _ = settle(llm)
                assert stats.num_scheduled_tokens - before.num_scheduled_tokens == count
                assert stats.num_loaded_tokens - before.num_loaded_tokens == 64


def test_E_2_engines_of_other_models_or_settings_find_nothing_of_each_other(make_llm: Make, tmp_path):
    prompt = GOOD_PROMPT * 9
    one = make_llm(max_model_len=512, kv_transfer_config=storage(tmp_path))
    one.generate(prompt, PARAMS[1])
    settle(one)
    others: list[dict[str, Any]] = [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8", "attention_backend": "reference"},
        {"block_size": 32},
        {"kv_cache_layout": "BLHNC"},
        {"attention_config": {"kernel_block_size": 8}},
        {"load_format": "dummy"},
    ]
    for fields in others:
        other = make_llm(**{"max_model_len": 512, **fields}, kv_transfer_config=storage(tmp_path))
        other.generate(prompt, PARAMS[1])
        assert settle(other)[0].num_loaded_tokens == 0, fields
    assert one.reset_prefix_cache()
    one.generate([prompt], PARAMS[1])
    assert settle(one)[0].num_loaded_tokens > 0


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_E_3_C_7_a_spoiled_file_is_computed_whatever_the_policy_and_a_failing_disk_is_the_policys(
    policy, make_llm: Make, tmp_path, monkeypatch
):
    expected = bits(make_llm(max_model_len=512))
    settings = {"kv_load_failure_policy": policy, "kv_lookup_timeout": 60}
    llm = make_llm(max_model_len=512, kv_transfer_config={**storage(tmp_path), **settings})
    bits(llm)
    settle(llm)
    loaded, read = dict[Path, None](), BlockFiles.read

    def note(self: BlockFiles, key: bytes, block: Any) -> bool:
        loaded[self.path(key)] = None
        return read(self, key, block)

    # names of files are random: of all files, those of answers among them, half may be none that a load reads
    with monkeypatch.context() as noted:
        noted.setattr(BlockFiles, "read", note)
        assert llm.reset_prefix_cache() and bits(llm) == expected
        assert not settle(llm)[0].num_load_misses
    assert len(loaded) > 2
    for path in [*loaded][1::2]:
        path.write_bytes(path.read_bytes()[:-7])
    assert llm.reset_prefix_cache() and bits(llm) == expected
    stats, _ = settle(llm)
    assert stats.num_load_misses and not stats.num_load_failures

    def fails(*_: object) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(BlockFiles, "read", fails)
    assert llm.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, PARAMS)
    stats, _ = settle(llm)
    assert stats.num_load_failures >= 2
    reasons = [output.outputs[0].finish_reason for output in outputs]
    if policy == "recompute":
        assert [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs] == expected
    else:
        assert reasons[:2] == ["error", "error"] and outputs[0].outputs[0].stop_reason == "kv_load_failed"
        assert (outputs[2].outputs[0].token_ids, outputs[2].outputs[0].logprobs) == expected[2], "a neighbour's bits"


def test_O_2_a_delayed_copy_changes_no_bit_and_a_late_one_is_given_up(make_llm: Make, monkeypatch):
    expected = bits(make_llm(max_model_len=512))
    llm = make_llm(
        max_model_len=512,
        kv_transfer_config={**host(), "kv_load_failure_policy": "recompute", "kv_transfer_timeout": 0.2},
    )
    bits(llm)
    settle(llm)
    gate, write = threading.Event(), CacheBytes.write

    def late(self: CacheBytes, blocks: Any, rows: Any) -> None:
        gate.wait(30)
        write(self, blocks, rows)

    monkeypatch.setattr(CacheBytes, "write", late)
    assert llm.reset_prefix_cache()
    threading.Timer(0.7, gate.set).start()
    assert bits(llm) == expected
    before = settle(llm)[0].num_loaded_tokens
    while settle(llm)[0].num_loaded_tokens == before:  # on a loaded machine a copy may be late by itself
        assert llm.reset_prefix_cache() and bits(llm) == expected


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("tier", [False, True], ids=["memory", "files"])
def test_O_7_pressure_on_both_pools_changes_no_token_and_host_memory_stays(policy, tier, make_llm: Make, tmp_path):
    """A soak in small: few blocks on the device, fewer slots on the host."""
    rng = random.Random(1)
    prompts = [f"# {number}\n" + GOOD_PROMPT * (number % 5 + 5) for number in rng.choices(range(16), k=40)]
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=10, ignore_eos=True)
    fields: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 24, "max_num_seqs": 6}
    expected = [output.outputs[0].token_ids for output in make_llm(**fields).generate(prompts, params)]
    extra = {"storage_path": str(tmp_path), "storage_bytes": "8M"} if tier else {}
    llm = make_llm(**fields, kv_transfer_config=host("5M", eviction_policy=policy, **extra))
    for _ in range(2):
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
    stats, moved = settle(llm)
    assert stats.num_loaded_tokens and moved.num_evicted_blocks and not stats.num_load_failures
    assert moved.stored_bytes <= (5 + 8 * tier) << 20
    assert any(tmp_path.rglob("*.safetensors")) == tier


def test_O_4_what_is_worth_keeping_is_set(make_llm: Make):
    prompt, params = GOOD_PROMPT * 9, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

    def saved(config: dict[str, Any], *, times: int = 1, **wishes: object) -> int:
        llm = make_llm(max_model_len=512, enable_prefix_caching=False, kv_transfer_config=config)
        own = SamplingParams(
            temperature=0.0,
            max_tokens=40,
            ignore_eos=True,
            extra_args={"kv_transfer_params": wishes} if wishes else None,
        )
        for _ in range(times):
            llm.generate(prompt, own)
        return settle(llm)[1].num_saved_blocks

    num_prompt = len(make_llm(max_model_len=512).generate(prompt, params)[0].prompt_token_ids)
    assert saved(host()) == (num_prompt + 39) // 16
    assert saved(host(offload_prompt_only=True)) == num_prompt // 16
    assert saved(host(store_threshold=2)) == 0 < saved(host(store_threshold=2), times=2)
    assert saved(host(), max_offload_tokens=32) == 2


def test_reset_forgets_what_is_this_engines_alone(make_llm: Make):
    llm = make_llm(max_model_len=512, kv_transfer_config=host())
    bits(llm)
    settle(llm)
    assert llm.reset_prefix_cache(reset_connector=True)
    bits(llm)
    assert settle(llm)[0].num_loaded_tokens == 0


def test_vllms_own_lines_for_host_memory_run_and_one_that_is_too_large_is_refused(make_llm: Make):
    expected = bits(make_llm(max_model_len=512))
    for extra in ({"block_size": 64, "num_cpu_blocks": 40}, {"block_size": 64, "cpu_bytes_to_use": 64000000}):
        given = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_buffer_size": 5e9, EXTRA: extra}
        llm = make_llm(max_model_len=512, kv_transfer_config=given)
        assert bits(llm) == expected
        settle(llm)
        assert llm.reset_prefix_cache() and bits(llm) == expected
        assert settle(llm)[0].num_loaded_tokens
    given[EXTRA] = {"num_cpu_blocks": 1 << 40}
    with pytest.raises(ConfigError, match=r"num_cpu_blocks=1099511627776: takes \d+ bytes: the host has"):
        make_llm(max_model_len=512, kv_transfer_config=given)


def test_O_4_a_memory_that_does_not_do_is_refused_by_name(make_llm: Make):
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use=1125899906842624: the host has \d+ bytes left"):
        make_llm(max_model_len=512, kv_transfer_config=host("1024T"))
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use=1024: a block of this model's cache has \d+ bytes"):
        make_llm(max_model_len=512, kv_transfer_config=host("1K"))


def test_C_5_an_abort_while_it_loads_gives_all_blocks_back(make_llm: Make):
    llm = make_llm(max_model_len=512, kv_transfer_config=host())
    bits(llm)
    settle(llm)
    tokens = llm.generate(PROMPTS[0], PARAMS[0])[0].prompt_token_ids
    assert llm.reset_prefix_cache()
    for step in range(6):
        llm.engine.add("x", tokens, PARAMS[0])
        for _ in range(step):
            llm.engine.step()
        llm.engine.abort(["x"])
        settle(llm)


def test_U_1_U_5_the_first_child_that_has_tokens_loads_and_all_save(make_llm: Make, tmp_path):
    expected = bits(make_llm(max_model_len=512))
    llm = make_llm(max_model_len=512, kv_transfer_config=multi(host(), storage(tmp_path)))
    assert bits(llm) == expected
    _, moved = settle(llm)
    num_files = len(list(tmp_path.rglob("*.safetensors")))
    assert num_files and moved.num_saved_blocks == 2 * num_files, "both have saved each block"
    connector = llm.engine.scheduler.loads.connector
    assert llm.reset_prefix_cache() and bits(llm) == expected
    settle(llm)
    by_child = [child.stats().num_loaded_blocks for child in connector._children]
    assert by_child[0] and not by_child[1]
    assert connector._children[0].reset() and llm.reset_prefix_cache() and bits(llm) == expected
    settle(llm)
    assert [child.stats().num_loaded_blocks for child in connector._children][1]


def test_U_2_what_children_may_not_say_is_refused_at_the_start(make_llm: Make, tmp_path):
    for children, said in [
        ([], "expected a list of mappings"),
        ([host(), multi(host())], "connectors[1].kv_connector='MultiConnector': connectors of a multi are no multi"),
        ([{**host(), "kv_load_failure_policy": "fail"}], "holds for all connectors"),
        ([host(), {"kv_connector": "host"}], "connectors[1].kv_role=None: must be one of"),
        ([host(), {**storage(tmp_path), EXTRA: {}}], "shared_storage_path=None: must name a folder"),
    ]:
        with pytest.raises(ConfigError) as caught:
            make_llm(kv_transfer_config=multi(*children))
        assert said in str(caught.value)


def test_U_3_U_5_two_children_under_pressure_free_each_block_once(make_llm: Make, tmp_path):
    rng = random.Random(2)
    prompts = [f"# {number}\n" + GOOD_PROMPT * (number % 5 + 5) for number in rng.choices(range(16), k=40)]
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=6, ignore_eos=True)
    fields: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 24, "max_num_seqs": 6}
    expected = [output.outputs[0].token_ids for output in make_llm(**fields).generate(prompts, params)]
    config = multi(host("2M"), storage(tmp_path, max_bytes="6M"))
    llm = make_llm(**fields, kv_transfer_config={**config, "kv_load_failure_policy": "recompute"})
    for _ in range(2):
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
    assert settle(llm)[0].num_loaded_tokens


def test_a_connector_out_of_tree_is_three_methods(make_llm: Make, monkeypatch, caplog):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "packages"))
    own = {"kv_connector": "Dictionary", "kv_connector_module_path": "own_store", "kv_role": "kv_both"}
    expected = bits(make_llm(max_model_len=512))
    llm = make_llm(max_model_len=512, kv_transfer_config=own)
    bits(llm)
    settle(llm)
    assert llm.reset_prefix_cache() and bits(llm) == expected
    assert settle(llm)[0].num_loaded_tokens
    from own_store import Dictionary

    for key, data in Dictionary.kept.items():
        Dictionary.kept[key] = data[:-1] + bytes([data[-1] ^ 1])
    assert llm.reset_prefix_cache() and bits(llm) == expected
    assert settle(llm)[0].num_load_misses and "something else" in caplog.text
    with pytest.raises(ConfigError, match=r"extra_config\.mots=1: unknown key; did you mean most\?"):
        make_llm(kv_transfer_config={**own, EXTRA: {"mots": 1}})


@pytest.mark.parametrize("name", ["GEMMA", "OLMO3", "DEEPSEEK"])
def test_C_13_O_5_windows_and_latent_layers_load_what_is_read_and_no_more(name, make_llm: Make, tmp_path):
    """A window's blocks are saved before it slides on, so a part of a prompt is found too."""
    fields: dict[str, Any] = {
        **random_models.settings_of(getattr(random_models, name), tmp_path),
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_batched_tokens": 96,
        "max_num_seqs": 4,
        "block_size": 16,
    }
    rng = random.Random(5)
    long = [rng.randrange(3, 300) for _ in range(300)]
    prompts = [long, [*long[:150], *(rng.randrange(3, 300) for _ in range(40))], long[:33]]
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=30, logprobs=1, ignore_eos=True)

    def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    expected = answers(make_llm(**fields), prompts)
    for config in (host(), storage(tmp_path / "kv")):
        llm = make_llm(**fields, kv_transfer_config=config)
        assert answers(llm, prompts[:1]) == expected[:1]
        settle(llm)
        assert llm.reset_prefix_cache() and answers(llm, prompts[1:2]) == expected[1:2]
        assert settle(llm)[0].num_loaded_tokens == 144, "the part that it shares with the first one"
        assert llm.reset_prefix_cache() and answers(llm, prompts) == expected
        stats, moved = settle(llm)
        num_groups = len(llm.engine.memory.groups)
        assert stats.num_loaded_tokens >= 144 + 288
        if name != "DEEPSEEK":
            assert moved.num_loaded_blocks < num_groups * stats.num_loaded_tokens // 16, "of windows only their ends"


def test_V_2_blocks_of_other_weights_are_not_found_and_those_of_old_ones_when_they_come_back(make_llm: Make, tmp_path):
    llm = make_llm(max_model_len=512, kv_transfer_config=multi(host(), storage(tmp_path)))
    bits(llm)
    settle(llm)
    scheduler = llm.engine.scheduler
    for version, found in (("1", False), ("", True)):
        scheduler.set_weights_version(version)
        before = scheduler.stats().num_loaded_tokens
        assert llm.reset_prefix_cache()
        bits(llm)
        assert (settle(llm)[0].num_loaded_tokens > before) is found


def test_a_load_that_is_cut_short_ends_where_all_that_is_read_is_there(make_llm: Make):
    """A preempted request that still owes log-probabilities of its prompt is loaded up to those, or less."""
    fields = {"max_model_len": 512, "max_num_batched_tokens": 23, "enable_prefix_caching": False}
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, prompt_logprobs=1)

    def said(llm: LLM, *, preempted: bool = False) -> Any:
        llm.engine.add("x", llm.engine.tokenizer.encode(PROMPTS[0]), params)
        outputs, scheduler = [], llm.engine.scheduler
        while llm.engine.has_unfinished:
            outputs += llm.engine.step()
            if preempted and scheduler.running and scheduler.running[0].num_prompt_logprobs > 40:
                assert scheduler.running[0].num_prompt_logprobs % 16
                scheduler._preempt(scheduler.running[0])
                preempted = False
        return outputs[-1].prompt_logprobs, outputs[-1].outputs[0].logprobs

    expected = said(make_llm(**fields))
    llm = make_llm(**fields, kv_transfer_config=host())
    assert said(llm) == expected
    settle(llm)
    assert said(llm, preempted=True) == expected
    stats, _ = settle(llm)
    assert stats.num_preemptions == 1 and stats.num_loaded_tokens == 32


@pytest.mark.parametrize("move", ["sleep", "reset", "pause"])
def test_what_forgets_the_cache_waits_for_saves(move: str, make_llm: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are being copied are free a moment later: nobody is refused for that, and nobody asks twice."""
    llm = make_llm(max_model_len=512, kv_transfer_config=host(), enable_sleep_mode=True)
    (expected,) = make_llm(max_model_len=512).generate([PROMPTS[0]], PARAMS[0])
    connector = llm.engine.scheduler.loads.connector
    take, num_looks = connector.take_results, list[None]()

    def late() -> Any:
        num_looks.append(None)
        return take() if len(num_looks) % 20 == 0 else NO_RESULTS

    monkeypatch.setattr(connector, "take_results", late)
    stream = llm.stream(PROMPTS[0], PARAMS[0])
    parts = [next(stream) for _ in range(3)]
    assert llm.engine.scheduler.loads.keeps_blocks, "a save is under way"
    if move == "sleep":
        llm.sleep(1, "keep")
        assert llm.wake_up()
    elif move == "pause":
        llm.pause_generation("keep", clear_cache=True)
        llm.resume_generation()
    else:
        assert llm.reset_prefix_cache(reset_running_requests=True)
    assert not llm.engine.scheduler.loads.keeps_blocks and len(num_looks) >= 20
    parts += list(stream)
    assert [token for part in parts for token in part.outputs[0].token_ids] == expected.outputs[0].token_ids
    settle(llm)

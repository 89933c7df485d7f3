"""Hybrids whose states and blocks come from elsewhere: the same bits, whatever was found, late or lost (C.13, O.5)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import random_models
import recurrent_rig as rig
from engine_checks import GOOD_PROMPT
from octavo import LLM, SamplingParams
from octavo.cache.policies import InputsPolicy
from octavo.config.settings import ConfigError
from octavo.kv_connector.worker.block_files import BlockFiles
from octavo.kv_connector.worker.host_memory import HostHandler
from test_connectors import host, multi, settle, storage
from test_p2p import need_library, p2p, stepping, until_idle, with_transfer

CHUNK, BLOCK = 64, 16
LONG = random_models.token_prompts(300)[0]["prompt_token_ids"]
OTHER = random_models.token_prompts(7, 40)[1]["prompt_token_ids"]
PROMPTS = [LONG, [*LONG[:150], *OTHER], LONG[:33], LONG[:128], LONG[:129]]
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=10, logprobs=1, ignore_eos=True, detokenize=False)
TINY = {"model": "octavo-tiny-hybrid", "max_model_len": 512}
Make = Callable[..., LLM]


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams = PARAMS) -> list[Any]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Settings for a model of a window of 20, full attention and states with chunks of 64 and of 16 tokens."""
    with rig.packages():
        yield {**rig.write_mixed(tmp_path_factory.mktemp("mixed")), "block_size": BLOCK}


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 3},
    "every second": {"snapshot_interval": 2},
    "last": {"snapshot_interval": 0, "max_num_batched_tokens": 100},
    "steps in flight": {"async_scheduling": True},
    "blocks of 128": {"block_size": 128},
    "fp8, bfloat16 states": {"kv_cache_dtype": "fp8", "state_dtype": "bfloat16"},
    "nothing found here": {"enable_prefix_caching": False},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_C_13_O_5_states_that_were_loaded_give_the_bits_of_computed_ones(name: str, make_llm: Make, tmp_path: Path):
    fields = {**TINY, **SETTINGS[name]}
    expected = answers(make_llm(**fields), PROMPTS)
    for config in (host(), storage(tmp_path)) if name in ("plain", "last") else (host(),):
        llm = make_llm(**fields, kv_transfer_config=config)
        assert answers(llm, PROMPTS[:1]) == expected[:1]  # a miss
        settle(llm)
        assert llm.reset_prefix_cache() and answers(llm, PROMPTS[1:]) == expected[1:]  # parts of it
        stats, _ = settle(llm)
        assert stats.num_loaded_tokens >= 128 or name == "last"
        assert llm.reset_prefix_cache() and answers(llm, PROMPTS) == expected  # all of it
        more, _ = settle(llm)
        assert more.num_loaded_tokens - stats.num_loaded_tokens >= 256
        assert not more.num_load_failures and not more.num_load_misses


@pytest.mark.parametrize("fields", [{}, {"max_num_batched_tokens": 21, "max_num_seqs": 4}], ids=["whole", "chunks"])
def test_C_13_windows_states_and_full_layers_come_back_together(fields, mixed, make_llm: Make, tmp_path: Path):
    own = {**mixed, **fields}
    prompts, params = [LONG[:200], [*LONG[:100], *OTHER], LONG[:64], LONG[:65]], PARAMS
    expected = answers(make_llm(**own), prompts)
    config = multi(host(), storage(tmp_path))
    llm = make_llm(**own, kv_transfer_config=config)
    assert answers(llm, prompts[:1]) == expected[:1]
    settle(llm)
    assert llm.reset_prefix_cache() and answers(llm, prompts[1:2]) == expected[1:2]
    assert settle(llm)[0].num_loaded_tokens == 64, "the last border of all groups in the part that it shares"
    assert llm.reset_prefix_cache() and answers(llm, prompts) == expected
    stats, _ = settle(llm)
    assert stats.num_loaded_tokens >= 64 + 192 and not stats.num_load_failures and not stats.num_load_misses
    assert llm.engine.scheduler.loads.connector._children[0].reset()
    assert llm.reset_prefix_cache() and answers(llm, prompts, params) == expected, "from files"
    assert settle(llm)[0].num_loaded_tokens > stats.num_loaded_tokens


def test_C_12_O_5_of_windows_the_window_is_loaded_and_of_states_the_one_at_the_border(mixed, make_llm: Make):
    llm = make_llm(**mixed, kv_transfer_config=host())
    expected = answers(llm, [LONG[:200]])
    settle(llm)
    assert llm.reset_prefix_cache() and answers(llm, [LONG[:200]]) == expected
    stats, moved = settle(llm)
    assert stats.num_loaded_tokens == 192
    wanted = {"full": 192 // BLOCK, "sliding": 2, "state": 1, "inputs": 0}  # entries; a window of 20 tokens
    groups = llm.engine.memory.groups
    assert {group.kind for group in groups} == set(wanted)
    assert moved.num_loaded_blocks == sum(wanted[group.kind] * group.parts.blocks for group in groups)


@pytest.mark.parametrize(("interval", "found"), [(1, 192), (2, 128), (3, 192), (0, 0)])
def test_H_4_snapshots_are_saved_by_the_policy_and_the_last_ones_always(interval: int, found: int, make_llm: Make):
    llm = make_llm(**TINY, snapshot_interval=interval, kv_transfer_config=host())
    tokens = answers(llm, [LONG], msgspec.structs.replace(PARAMS, max_tokens=25))[0][0]
    # a border in the prompt; the prompt's last one; the last one of all 324 tokens, as a next turn finds it
    for prompt, count in ((LONG[:230], found), (LONG[:270], 256), ([*LONG, *tokens, 5], 320)):
        before = settle(llm)[0].num_loaded_tokens
        assert llm.reset_prefix_cache()
        answers(llm, [prompt], msgspec.structs.replace(PARAMS, max_tokens=1))
        assert settle(llm)[0].num_loaded_tokens - before == count


def test_C_6_C_7_a_state_that_is_spoiled_or_late_is_computed(make_llm: Make, tmp_path: Path, monkeypatch):
    expected = answers(make_llm(**TINY), PROMPTS)
    llm = make_llm(**TINY, kv_transfer_config={**storage(tmp_path), "kv_load_failure_policy": "recompute"})
    answers(llm, PROMPTS)
    settle(llm)
    columns = [group.parts.blocks for group in llm.engine.memory.groups]
    states = [path for path in sorted(tmp_path.rglob("*.safetensors")) if path.stem.endswith(f"-{sum(columns) - 1}")]
    assert states, "the last block of a state has a file"
    for path in states:
        path.write_bytes(path.read_bytes()[:-7])
    assert llm.reset_prefix_cache() and answers(llm, PROMPTS) == expected
    stats, _ = settle(llm)
    assert stats.num_load_misses and not stats.num_load_failures

    def fails(*_: object) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(BlockFiles, "read", fails)
    assert llm.reset_prefix_cache() and answers(llm, PROMPTS) == expected
    assert settle(llm)[0].num_load_failures


def test_O_2_a_load_that_is_late_is_given_up_and_its_blocks_come_back(make_llm: Make, monkeypatch):
    expected = answers(make_llm(**TINY), PROMPTS)
    llm = make_llm(**TINY, kv_transfer_config={**host(), "kv_load_failure_policy": "recompute"})
    answers(llm, PROMPTS)
    settle(llm)
    loads = llm.engine.scheduler.loads
    gate, handle = threading.Event(), HostHandler.handle

    def late(self: HostHandler, job: Any) -> Any:
        while job.order.is_load and not gate.wait(0.01) and not loads.stats.num_load_failures:
            pass
        return handle(self, job)

    monkeypatch.setattr(HostHandler, "handle", late)
    monkeypatch.setattr(loads, "_timeout", 0.1)
    assert llm.reset_prefix_cache() and answers(llm, PROMPTS) == expected
    gate.set()
    monkeypatch.setattr(loads, "_timeout", 30.0)
    assert settle(llm)[0].num_load_failures
    assert llm.reset_prefix_cache() and answers(llm, PROMPTS) == expected
    assert settle(llm)[0].num_loaded_tokens


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_O_7_pressure_on_both_pools_changes_no_bit(policy: str, make_llm: Make, tmp_path: Path):
    rng = random.Random(1)
    prompts = [[number, *LONG[: rng.randrange(60, 230)]] for number in rng.choices(range(3, 7), k=16)]
    fields = {**TINY, "max_model_len": 256, "max_num_batched_tokens": 90, "enable_prefix_caching": False}
    with make_llm(**fields) as llm:
        expected = answers(llm, prompts)
        tight = llm.engine.memory.blocks_per_request * 3 // 2
    extra = {"storage_path": str(tmp_path), "storage_bytes": "16M"} if policy == "lru" else {}
    config = host("3M", eviction_policy=policy, **extra)
    llm = make_llm(**fields, num_gpu_blocks_override=tight, kv_transfer_config=config)
    for half in (slice(8), slice(8, None)):
        assert answers(llm, prompts[half]) == expected[half]
        stats, moved = settle(llm)
    assert moved.num_evicted_blocks and llm.reset_prefix_cache(reset_connector=True)
    for _ in range(2):  # one prompt has room
        assert answers(llm, prompts[-1:]) == expected[-1:]
        before, (stats, moved) = stats, settle(llm)
    assert stats.num_loaded_tokens > before.num_loaded_tokens
    assert not stats.num_load_failures and moved.stored_bytes <= (3 + 16 * (policy == "lru")) << 20


def test_a_hit_on_inputs_that_no_operator_promises_is_seen(make_llm: Make, monkeypatch):
    """A block that one step begins and the next one leaves two chunks behind: kernels of a GPU do not complete it."""
    other, prompt, again = OTHER * 4, LONG[:200], [*LONG[:50], 9]
    fields = {**TINY, "max_num_batched_tokens": 200, "async_scheduling": False, "block_size": BLOCK}
    with make_llm(**fields, enable_prefix_caching=False) as llm:
        expected = answers(llm, [again])
    assert len(other) == 160 and len(LONG) >= 200

    def found() -> tuple[int, bool]:
        """How many tokens, and whether their answer is as ever."""
        with make_llm(**fields) as llm:
            answers(llm, [other, prompt])  # a step of 160 and 40 tokens, then one of 160
            (output,) = llm.generate([{"prompt_token_ids": again}], PARAMS, use_tqdm=False)
            one = output.outputs[0]
            return output.num_cached_tokens, [(one.token_ids, one.logprobs)] == expected

    assert found() == (32, True)
    monkeypatch.setattr(InputsPolicy, "is_whole", lambda self, index, end: True)
    assert found() == (48, False)


def test_C_12_a_connector_that_moves_blocks_of_tokens_alone_is_refused_by_name(make_llm: Make, monkeypatch):
    root = Path(__file__).resolve().parents[2]
    monkeypatch.syspath_prepend(str(root / "tests" / "packages"))
    monkeypatch.syspath_prepend(str(root / "adapters" / "octavo-vllm" / "src"))
    theirs = {"kv_connector": "MemoryConnector", "kv_connector_module_path": "vllm_connector", "kv_role": "kv_both"}
    said = (
        r"kv_connector='{}': moves blocks of tokens, and layers 0, 1, 2, 4\.\.\. of this model keep states; take one of"
    )
    with pytest.raises(ConfigError, match=said.format("MemoryConnector")):
        make_llm(**TINY, kv_transfer_config=theirs)
    with pytest.raises(ConfigError, match=said.format("MultiConnector")):
        make_llm(**TINY, kv_transfer_config=multi(host(), theirs))
    own = {"kv_connector": "Dictionary", "kv_connector_module_path": "own_store", "kv_role": "kv_both"}
    llm = make_llm(**TINY, kv_transfer_config=own)
    expected = answers(llm, PROMPTS[:1])
    settle(llm)
    assert llm.reset_prefix_cache() and answers(llm, PROMPTS[:1]) == expected
    assert settle(llm)[0].num_loaded_tokens == 256, "what stores bytes by name stores states"


def test_C_12_layers_are_named_as_the_checkpoint_numbers_them(tmp_path: Path, monkeypatch):
    """Of Falcon-H1 each is two of the engine's: five layers were said to be 1, 3, 5, 7 and more."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "tests" / "packages"))
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "adapters" / "octavo-vllm" / "src"))
    theirs = {"kv_connector": "MemoryConnector", "kv_connector_module_path": "vllm_connector", "kv_role": "kv_both"}
    sizes = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 24, "mamba_n_groups": 2}
    sizes |= {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    falcon = {"architectures": ["FalconH1ForCausalLM"], "num_hidden_layers": 5, "vocab_size": 300, **sizes}
    settings = random_models.settings_of({**falcon, "max_position_embeddings": 512}, tmp_path)
    with pytest.raises(ConfigError, match=r"and layers 0, 1, 2, 3\.\.\. of this model keep states; take one of"):
        LLM(**settings, kv_transfer_config=theirs)


def test_the_models_prompt_text_takes_the_same_way(make_llm: Make):
    """What users do: a text, twice, with the device's cache emptied between."""
    llm = make_llm(**TINY, kv_transfer_config=host())
    prompt, params = GOOD_PROMPT * 30, SamplingParams(temperature=0.0, max_tokens=8)
    first = llm.generate(prompt, params)[0]
    settle(llm)
    assert llm.reset_prefix_cache()
    again = llm.generate(prompt, params)[0]
    assert again.outputs[0].text == first.outputs[0].text and again.num_cached_tokens >= 64
    settle(llm)


def pair_of(fields: dict[str, Any], make_llm: Make, name: str = "p2p", **more: Any) -> tuple[LLM, LLM]:
    config = p2p("kv_producer", kv_connector=name, **more), p2p("kv_consumer", kv_connector=name, **more)
    return make_llm(**fields, kv_transfer_config=config[0]), make_llm(**fields, kv_transfer_config=config[1])


def fetched(first: LLM, second: LLM, prompts: list[list[int]], longer: list[list[int]], params: SamplingParams) -> Any:
    """What the second engine says to prompts that begin with those which the first one has computed."""
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    told = first.generate(given, with_transfer(params, {"do_remote_decode": True}, max_tokens=1), use_tqdm=False)
    asked = [with_transfer(params, output.kv_transfer_params) for output in told]
    with stepping(first):
        outputs = second.generate([{"prompt_token_ids": prompt} for prompt in longer], asked, use_tqdm=False)
    until_idle(first)
    until_idle(second)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.parametrize("name", ["p2p", "nixl", "mooncake"])
@pytest.mark.parametrize("model", ["tiny", "mixed"])
def test_D_2_D_3_a_pair_moves_the_last_state_and_the_open_chunk(name: str, model: str, mixed, make_llm: Make):
    need_library(name)
    fields = {**(TINY if model == "tiny" else mixed), "max_num_batched_tokens": 90, "max_num_seqs": 8}
    prompts = [LONG[:count] for count in (1, 17, 63, 64, 65, 128, 129, 190)]
    expected = answers(make_llm(**fields), prompts)
    first, second = pair_of({**fields, "enable_prefix_caching": False}, make_llm, name)
    for _ in range(2):
        before = second.engine.scheduler.stats()
        assert fetched(first, second, prompts, prompts, PARAMS) == expected
        stats = second.engine.scheduler.stats()
        assert stats.num_loaded_tokens - before.num_loaded_tokens == sum(map(len, prompts))
        assert stats.num_scheduled_tokens - before.num_scheduled_tokens == len(prompts) * 10, "one token of a prompt"
        assert not stats.num_load_failures


def test_D_2_sides_may_keep_other_snapshots(make_llm: Make):
    """An engine that computes prompts and keeps none of their states but the last, as it has no use for others."""
    prompts = [LONG[:count] for count in (65, 128, 190)]
    expected = answers(make_llm(**TINY), prompts)
    first = make_llm(**TINY, snapshot_interval=0, kv_transfer_config=p2p("kv_producer"))
    second = make_llm(**TINY, kv_transfer_config=p2p("kv_consumer"))
    assert fetched(first, second, prompts, prompts, PARAMS) == expected
    stats = second.engine.scheduler.stats()
    assert stats.num_loaded_tokens == sum(map(len, prompts)) and not stats.num_load_failures


@pytest.mark.parametrize("side", ["first", "second"])
def test_D_2_one_side_may_have_drafts(side: str, make_llm: Make):
    """Blocks of its states are reserved later: fetched are states that are written, whatever else has blocks."""
    prompts, fields = [LONG[:count] for count in (63, 100, 128, 190)], {**TINY, "block_size": 64}
    expected = answers(make_llm(**fields), prompts)
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    first = make_llm(**fields, **drafts if side == "first" else {}, kv_transfer_config=p2p("kv_producer"))
    second = make_llm(**fields, **drafts if side == "second" else {}, kv_transfer_config=p2p("kv_consumer"))
    assert fetched(first, second, prompts, prompts, PARAMS) == expected
    stats = second.engine.scheduler.stats()
    assert stats.num_loaded_tokens == sum(map(len, prompts)) and not stats.num_load_failures


def test_T_5_states_of_sides_whose_blocks_differ_are_refused_by_both_values(make_llm: Make, caplog):
    prompts = [LONG[:100]]
    expected = answers(make_llm(**TINY), prompts)
    first = make_llm(**TINY, block_size=32, kv_transfer_config=p2p("kv_producer", kv_transfer_timeout=300))
    config = p2p("kv_consumer", kv_load_failure_policy="recompute")
    second = make_llm(**TINY, kv_transfer_config=config)
    assert fetched(first, second, prompts, prompts, PARAMS) == expected
    assert second.engine.scheduler.stats().num_load_failures == 1
    said = "what layers keep as states passes only where these are equal"
    assert said in caplog.text and "blocks of 32, 64" in caplog.text and "blocks of 16, 64" in caplog.text


def test_D_2_what_is_here_is_not_fetched_and_what_is_offered_may_be_a_part(mixed, make_llm: Make):
    prompts = [LONG[:count] for count in (70, 128, 150)]
    longer = [[*prompt, *OTHER] for prompt in prompts]
    expected = answers(make_llm(**mixed), longer)
    first, second = pair_of(mixed, make_llm)
    answers(second, [LONG[:100]])
    before = second.engine.scheduler.stats()
    assert fetched(first, second, prompts, longer, PARAMS) == expected
    stats = second.engine.scheduler.stats()
    assert 0 < stats.num_loaded_tokens - before.num_loaded_tokens < 70 + 128 + 150 and not stats.num_load_failures


def test_an_offer_that_is_cut_short_of_its_state_is_computed(make_llm: Make):
    """Who wants the log-probabilities of a prompt's tokens computes these: what lies before them is not offered."""
    prompts, params = [LONG[:150]], msgspec.structs.replace(PARAMS, prompt_logprobs=0)
    expected = answers(make_llm(**TINY), prompts)
    first, second = pair_of(TINY, make_llm, kv_transfer_timeout=0.5)  # nobody fetches
    assert fetched(first, second, prompts, prompts, params) == expected
    assert second.engine.scheduler.stats().num_load_failures == 0


def test_T_5_states_do_not_pass_between_blocks_of_other_sizes(make_llm: Make, caplog):
    """Refused by both values, and computed."""
    expected = answers(make_llm(**TINY), [LONG[:150]])
    first = make_llm(**TINY, kv_transfer_config=p2p("kv_producer", kv_transfer_timeout=300))
    config = p2p("kv_consumer", kv_load_failure_policy="recompute")
    second = make_llm(**{**TINY, "block_size": 32}, kv_transfer_config=config)
    assert fetched(first, second, [LONG[:150]], [LONG[:150]], PARAMS) == expected
    assert second.engine.scheduler.stats().num_load_failures == 1
    assert "blocks of 16, 64 and kernel blocks of 16 tokens, yours of layout" in caplog.text

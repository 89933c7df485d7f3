"""GrammarMask: the rows that ask are held to their form, the others keep every bit, whatever happens to rows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from octavo.grammar import Grammars, Vocabulary
from octavo.sampling_params import StructuredOutputsParams
from world import World

V = 97
EOS = 96
TOKENS = [bytes([32 + at]) for at in range(95)] + [b"ab", b""]
A, B, C = (ord(char) - 32 for char in "abc")


def grammar_world(device: str) -> World:
    vocabulary = Vocabulary(TOKENS, [EOS], [EOS])
    return World(vocab_size=V, device=device, grammars=Grammars(lambda: vocabulary, V, [EOS]))


@pytest.fixture
def world() -> World:
    return grammar_world("cpu")


def _logits(num_rows: int, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def _regex(text: str) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputsParams(regex=text), "eos": [EOS]}


def test_a_row_follows_its_grammar_and_then_ends(world: Any) -> None:
    world.add(0, **_regex("[abc]{2,3}"), seed=3)
    text = []
    for step in range(4):
        output = world.sample([0], _logits(1, step))
        assert not output.failed.any()
        text.append(int(output.tokens[0]))
        world.commit(0, text[-1])
        if text[-1] == EOS:
            break
    assert text[-1] == EOS and b"ab" in b"".join(TOKENS[token] for token in text) + b"ab"
    assert all(TOKENS[token] in (b"a", b"b", b"c", b"ab") for token in text[:-1])


def test_other_rows_keep_every_bit(world: Any) -> None:
    for row in range(6):
        world.add(row, seed=row, logprobs=3)
    logits = _logits(12, 1)
    alone = world.sample(range(6), logits[:6])
    for row in range(6, 12):
        world.add(row, **_regex("[a-c]+"), seed=row)
    together = world.sample(range(12), logits)
    assert torch.equal(together.tokens[:6], alone.tokens)
    assert torch.equal(together.logprobs[0].values, alone.logprobs[0].values)
    allowed = {A, B, C, TOKENS.index(b"ab")}
    assert set(together.tokens[6:].tolist()) <= allowed


def test_allowed_tokens_keep_their_bits(world: Any) -> None:
    world.add(0, **_regex("[abc]"))
    logits = _logits(1, 2)
    masked = logits.clone()
    world.sampler.apply_staged()
    batch = _batch([0], [3])
    grammar = next(stage for stage in world.sampler._stages if type(stage).__name__ == "GrammarMask")
    grammar(masked, batch)
    kept = masked[0] != -torch.inf
    assert kept.nonzero().flatten().tolist() == [A, B, C]
    assert torch.equal(masked[0][kept], logits[0][kept])


def _batch(rows: list[int], positions: list[int]) -> Any:
    import numpy as np

    from octavo.sampling.rows import SampleBatch

    return SampleBatch(
        rows=torch.tensor(rows), positions=torch.tensor(positions), rows_np=np.array(rows), max_position=max(positions)
    )


def test_replay_drafts_and_row_changes_give_the_same_tokens(world: Any) -> None:
    """A resumed row, one with drafts after its end, and one that never stopped answer alike."""
    rng = random.Random(0)
    form = _regex("(abc|acb|bca){4}")
    world.add(0, **form, seed=9)
    for step in range(12):
        logits = _logits(1, step)
        output = [int(token) for token in world.known[0][3:]]
        world.add(5, output=output, **form, seed=9)  # as after preemption
        expected = int(world.sample([0], logits).tokens[0])
        assert int(world.sample([5], logits).tokens[0]) == expected
        drafts = [expected, *rng.choices([A, B, C], k=2)]
        for draft in drafts:
            world.commit(5, draft)
        end = len(world.known[0])
        many = world.sample([5, 5, 5], logits.expand(3, V).contiguous(), [end, end + 1, end + 2])
        assert int(many.tokens[0]) == expected
        world.commit(0, expected)
        if expected == EOS:
            break


def test_what_cannot_go_on_fails_alone(world: Any) -> None:
    world.add(0, **_regex("[abc]"), min_tokens=9)
    world.add(1, **_regex("x["))  # never compiled
    world.add(2, **_regex("[abc]+"))
    world.add(3, output=[A, 5], **_regex("[abc]+"))  # left its grammar
    first = world.sample([0, 1, 2, 3], _logits(4, 0))
    assert first.failed.tolist() == [0, 2, 0, 2]
    world.commit(0, int(first.tokens[0]))
    assert world.sample([0, 2], _logits(2, 1)).failed.tolist() == [2, 0]


def test_a_removed_row_forgets_its_grammar(world: Any) -> None:
    world.add(0, **_regex("[abc]"))
    world.remove(0)
    world.add(0, temperature=0)
    logits = _logits(1, 4)
    assert int(world.sample([0], logits).tokens[0]) == int(logits.argmax())


def test_nan_is_still_seen(world: Any) -> None:
    world.add(0, **_regex("[abc]"))
    logits = _logits(1, 0)
    logits[0, 7] = torch.nan
    assert world.sample([0], logits).failed.tolist() == [1]

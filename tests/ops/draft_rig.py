"""What a drafter's passes launch on a GPU, against the operators one by one: interpreted, and from tests/gpu there."""

from __future__ import annotations

import torch

from gpu_rig import BF16, F32, assert_close, assert_equal, heavy
from octavo.bench import oracle, oracle_gpu
from octavo.ops.embedding import beside, beside_gemv, beside_gpu
from octavo.ops.gemm import pack_linear
from octavo.ops.gemm.fused import linear_of_few, normed_logits
from octavo.ops.inputs.tensors import DraftRows, RowTensors
from octavo.ops.norm import kept_sum_gpu
from octavo.ops.sampling import drafts, drafts_gpu, drafts_head


def check_beside(device: str, dtype: torch.dtype, size: int = 96) -> None:
    """Tokens and states, normed or not, all of them or picked; the states as they were or normed."""
    generator = torch.Generator().manual_seed(5)
    table = heavy(40, size, dtype, device).contiguous()
    states, ids = heavy(7, size, dtype, device, 1), torch.randint(0, 40, (7,), generator=generator).to(device)
    norms = tuple((1 + torch.rand(size, generator=generator)).to(device) for _ in range(2))
    pick = torch.tensor([6, 0, 3]).to(device)
    for own in (norms, None):
        for at, scale, normed in ((None, 1.0, True), (pick, 1.0, False), (pick, 33.5, True)):
            given = ids, table, scale, states, own, 1e-6, at
            both, by_itself = beside_gpu.embed_beside(*given, normed=normed, behind_draw=at is None)
            expected, expected_states = beside.embed_beside_composed(*given, normed=normed)
            for ours, theirs in ((both, expected), (by_itself, expected_states)):
                if device == "cuda":  # the separate operators are kernels too
                    assert torch.equal(ours, theirs), (scale, normed)
                else:
                    assert_close(ours, theirs, 2)


def check_kept_sum(device: str, dtype: torch.dtype, size: int = 1100) -> None:
    x, residual = heavy(3, size, dtype, device), heavy(3, size, dtype, device, 1)
    kept = torch.full((3, 2 * size), 7.0, dtype=dtype, device=device)
    for before in (residual, None):
        kept_sum_gpu.keep_sum(x, before, kept[:, size:])
        assert_equal(kept[:, size:], x if before is None else (x.float() + before.float()).to(dtype))
        assert (kept[:, :size] == 7).all()


class Rows:
    """Known tokens of nine rows and a null row; entries that sampled and such as did not, one without room."""

    def __init__(self, device: str, width: int = 40) -> None:
        generator = torch.Generator().manual_seed(width)
        totals = torch.tensor([5, width, width - 1, 9, 20, 3, 4, 8, 2, 0], dtype=torch.int32)
        token_ids = torch.randint(0, 90, (10, width), generator=generator, dtype=torch.int32)
        self.table = RowTensors(token_ids.to(device), totals.to(device), totals.to(device))
        self.rows = torch.tensor([7, 1, 2, 3, 0, 5, 4, 9]).to(device)
        sample_of = torch.tensor([0, 1, 2, -1, 3, 4, 5, 6], dtype=torch.int32)
        lengths = torch.tensor([8, 9, 9, 9, 9, 3, 20, 0], dtype=torch.int32)
        self.live = sample_of.to(device), lengths.to(device)
        self.temperatures = (torch.arange(10) % 3 / 2).to(device)
        self.seeds = torch.randint(-(2**62), 2**62, (10,), generator=generator).to(device)

    def drafts(self, place: int, noise: float, vocab_size: int, only: int | None = None) -> DraftRows:
        """Of all entries, or of one."""
        some = slice(None) if only is None else slice(only, only + 1)
        sample_of, lengths = self.live
        return DraftRows(
            rows=self.rows[some],
            live=(sample_of[some], lengths[some]),
            table=self.table,
            place=place,
            temperatures=self.temperatures,
            seeds=self.seeds,
            noise=noise,
            vocab_size=vocab_size,
        )


def check_drafts(device: str, num_places: int) -> None:
    """By the target's ids, in any order, and by places; ties, nothing but -inf and NaN among the logits."""
    generator = torch.Generator().manual_seed(num_places)
    logits = 3 * torch.randn(8, num_places, generator=generator)
    logits[4], logits[5], logits[6, 1::2], logits[0, num_places // 2] = 0.0, -torch.inf, -torch.inf, torch.nan
    vocab_size = 3 * num_places
    for ids in (None, torch.randperm(vocab_size, generator=generator)[:num_places]):
        for noise in (0.8, 0.0, 1.0):
            expected, ours = Rows("cpu"), Rows(device)
            for place in range(2):
                found, theirs = (
                    draw(
                        logits.to(own.rows.device),
                        None if ids is None else ids.to(own.rows.device),
                        own.drafts(place, noise, vocab_size),
                    )
                    for own, draw in ((ours, drafts_gpu.draw_drafts), (expected, drafts.draw_drafts_composed))
                )
                assert torch.equal(found.cpu(), theirs), (num_places, noise, place)
            assert torch.equal(ours.table.token_ids[:-1].cpu(), expected.table.token_ids[:-1])


def check_ends(device: str, size: int, places: int) -> None:
    """One row: entry and product, head and draw, each in one kernel, against the kernels one by one."""
    table, states = heavy(500, size, BF16, device).contiguous(), heavy(9, size, BF16, device, 1)
    generator = torch.Generator().manual_seed(size)
    first, second, last = ((0.5 + torch.rand(size, generator=generator)).to(device) for _ in range(3))
    qkv, weight = heavy(4096, 2 * size, BF16, device, 2) / 256, heavy(places, size, BF16, device, 3) / 256
    packed, head = pack_linear(qkv.contiguous()), pack_linear(weight.contiguous())
    target_ids = torch.randperm(3 * places, generator=generator)[:places].to(device)
    for trial in range(9):
        token, state, normed = torch.tensor([41 * trial], device=device), states[trial : trial + 1], trial % 2 == 0
        assert beside_gemv.serves(1, table, 1.0, state, packed.storage)
        for of in (token, state, None), (torch.arange(9, device=device) * 41, states, torch.tensor([trial])):
            ids, source, pick = (None if one is None else one.to(device) for one in of)
            given, behind = (ids, table, 1.0, source, (first, second), 1e-6), pick is None
            projected, own = beside.project_beside(*given, packed, None, pick, normed=normed, behind_draw=behind)
            both, expected = beside_gpu.embed_beside(*given, pick, normed=normed)
            assert torch.equal(own, expected) and torch.equal(projected, linear_of_few(both, packed)), (trial, behind)
        ours, theirs = Rows(device), Rows(device)
        for noise in (0.0, 0.8):
            of, of_theirs = (rows.drafts(trial % 2, noise, 3 * places, trial % 8) for rows in (ours, theirs))
            assert drafts_head.serves(state, head.storage, of)
            found = drafts.draw_drafts_of(state, last, 1e-6, head, target_ids if normed else None, of)
            logits = normed_logits(state, last, 1e-6, head)
            assert torch.equal(found, drafts_gpu.draw_drafts(logits, target_ids if normed else None, of_theirs)), trial
            assert torch.equal(ours.table.token_ids, theirs.table.token_ids)


def check_oracle(device: str) -> None:
    """The drafts of rows whose answers are known, as plain torch has them."""
    expected, ours = Rows("cpu"), Rows(device)
    answers = torch.randint(0, 90, (37, 48), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    for number, row in enumerate((7, 0, 4)):
        answers[30 + number, :16] = expected.table.token_ids[row, :16]
    assert {int(total) > 20 for total in expected.table.total_len[:-1]} == {False, True}, "rows that have just begun"
    bar = int(0.6 * oracle._PARTS)
    places = torch.arange(4)
    for own in (expected,):
        tokens = oracle.drafts_of(own.table, own.rows, answers, places, bar, 90)
        total = own.table.total_len.index_select(0, own.rows)
        for entry, row in enumerate(own.rows.tolist()):
            if own.live[0][entry] >= 0 and own.live[1][entry] > 0:
                end = min(int(total[entry]) + 4, own.table.token_ids.shape[1])
                own.table.token_ids[row, total[entry] : end] = tokens[entry, : end - int(total[entry])]
    oracle_gpu.foretell(
        ours.table,
        ours.rows,
        ours.live,
        answers.to(device),
        num_drafts=4,
        known_by=16,
        bar=bar,
        parts=oracle._PARTS,
        vocab_size=90,
    )
    assert torch.equal(ours.table.token_ids.cpu(), expected.table.token_ids)


def interpreted_beside() -> None:
    check_beside("cpu", F32)
    check_beside("cpu", BF16)


def interpreted_kept_sum() -> None:
    check_kept_sum("cpu", F32)
    check_kept_sum("cpu", BF16)


def interpreted_drafts() -> None:
    drafts_gpu._PROGRAMS = 24  # few enough that a program passes several tiles, and rows are still split
    check_drafts("cpu", 7)
    check_drafts("cpu", 1800)
    drafts_gpu._PROGRAMS = 8  # rows are whole
    check_drafts("cpu", 700)


def interpreted_oracle() -> None:
    check_oracle("cpu")


INTERPRETED = {name: check for name, check in list(globals().items()) if name.startswith("interpreted_")}

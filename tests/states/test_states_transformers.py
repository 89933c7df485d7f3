"""Operators of layers with states against the functions that transformers' families run on a CPU."""

from __future__ import annotations

import pytest
import torch

import state_rig as rig
from octavo.states.cpu import CpuStates

LENGTHS = (1, 63, 64, 65, 300)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-5 * expected.abs().max())


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_gated_delta_rule(form: str) -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    case = rig.delta_case()
    rule, drawn = case.part.operands, rig.draw_all(case, LENGTHS)
    keys = rule.num_key_heads * rule.key_size
    for (qkv, a, b), found in zip(drawn, rig.alone(case, CpuStates(), drawn), strict=True):
        q, k, v = qkv[None].split((keys, keys, rule.num_heads * rule.value_size), 2)
        expected, _ = getattr(theirs, f"torch_{form}_gated_delta_rule")(
            q.unflatten(2, (-1, rule.key_size)),
            k.unflatten(2, (-1, rule.key_size)),
            v.unflatten(2, (-1, rule.value_size)),
            g=(rule.decay * torch.nn.functional.softplus(a + rule.dt_bias))[None],
            beta=b.sigmoid()[None],
            use_qk_l2norm_in_kernel=True,
        )
        assert close(found, expected[0].flatten(1))


def test_mamba2() -> None:
    from transformers.models.nemotron_h import modeling_nemotron_h as theirs

    case = rig.mamba2_case()
    scan, drawn = case.part.operands, rig.draw_all(case, LENGTHS)
    groups = scan.num_groups * scan.state_size
    for (xbc, dt), found in zip(drawn, rig.alone(case, CpuStates(), drawn), strict=True):
        x, b, c = xbc[None].split((scan.num_heads * scan.head_size, groups, groups), 2)
        expected = theirs.mamba2_chunk_scan(
            x.unflatten(2, (-1, scan.head_size)),
            dt[None],
            scan.decay,
            b.unflatten(2, (-1, scan.state_size)),
            c.unflatten(2, (-1, scan.state_size)),
            chunk_size=32,
            D=scan.skip,
            dt_bias=scan.dt_bias,
            dt_softplus=True,
            dt_limit=(scan.dt_min, scan.dt_max),
        )
        assert close(found, expected[0].flatten(1))


def test_mamba1() -> None:
    from transformers.models.jamba import modeling_jamba as theirs

    case = rig.mamba1_case()
    scan, drawn = case.part.operands, rig.draw_all(case, LENGTHS)
    for (x, dt, b, c), found in zip(drawn, rig.alone(case, CpuStates(), drawn), strict=True):
        expected = theirs.mamba_selective_scan(
            x.t()[None],
            dt.t()[None],
            scan.decay.t(),
            b.t()[None],
            c.t()[None],
            scan.skip,
            delta_bias=scan.dt_bias,
            delta_softplus=True,
        )
        assert close(found, expected[0].t())


def test_short_convolution() -> None:
    from transformers.models.lfm2 import modeling_lfm2
    from transformers.models.qwen3_next import modeling_qwen3_next

    for theirs, silu in ((modeling_lfm2, False), (modeling_qwen3_next, True)):
        case = rig.conv_case(silu=silu)
        conv, drawn = case.part.operands, rig.draw_all(case, LENGTHS)
        for (x,), found in zip(drawn, rig.alone(case, CpuStates(), drawn), strict=True):
            expected = theirs.causal_conv1d_fn(x.t()[None], conv.weight.t(), conv.bias, "silu" if silu else None)
            assert close(found, expected[0].t())

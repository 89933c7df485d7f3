"""Scratch: what the host does in a forward of few tokens of 0.6b, ours and torch's, on a GPU."""

# ruff: noqa
import cProfile, importlib.util, os, pstats, random, sys, time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch

spec = importlib.util.spec_from_file_location("bench_rl", os.path.join(os.path.dirname(os.path.abspath(__file__)), "rl.py"))
bench = importlib.util.module_from_spec(spec)
sys.modules['bench_rl'] = bench
spec.loader.exec_module(bench)
from octavo import rl
from octavo.bench.shapes import SHAPES
from trainer_model import make_model

model = make_model("0.6b")
draw = random.Random(1)
pack = rl.Pack.of([[draw.randrange(151936) for _ in range(n)] for n in (200, 201, 202)], device="cuda")


def loop():
    total = 0
    for i in range(10_000_000):
        total += i
    return total


a = time.perf_counter(); loop(); print("loop of 1e7 turns, s", round(time.perf_counter() - a, 3))


def look(name, step):
    for _ in range(5):
        step()
    times = []
    for _ in range(20):
        torch.cuda.synchronize(); a = time.perf_counter(); step(); torch.cuda.synchronize()
        times.append(time.perf_counter() - a)
    print("==", name, "ms:", [round(1e3 * t, 1) for t in sorted(times)][::4])
    prof = cProfile.Profile(); prof.enable()
    for _ in range(10):
        step()
    torch.cuda.synchronize(); prof.disable()
    pstats.Stats(prof).sort_stats("tottime").print_stats(45)


def micro(name, f, n=200):
    torch.cuda.synchronize()
    for _ in range(5):
        f()
    torch.cuda.synchronize(); a = time.perf_counter()
    for _ in range(n):
        f()
    b = time.perf_counter(); torch.cuda.synchronize()
    print(f"micro {name}: {1e6 * (b - a) / n:.1f} us by the host")


plain = bench.Plain(model, pack)
look("torch", plain)
rl.convert(model)
look("ours", lambda: rl.logprobs(model, pack).logprobs.sum())
x = torch.randn(603, 1024, device="cuda", dtype=torch.bfloat16)
w = model.model.layers[0].mlp.gate_proj.weight.detach()
out = torch.empty(603, 6144, device="cuda", dtype=torch.bfloat16)
from octavo.ops.gemm import gpu
from octavo.ops.norm import rms_norm
from octavo.ops.activation import gated_activation

micro("functional.linear", lambda: torch.nn.functional.linear(x, w))
gpu._choose_way("whole")
micro("mm cublaslt, no split", lambda: torch.mm(x, w.t()))
micro("mm cublaslt, no split, out", lambda: torch.mm(x, w.t(), out=out[:, :3072]))
micro("functional.linear cublaslt", lambda: torch.nn.functional.linear(x, w))
gpu._choose_way("split")
micro("mm cublas, split", lambda: torch.mm(x, w.t()))
gpu._choose_way("whole")
torch.backends.cuda.preferred_blas_library("cublas")
micro("mm cublas, no split", lambda: torch.mm(x, w.t()))
torch.backends.cuda.preferred_blas_library("cublaslt")
micro("empty", lambda: torch.empty(603, 1024, device="cuda", dtype=torch.bfloat16))
micro("zeros", lambda: torch.zeros(603, 1024, device="cuda", dtype=torch.bfloat16))
micro("add", lambda: x + x)
nw = model.model.norm.weight.detach()
micro("rms_norm", lambda: rms_norm(x, nw.float(), 1e-6))
wf = nw.float()
micro("rms_norm, float weight", lambda: rms_norm(x, wf, 1e-6))
micro("gated", lambda: gated_activation(out, "silu"))
a_ = model.model.layers[0].self_attn
run = model.model.layers[0]._octavo_forward.args[0]
qkv = torch.randn(603, 4096, device="cuda", dtype=torch.bfloat16)
table, spec_ = run.shared.cos_sin(0, x.device), run.plan.attention
micro("rl.qk_norm_rope", lambda: rl.qk_norm_rope(qkv, pack, table, spec_, a_.q_norm.weight, a_.k_norm.weight, 1e-6))
q, st = rl.qk_norm_rope(qkv, pack, table, spec_, a_.q_norm.weight, a_.k_norm.weight, 1e-6)
q, st = q.detach(), st.detach()
micro("rl.attention", lambda: rl.attention(q, st, pack, spec_))
micro("pack.attend", lambda: pack.attend(q, st, spec_))
layer = model.model.layers[0]
xg = x.clone().requires_grad_()
micro("layer", lambda: layer(xg, pack=pack))


def stages(n=100):
    from octavo.rl.decoder import LayerRun, _Part

    plan = run.plan
    part = _Part(
        LayerRun(
            arch=run.shared.plan.arch, plan=plan, weights=run.weights, norm_offset=0.0, cos_sin=table, backend=None, pack=pack
        ),
        plan.layer,
        "",
    )
    rows, clock = [], time.perf_counter
    for _ in range(n):
        torch.cuda.synchronize()
        t = [clock()]
        h = part.input_norm(xg); t.append(clock())
        a = part.attention
        p_ = a.qkv(h); t.append(clock())
        q_ = a.rope_and_store(p_); t.append(clock())
        s_ = a.attend(q_); t.append(clock())
        o_ = a.output(s_); t.append(clock())
        y = xg + o_; t.append(clock())
        h = part.mlp_norm(y); t.append(clock())
        z = part.mlp(h); t.append(clock())
        r = y + z; t.append(clock())
        rows.append([1e6 * (b - a) for a, b in zip(t, t[1:])])
    names = ["norm", "qkv", "rope", "attend", "out", "add", "norm", "mlp", "add"]
    print("stages us:", {f"{i} {k}": round(sorted(c)[n // 2], 1) for i, (k, c) in enumerate(zip(names, zip(*rows)))})


stages()
plain_layer = model.model.layers[0]
micro("torch's layer", lambda: plain.layer(xg, plain_layer))

"""Make the drafters `octavo-tiny-eagle3` and `octavo-tiny-mtp`: an EAGLE-3-style head and an MTP module of octavo-tiny.

Both learn what octavo-tiny says next, on the text that it was trained on and on text that it wrote itself behind
beginnings of that text. Each is written as a folder: weights in bf16 under the names of published checkpoints,
config.json, and README.md with the figures.

Invariants:
- No text of a held-out file (`tiny_data`) is read for training; the figures are those of held-out prompts.
- Tokens a step are counted as an engine counts them: what the exported weights draft, greedily, for text that the
  target wrote greedily, up to the first draft that differs, and one more.
- The same seed, device and standard library give the same windows in the same order.

Example: python tools/train_drafter.py --device cuda --out DIR
Without a standard library of the right version on the machine with the GPU: `--write-tokens FILE` here, `--tokens FILE`
there. A run of seconds on a CPU, for tests: `--smoke`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from tiny_data import TokenStream, build_corpus
from tiny_drafters import TAPS, Drafter, Eagle3Head, MtpModule, watch
from tiny_model import Shape, TinyQwen3, rotate
from train_tiny import Muon, load_exported, write_json

KINDS = ("eagle3", "mtp")
BUNDLED = Path(__file__).parents[1] / "src" / "octavo" / "assets" / "octavo-tiny"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a drafter is trained. Steps take a batch of the corpus and one of the target's own text in turn."""

    seconds: float = 55.0  # of training, at most; the learning rate falls with whichever is nearer, time or steps
    steps: int = 4000
    corpus: tuple[int, int] = (64, 512)  # windows, and tokens of each
    own: tuple[int, int] = (96, 320)
    rounds: int = 5  # of text that the target writes, each of `writers` sequences
    writers: int = 2048
    depth: int = 5  # entries of a chain
    draft_vocab: int = 3072
    muon_lr: float = 0.02
    adam_lr: float = 0.002
    weight_decay: float = 0.05
    later: float = 0.85  # weight of an entry's loss, of the entry's before it
    aims: tuple[tuple[str, float], ...] = (("draw", 0.7), ("likeliest", 0.3))  # of AIMS, each with its weight
    sharpness: float = 2.0  # of the aim "draw"


# On a CPU of which other people want most: minutes.
CPU = Recipe(seconds=700, corpus=(4, 512), own=(12, 192), rounds=4, writers=256, depth=4)
SMOKE = Recipe(
    seconds=20, steps=6, corpus=(2, 96), own=(4, 64), rounds=1, writers=8, depth=3, draft_vocab=512, adam_lr=1e-3
)


def gumbel_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise: argmax(logits + noise) is drawn from softmax(logits)."""
    waits = torch.empty_like(x, dtype=torch.float32).exponential_(generator=generator)
    return waits.clamp_(min=1e-30).log_().neg_()


@torch.no_grad()
def write_on(
    model: TinyQwen3, ids: Tensor, length: int, temperatures: Tensor, noise: torch.Generator | Tensor
) -> Tensor:
    """ids [B, T] continued to `length` tokens, drawn at temperatures [B]; 0: the likeliest.

    noise: of all places, [B, length, vocabulary] as `gumbel_like` gives it, or what it is drawn with.
    """
    shape, (rows, start) = model.shape, ids.shape
    out = functional.pad(ids, (0, length - start))
    sizes = (shape.layers, 2, rows, shape.kv_heads, length, shape.head_dim)
    narrow = torch.is_autocast_enabled(ids.device.type)
    cache = torch.zeros(sizes, device=ids.device, dtype=torch.bfloat16 if narrow else torch.float32)
    begin = 0
    for end in range(start, length):
        x = model.embed_tokens(out[:, begin:end]).to(cache.dtype)
        cos, sin = model.cos[begin:end], model.sin[begin:end]
        for layer, kept in zip(model.layers, cache, strict=True):
            own, h = layer.self_attn, layer.input_layernorm(x)
            split = (rows, end - begin, -1, shape.head_dim)
            q = rotate(own.q_norm(own.q_proj(h).view(split)).transpose(1, 2), cos, sin)
            kept[0, :, :, begin:end] = rotate(own.k_norm(own.k_proj(h).view(split)).transpose(1, 2), cos, sin)
            kept[1, :, :, begin:end] = own.v_proj(h).view(split).transpose(1, 2)
            k, v = kept[:, :, :, :end]
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=begin == 0, enable_gqa=True)
            x = x + own.o_proj(mixed.transpose(1, 2).reshape(rows, end - begin, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = functional.linear(model.norm(x[:, -1]), model.embed_tokens.weight).float()
        own = noise[:, end] if isinstance(noise, Tensor) else gumbel_like(logits, noise)
        out[:, end] = (logits + own * temperatures[:, None]).argmax(-1)
        begin = end
    return out


def own_text(target: TinyQwen3, data: TokenStream, recipe: Recipe, generator: torch.Generator) -> Tensor:
    """[N, tokens] that the target writes behind beginnings of the training text, half of them greedily."""
    length, found = recipe.own[1], []
    for _ in range(recipe.rounds):
        begin, _ = data.batch(recipe.writers, length // 5, generator)
        half = torch.arange(recipe.writers, device=begin.device) // 2 % 2
        with torch.autocast(begin.device.type, torch.bfloat16, enabled=begin.is_cuda):
            found.append(write_on(target, begin, length, half.float(), generator).int())
    return torch.cat(found)


def draft_ids_of(data: TokenStream, own: Tensor, size: int, vocab: int) -> Tensor:
    """The likeliest `size` tokens, ascending: what comes twice in the target's own text counts as thrice."""
    counts = torch.bincount(data.ids.long(), minlength=vocab).double() / len(data.ids)
    counts += 2 * torch.bincount(own.flatten().long(), minlength=vocab) / own.numel()
    return counts.topk(min(size, vocab)).indices.sort().values


def aim_at_distribution(drafted: Tensor, logits: Tensor, noise: Tensor, sharpness: float) -> Tensor:
    """Cross-entropy against the target's distribution."""
    return -(torch.softmax(logits, dim=-1) * torch.log_softmax(drafted, dim=-1)).sum(-1)


def aim_at_likeliest(drafted: Tensor, logits: Tensor, noise: Tensor, sharpness: float) -> Tensor:
    """Cross-entropy against the target's likeliest token."""
    return functional.cross_entropy(drafted, logits.argmax(-1), reduction="none")


def aim_at_draw(drafted: Tensor, logits: Tensor, noise: Tensor, sharpness: float) -> Tensor:
    """Cross-entropy against what the target draws with a noise that the draft has as well: of the scores' softmax."""
    drawn = (logits + noise).argmax(-1)
    return functional.cross_entropy((drafted + noise) * sharpness, drawn, reduction="none")


def aim_at_overlap(drafted: Tensor, logits: Tensor, noise: Tensor, sharpness: float) -> Tensor:
    """Minus the logarithm of how often rejection sampling accepts."""
    return -torch.minimum(torch.softmax(logits, dim=-1), torch.softmax(drafted, dim=-1)).sum(-1).log()


AIMS = {
    "distribution": aim_at_distribution,
    "likeliest": aim_at_likeliest,
    "draw": aim_at_draw,
    "overlap": aim_at_overlap,
}


def loss_of(drafter: Drafter, target: TinyQwen3, ids: Tensor, recipe: Recipe, generator: torch.Generator) -> Tensor:
    """Of all entries of all chains, by the recipe's aims."""
    taps, hidden, logits = watch(target, ids)
    length = ids.shape[1] - recipe.depth
    chosen = getattr(drafter, "draft_ids", None)
    logits = (logits if chosen is None else logits[..., chosen]).float()
    noise = gumbel_like(logits, generator)
    total, weight, weights = torch.zeros((), device=ids.device), 1.0, 0.0
    for step, drafted in enumerate(drafter.unroll(ids, taps, hidden, recipe.depth)):
        guess = drafted.float().flatten(0, 1)
        aim, own = (each[:, step + 1 : step + 1 + length].flatten(0, 1) for each in (logits, noise))
        for name, share in recipe.aims:
            loss = AIMS[name](guess, aim, own, recipe.sharpness)
            total = total + weight * share * loss.mean()
        weights += weight
        weight *= recipe.later
    return total / weights


@torch.no_grad()
def tokens_per_step(drafter: Drafter, target: TinyQwen3, texts: Tensor, start: int, k: int = 4) -> float:
    """texts: [N, T], held-out prompts of `start` tokens and what the target wrote greedily behind them."""
    taps, hidden, _ = watch(target, texts)
    drafted = [each.argmax(-1) for each in drafter.unroll(texts, taps, hidden, k)]
    chosen = getattr(drafter, "draft_ids", None)
    if chosen is not None:
        drafted = [chosen[each] for each in drafted]
    last = texts.shape[1] - k - 1
    right = [each[:, :last] == texts[:, 2 + j : 2 + j + last] for j, each in enumerate(drafted)]
    accepted = torch.stack(right).long().cumprod(0).sum(0).tolist()
    tokens = steps = 0
    for counts in accepted:
        place = start - 1  # the first token behind the prompt is drawn; its drafts begin there
        while place < last:
            tokens, steps, place = tokens + 1 + counts[place], steps + 1, place + 1 + counts[place]
    return tokens / max(steps, 1)


def rate(done: float) -> float:
    """The learning rate's factor at a share of the training: a short rise, a plateau, a linear fall to zero."""
    return min(1.0, done / 0.02 + 0.02, max((1 - done) / 0.6, 0.0))


def train(
    drafter: Drafter, target: TinyQwen3, data: TokenStream, own: Tensor, recipe: Recipe, generator: torch.Generator
) -> dict[str, Any]:
    """Train in place; gives the run's figures."""
    device = data.ids.device
    matrices = [p for n, p in drafter.named_parameters() if p.dim() == 2 and "lm_head" not in n]
    rest = [p for n, p in drafter.named_parameters() if p.dim() == 1 or "lm_head" in n]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, recipe.muon_lr, recipe.weight_decay),
        torch.optim.AdamW(rest, recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"),
    ]
    initial = [[group["lr"] for group in opt.param_groups] for opt in optimizers]
    began, seen, step, done, curve = time.perf_counter(), 0, 0, 0.0, []
    while done < 1:
        for opt, rates in zip(optimizers, initial, strict=True):
            for group, lr in zip(opt.param_groups, rates, strict=True):
                group["lr"] = lr * rate(done)
        if step % 2:
            ids, _ = data.batch(*recipe.corpus, generator)
        else:
            ids = own[torch.randint(len(own), (recipe.own[0],), generator=generator, device=device)].long()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(drafter, target, ids, recipe, generator)
        torch.autograd.backward(loss)
        for opt in optimizers:
            opt.step()
            opt.zero_grad()
        seen, step = seen + ids.numel(), step + 1
        if step % 100 == 0:
            curve.append([step, round(loss.item(), 4)])  # waits for the device, so that the clock is true
            print(f"step {step}: {loss.item():.4f} nats, {time.perf_counter() - began:.0f} s", flush=True)
        done = max(step / recipe.steps, (time.perf_counter() - began) / recipe.seconds)
    return {"steps": step, "tokens": seen, "seconds": time.perf_counter() - began, "curve": curve}


def config_of(kind: str, shape: Shape, draft_vocab: int) -> dict[str, Any]:
    """config.json in the words of published heads (eagle3), or of a target with modules behind its layers (mtp)."""
    common = {
        "attention_bias": False,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ff,
        "max_position_embeddings": shape.context,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab,
    }
    if kind == "mtp":
        own = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": shape.layers}
        return {**own, "num_nextn_predict_layers": 1, "tie_word_embeddings": True, **common}
    own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    taps = {"eagle_aux_hidden_state_layer_ids": list(TAPS), "use_aux_hidden_state": True}
    return {
        **own,
        "draft_vocab_size": draft_vocab,
        "eagle_config": taps,
        "target_hidden_size": shape.hidden,
        "tie_word_embeddings": False,
        **common,
    }


README = """# octavo-tiny-{kind}

{what} for octavo-tiny, with {parameters:.2f} M parameters in bf16. It proposes drafts and has no tokenizer: the
target's counts. `octavo generate --speculative-config '{{"method": "{kind}", "model": "octavo-tiny-{kind}",
"num_speculative_tokens": 4}}'` runs it.

| | |
| --- | --- |
| tokens a step, greedy, 4 drafts | **{tokens_per_step:.2f}** on {prompts} held-out prompts of octavo-tiny |
| tokens seen | {tokens:,}, half of them written by octavo-tiny itself |
| training | {seconds:.0f} s on {device}, {steps} steps, PyTorch {torch} |
| depth of the chains in training | {depth} |

The text is octavo-tiny's own training text and its licence's: see its README.md. No text of a held-out file was read.

```
python tools/train_drafter.py --kind {kind} --device {device_flag} --seed {seed} --out DIR
```
"""
WHAT = {"eagle3": "An EAGLE-3-style head", "mtp": "A module of multi-token prediction, of DeepSeek-V3's form,"}


def export(drafter: Drafter, kind: str, out: Path) -> None:
    """Weights and config.json."""
    out.mkdir(parents=True, exist_ok=True)
    assert isinstance(drafter, Eagle3Head | MtpModule)
    weights = {
        name: (value.to(torch.bfloat16) if value.is_floating_point() else value).detach().cpu().contiguous()
        for name, value in drafter.checkpoint().items()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", config_of(kind, drafter.shape, len(weights.get("d2t", ()))))


def rounded(drafter: Drafter) -> Drafter:
    """The same with the weights that were exported."""
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return drafter


def read_tokens(args: argparse.Namespace, tokenizer: Tokenizer, device: torch.device) -> TokenStream:
    """octavo-tiny's training text: from a file of --write-tokens, or from the standard library's sources."""
    if args.tokens is not None:
        stream = TokenStream.__new__(TokenStream)
        kept = load_file(args.tokens)
        stream.ids, stream.starts = kept["ids"].to(device, torch.int32), kept["starts"].to(device)
        return stream
    root = args.stdlib or Path(sysconfig.get_paths()["stdlib"])
    corpus = build_corpus(root, 0, 60 if args.smoke else None)
    return TokenStream(tokenizer, corpus.documents, device)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make octavo-tiny's drafters.")
    parser.add_argument("--out", type=Path, help="the folder in which octavo-tiny-KIND is written")
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: all")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="of training, for each")
    parser.add_argument("--target", type=Path, default=BUNDLED, help="octavo-tiny's folder")
    parser.add_argument("--stdlib", type=Path, help="a Lib folder; default: this interpreter's own")
    parser.add_argument("--tokens", type=Path, help="a file of --write-tokens, in the place of a standard library")
    parser.add_argument("--write-tokens", type=Path, help="write the training text's tokens there, and end")
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few files, in seconds")
    args = parser.parse_args(argv)
    if (args.out is None) == (args.write_tokens is None):
        parser.error("give --out or --write-tokens")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    device, began = torch.device(args.device), time.perf_counter()
    torch.set_float32_matmul_precision("high")

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:.0f}s] {text}", flush=True)

    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    data = read_tokens(args, tokenizer, device)
    if args.write_tokens is not None:
        save_file({"ids": data.ids.to(torch.int16), "starts": data.starts}, args.write_tokens)
        say(f"{len(data.ids):,} tokens written")
        return 0
    recipe = SMOKE if args.smoke else CPU if args.device == "cpu" else Recipe()
    recipe = recipe if args.seconds is None else dataclasses.replace(recipe, seconds=args.seconds)
    target = load_exported(Shape(), args.target, device).requires_grad_(False).eval()
    generator = torch.Generator(device).manual_seed(args.seed)
    own = own_text(target, data, recipe, generator)
    say(f"{len(data.ids):,} tokens of text, {own.numel():,} of the target's own")
    prompts = json.loads((args.target / "held_out_prompts.json").read_text("utf-8"))[: 6 if args.smoke else None]
    begun = [tokenizer.encode(prompt).ids for prompt in prompts]
    start = min(map(len, begun))  # all as long as the shortest: one batch
    texts, greedy = torch.tensor([ids[:start] for ids in begun], device=device), torch.zeros(len(begun), device=device)
    texts = write_on(target, texts, start + (16 if args.smoke else 160), greedy, generator)
    say(f"{len(texts)} held-out prompts of {start} tokens continued")
    for kind in args.kind or KINDS:
        torch.manual_seed(args.seed)
        if kind == "eagle3":
            drafter: Drafter = Eagle3Head(target, draft_ids_of(data, own, recipe.draft_vocab, target.shape.vocab))
        else:
            drafter = MtpModule(target)
        drafter = drafter.to(device)
        run = train(drafter, target, data, own, recipe, generator)
        out = args.out / f"octavo-tiny-{kind}"
        export(drafter, kind, out)
        run["tokens_per_step"] = tokens_per_step(rounded(drafter), target, texts, start)
        gpu = f"one {torch.cuda.get_device_name()}" if args.device == "cuda" else f"a CPU ({platform.machine()})"
        facts = {**run, "kind": kind, "what": WHAT[kind], "device": gpu, "device_flag": args.device, "seed": args.seed}
        facts |= {"prompts": len(texts), "depth": recipe.depth, "torch": torch.__version__.partition("+")[0]}
        facts["parameters"] = sum(p.numel() for p in drafter.parameters()) / 1e6
        (out / "README.md").write_text(README.format(**facts), "utf-8")
        assert math.isfinite(run["tokens_per_step"])
        say(f"{kind}: {run['tokens_per_step']:.3f} tokens a step, {run['steps']} steps, {run['tokens']:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())

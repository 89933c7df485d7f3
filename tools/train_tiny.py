"""Make the bundled model `octavo-tiny` from nothing: tokenizer, data, training, export, figures.

The only text it reads is what a Python installation carries: the standard library's .py files and the
documentation strings in them. A byte-level BPE tokenizer is trained on that text, then a small Qwen3-shaped
decoder, and a Hugging Face folder is written (weights in bf16, configuration, tokenizer, chat template,
README.md with the figures, the held-out file list and sixty held-out prompts).

Invariants:
- A file is held out by the hash of its relative path alone. No text of a held-out file trains the tokenizer
  or the model, and a function that also stands in a held-out file is dropped from training.
- `vocab_size` in config.json is the tokenizer's size, and the tokenizer adds no special token by itself.
- The reported bits per byte are those of the exported bf16 weights, read back from the written file and
  computed in float32, over whole held-out files in windows of the model's full context.
- The same seed, device and standard library give the same data and the same order of windows.

Example: python tools/train_tiny.py --device cuda --out octavo-tiny
A run of seconds on a CPU, for tests: python tools/train_tiny.py --smoke --out /tmp/octavo-smoke
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import random
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from tiny_data import (
    CHAT_TEMPLATE,
    END,
    HELD_OUT_PER_MILLE,
    IM_END,
    IM_START,
    SPECIALS,
    Corpus,
    TokenStream,
    build_corpus,
    train_tokenizer,
)
from tiny_model import Shape, TinyQwen3


@dataclass(frozen=True)
class Recipe:
    """How the model is trained; `batch` counts windows of `Shape.context` tokens."""

    steps: int = 5000
    batch: int = 64
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    weight_decay: float = 0.5
    dropout: float = 0.3
    warmup: int = 100
    decay_from: float = 0.4
    eval_every: int = 500


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal, for matrices; every parameter group holds matrices of one shape."""

    def __init__(self, matrices: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95}
        super().__init__([{"params": group} for group in by_shape.values()], defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = group["params"]
            gradient = torch.stack([weight.grad for weight in weights])
            state = self.state[weights[0]]
            momentum = state.setdefault("momentum", torch.zeros_like(gradient))
            momentum.lerp_(gradient, 1 - group["momentum"])
            update = orthogonal(gradient.lerp(momentum, group["momentum"]))
            rows, columns = weights[0].shape
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            scale = group["lr"] * max(1.0, rows / columns) ** 0.5
            torch._foreach_add_(weights, list(update.float().unbind()), alpha=-scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """Pushes the singular values of a stack of matrices towards one (five Newton-Schulz steps)."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    result: Tensor = x.mT if tall else x
    return result


@torch.no_grad()
def held_out_loss(model: TinyQwen3, stream: TokenStream, amp: bool) -> float:
    """Total loss over the stream in nats."""
    model.eval()
    total = 0.0
    device = stream.ids.device
    for ids, targets in stream.all_windows(32, model.shape.context):
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            total += model.loss(ids, targets, "sum").item()
    model.train()
    return total


def rate(step: int, recipe: Recipe) -> float:
    """The learning rate's factor: a linear rise, a plateau, a linear fall to zero."""
    rise = min(1.0, (step + 1) / recipe.warmup)
    fall = (recipe.steps - step) / max(1.0, recipe.steps * (1 - recipe.decay_from))
    return min(rise, fall, 1.0)


def train(
    shape: Shape, recipe: Recipe, data: TokenStream, held_out: TokenStream, held_out_bytes: int, seed: int
) -> tuple[TinyQwen3, dict[str, Any]]:
    """Trains one model and returns it with the weights of its best held-out loss, and the run's figures."""
    device = data.ids.device
    amp = device.type == "cuda"
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    model = TinyQwen3(shape, recipe.dropout).to(device)
    loss_of = torch.compile(model.loss, dynamic=False) if amp else model.loss
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.dim() == 1 or "embed" in n]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, recipe.muon_lr, recipe.weight_decay),
        torch.optim.AdamW(rest, recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=amp),
    ]
    initial = [[group["lr"] for group in opt.param_groups] for opt in optimizers]
    best, best_bits, curve = copy.deepcopy(model.state_dict()), math.inf, []
    began = time.perf_counter()
    for step in range(recipe.steps):
        for opt, rates in zip(optimizers, initial, strict=True):
            for group, lr in zip(opt.param_groups, rates, strict=True):
                group["lr"] = lr * rate(step, recipe)
        ids, targets = data.batch(recipe.batch, shape.context, generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            loss = loss_of(ids, targets)
        torch.autograd.backward(loss)
        for opt in optimizers:
            opt.step()
            opt.zero_grad()
        done = step + 1
        if done % recipe.eval_every == 0 or done == recipe.steps:
            bits = held_out_loss(model, held_out, amp) / math.log(2) / held_out_bytes
            seconds = time.perf_counter() - began
            curve.append([done, round(loss.item(), 4), round(bits, 4), round(seconds, 1)])
            print(
                f"step {done}: train {loss.item():.4f} nats, held out {bits:.4f} bits/byte, {seconds:.0f}s",
                flush=True,
            )
            if bits < best_bits:
                best, best_bits = copy.deepcopy(model.state_dict()), bits
    model.load_state_dict(best)
    tokens = recipe.steps * recipe.batch * shape.context
    return model, {"curve": curve, "tokens": tokens, "seconds": time.perf_counter() - began}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def export(model: TinyQwen3, tokenizer: Tokenizer, out: Path) -> None:
    """Writes weights, configuration and tokenizer in the Hugging Face layout."""
    shape, end, im_end = model.shape, SPECIALS.index(END), SPECIALS.index(IM_END)
    weights = {
        f"model.{name}": value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": end,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.ff,
        "max_position_embeddings": shape.context,
        "max_window_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": tokenizer.get_vocab_size(),
    }
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", {"eos_token_id": [end, im_end], "pad_token_id": end})
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "extra_special_tokens": [IM_START, IM_END],
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
    }
    write_json(out / "tokenizer_config.json", tokenizer_config)


def load_exported(shape: Shape, out: Path, device: torch.device) -> TinyQwen3:
    """The exported bf16 weights in a float32 model."""
    model = TinyQwen3(shape)
    weights = load_file(out / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): value.float() for name, value in weights.items()})
    return model.to(device)


def held_out_prompts(corpus: Corpus, tokenizer: Tokenizer, seed: int, count: int = 60) -> list[str]:
    """Varied prompts of 20 to 200 tokens; half start with `def` or `class`, half anywhere in a file."""
    rng = random.Random(seed)
    code = [p.code for p in corpus.held_out_pieces if p.code.startswith(("def ", "class "))]
    prompts: list[str] = []
    while len(prompts) < count:
        text = rng.choice(code) if len(prompts) < count // 2 else rng.choice(corpus.held_out).text
        if len(prompts) >= count // 2:
            lines = text.split("\n")
            text = "\n".join(lines[rng.randrange(len(lines)) :])
        size = rng.randint(20, 200)
        ids = tokenizer.encode(text).ids[:size]
        prompt = tokenizer.decode(ids, skip_special_tokens=False)
        whole = "\ufffd" not in prompt and prompt.strip() and prompt not in prompts
        if whole and 20 <= len(tokenizer.encode(prompt).ids) <= 200:
            prompts.append(prompt)
    return prompts


README = """# octavo-tiny

A language model of {parameters:.2f} M parameters that Octavo carries for its tests and for a first try
without a download. It completes Python code in the manner of the standard library and answers in the ChatML
format. It is far too small to be correct or to be relied on.

| | |
| --- | --- |
| architecture | Qwen3 (`Qwen3ForCausalLM`), tied embeddings, weights in bf16 |
| shape | {layers} layers, hidden {hidden}, feed-forward {ff} |
| attention | {heads} query heads, {kv_heads} key/value heads, head size {head_dim} |
| tokenizer | byte-level BPE, {vocab} entries, no token is added to plain text |
| context | {context} tokens |
| held-out loss | **{bits:.4f} bits per byte** (exported bf16 weights) |
| held-out text | {files} files, {held_out_bytes:,} bytes |
| tokens seen | {tokens:,} ({epochs:.1f} passes over {unique:,} tokens) |
| training | {minutes:.1f} minutes on {device}, {speed:,.0f} tokens/s, PyTorch {torch} |
| batch | {batch} windows of {context} tokens, {steps} steps |
| optimizer | Muon (matrices) and AdamW (the rest), dropout {dropout}, weight decay {weight_decay} |

The recipe was chosen by this loss among eight, and about a tenth of the held-out lines also stand elsewhere in
the library, so the figure flatters a little. More steps do not pay: 13,500 gave 0.6912.

## Data

The standard library of CPython {python}: its `.py` files and the documentation strings in them, nothing else
(dialogues are made from documentation strings and function sources; a dozen greetings stand in the script).
Names and documentation strings of built-in functions come from the interpreter that ran the script
(CPython {interpreter}). Files that are not UTF-8, generated tables and duplicates are left out.

| part | bytes |
| --- | --- |
{parts}

About {per_mille} in a thousand files, chosen by the hash of the relative path, are held out: neither the
tokenizer nor the model saw them. `held_out.json` lists them; `held_out_prompts.json` has sixty prompts cut
from them.

## Licence

The data is under the Python Software Foundation License Version 2 (a few files of the standard library carry
other permissive notices of their own). The weights, the tokenizer and the other files of this folder are
under the Apache License 2.0, as far as the makers of Octavo can grant it.

## How to make it again

`Lib` is the `Lib` folder of the CPython named above.

```
{command}
```

Special tokens: `<|endoftext|>` separates documents and ends a completion, `<|im_start|>` and `<|im_end|>`
frame a turn of a dialogue.
"""


def write_report(
    out: Path, args: argparse.Namespace, recipe: Recipe, model: TinyQwen3, corpus: Corpus, run: dict[str, Any]
) -> None:
    """README.md and held_out.json with the run's figures."""
    shape = model.shape
    device = torch.cuda.get_device_name() if args.device == "cuda" else "a CPU"
    command = f"python tools/train_tiny.py --device {args.device} --seed {args.seed} --steps {recipe.steps}"
    command += " --smoke" if args.smoke else ""
    command += f" --stdlib Lib --stdlib-version {args.stdlib_version}" if args.stdlib else ""
    text = README.format(
        **vars(shape),
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        bits=run["bits_per_byte"],
        files=len(corpus.held_out),
        held_out_bytes=run["held_out_bytes"],
        tokens=run["tokens"],
        unique=run["unique"],
        epochs=run["tokens"] / run["unique"],
        minutes=run["seconds"] / 60,
        speed=run["tokens"] / run["seconds"],
        device=f"one {device}" if args.device == "cuda" else device,
        torch=torch.__version__.partition("+")[0],
        batch=recipe.batch,
        steps=recipe.steps,
        dropout=recipe.dropout,
        weight_decay=recipe.weight_decay,
        python=args.stdlib_version,
        interpreter=platform.python_version(),
        parts="\n".join(f"| {name} | {size:,} |" for name, size in corpus.counts.items()),
        per_mille=HELD_OUT_PER_MILLE,
        command=command + " --out octavo-tiny",
    )
    (out / "README.md").write_text(text, "utf-8")
    record = {
        "python": args.stdlib_version,
        "bits_per_byte": round(run["bits_per_byte"], 5),
        "bytes": run["held_out_bytes"],
        "curve_columns": ["step", "train_loss_nats", "held_out_bits_per_byte", "seconds"],
        "curve": run["curve"],
        "files": [source.path for source in corpus.held_out],
    }
    write_json(out / "held_out.json", record)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make octavo-tiny from the standard library's sources.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help=f"default {Recipe.steps}")
    parser.add_argument("--stdlib", type=Path, help="a Lib folder; default: this interpreter's own")
    parser.add_argument("--stdlib-version", help="the CPython version of --stdlib")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and a few files, in seconds")
    args = parser.parse_args(argv)
    if (args.stdlib is None) != (args.stdlib_version is None):
        parser.error("--stdlib and --stdlib-version go together")
    if args.stdlib_version is None:
        args.stdlib_version = platform.python_version()
    return args


def settings(args: argparse.Namespace) -> tuple[Shape, Recipe, int | None]:
    """The shape, the recipe and the number of files to read (None: all)."""
    if args.smoke:
        shape = Shape(vocab=512, hidden=64, layers=2, heads=2, kv_heads=1, ff=128, context=128)
        return shape, Recipe(steps=args.steps or 20, batch=8, warmup=5, eval_every=10), 60
    recipe = Recipe() if args.steps is None else Recipe(steps=args.steps)
    return Shape(), recipe, None


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    shape, recipe, limit = settings(args)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:.0f}s] {text}", flush=True)

    corpus = build_corpus(args.stdlib or Path(sysconfig.get_paths()["stdlib"]), args.seed, limit)
    say(f"{len(corpus.documents)} documents, bytes {corpus.counts}, {len(corpus.held_out)} files held out")
    tokenizer = train_tokenizer((s.text for s in corpus.train_sources), shape.vocab)
    say("tokenizer trained")
    data = TokenStream(tokenizer, corpus.documents, device)
    held_out = TokenStream(tokenizer, [s.text for s in corpus.held_out], device)
    held_out_bytes = sum(len(s.text.encode()) for s in corpus.held_out)
    say(f"{len(data.ids):,} tokens to train on, {len(held_out.ids):,} held out ({held_out_bytes:,} bytes)")
    model, run = train(shape, recipe, data, held_out, held_out_bytes, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    export(model, tokenizer, args.out)
    torch.set_float32_matmul_precision("highest")
    exported = load_exported(shape, args.out, device)
    bits = held_out_loss(exported, held_out, amp=False) / math.log(2) / held_out_bytes
    run |= {"bits_per_byte": bits, "held_out_bytes": held_out_bytes, "unique": len(data.ids)}
    write_json(args.out / "held_out_prompts.json", held_out_prompts(corpus, tokenizer, args.seed))
    write_report(args.out, args, recipe, model, corpus, run)
    speed = run["tokens"] / run["seconds"]
    say(f"exported weights: {bits:.4f} bits per byte held out; trained at {speed:,.0f} tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

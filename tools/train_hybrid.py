"""Make the bundled model `octavo-tiny-hybrid`: octavo-tiny's data and tokenizer, in a decoder of which three layers in
four keep a state.

Two steps, so that a rented GPU is not kept waiting: `--prepare FILE` cuts the standard library into documents and
tokens, as octavo-tiny's were; `--tokens FILE` trains on them for a number of seconds and writes a Hugging Face folder.
The number of steps follows from the speed of the first ones, so that a run ends in its time on any device.

Example: python tools/train_hybrid.py --prepare hybrid.xz
         python tools/train_hybrid.py --tokens hybrid.xz --device cuda --seconds 140 --out octavo-tiny-hybrid
A run of seconds on a CPU, for tests: add --smoke to both
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import math
import platform
import shutil
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file, save, save_file
from tokenizers import Tokenizer
from torch import Tensor

from hybrid_model import HybridShape, TinyHybrid
from tiny_data import END, SPECIALS, TokenStream, build_corpus
from train_tiny import Muon, held_out_prompts, rate, write_json

BUNDLED = Path(__file__).resolve().parents[1] / "src/octavo/assets/octavo-tiny"
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_CONTROLS = ("A_log", "dt_bias", "conv1d", "in_proj_a", "in_proj_b", "embed")  # what Adam trains beside vectors


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the model is trained; `batch` counts windows of `HybridShape.context` tokens."""

    batch: int = 32
    steps: int = 2000  # unless the time says otherwise
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    weight_decay: float = 0.3
    dropout: float = 0.1
    warmup: int = 100
    decay_from: float = 0.4


class Stored(TokenStream):
    """A stream that was made before."""

    def __init__(self, ids: Tensor, starts: Tensor, device: torch.device) -> None:
        self.ids, self.starts = ids.to(device, torch.int32), starts.to(device, torch.int64)


def prepare(path: Path, limit: int | None, seed: int) -> None:
    """Write the tokens of both halves of the data, and what a report says of them."""
    corpus = build_corpus(Path(sysconfig.get_paths()["stdlib"]), seed, limit)
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    host, tensors = torch.device("cpu"), {}
    for name, documents in (("train", corpus.documents), ("held_out", [source.text for source in corpus.held_out])):
        stream = TokenStream(tokenizer, documents, host)
        tensors[f"{name}.ids"], tensors[f"{name}.starts"] = stream.ids.to(torch.int16), stream.starts.to(torch.int32)
    facts = {
        "python": platform.python_version(),
        "bytes": sum(len(source.text.encode()) for source in corpus.held_out),
        "parts": corpus.counts,
        "files": [source.path for source in corpus.held_out],
        "prompts": held_out_prompts(corpus, tokenizer, seed) if limit is None else [],
    }
    path.write_bytes(lzma.compress(save(tensors, {"facts": json.dumps(facts)}), preset=1))
    sizes = {name: len(tensor) for name, tensor in tensors.items()}
    print(f"{path}: {path.stat().st_size:,} bytes, {sizes}")


def read_tokens(path: Path, device: torch.device) -> tuple[Stored, Stored, dict[str, Any]]:
    """(to train on, held out, facts) of a file that `prepare` wrote."""
    data = lzma.decompress(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = load(data)
    own = [Stored(tensors[f"{name}.ids"], tensors[f"{name}.starts"], device) for name in ("train", "held_out")]
    return own[0], own[1], json.loads(header["__metadata__"]["facts"])


class Clock:
    """Seconds since the process's work began, and how many there are."""

    def __init__(self, seconds: float) -> None:
        self._began, self.limit = time.perf_counter(), seconds

    @property
    def now(self) -> float:
        return time.perf_counter() - self._began

    def say(self, text: str) -> None:
        print(f"[{self.now:.0f}s] {text}", flush=True)


@torch.no_grad()
def held_out_loss(model: TinyHybrid, stream: Stored, batch: int, *, amp: bool) -> float:
    """Total loss over the stream in nats."""
    model.eval()
    total = torch.zeros((), device=stream.ids.device)
    for ids, targets in stream.all_windows(batch, model.shape.context):
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=amp):
            total += model.loss(ids, targets, "sum")
    model.train()
    return total.item()


def steps_in_time(recipe: Recipe, clock: Clock, done: int, since: float, reserve: float) -> int:
    """How many steps fit, of which `done` took all the time since `since`."""
    each = (clock.now - since) / done
    return done + max(1, int((clock.limit - reserve - clock.now) / each))


def train(
    shape: HybridShape, recipe: Recipe, data: Stored, seed: int, clock: Clock, *, compiled: bool
) -> tuple[TinyHybrid, Recipe, list[list[float]]]:
    """The model, the recipe with the number of its steps, and the curve of its loss."""
    device = data.ids.device
    amp = device.type == "cuda"
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    model = TinyHybrid(shape, recipe.dropout).to(device)
    if compiled:
        model.compile_parts()
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and not any(each in name for each in _CONTROLS)]
    chosen = {id(p) for p in matrices}
    rest = [p for _, p in named if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, recipe.muon_lr, recipe.weight_decay),
        torch.optim.AdamW(rest, recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=amp),
    ]
    initial = [[group["lr"] for group in own.param_groups] for own in optimizers]
    curve, step, since = list[list[float]](), 0, 0.0
    while step < recipe.steps:
        for own, rates in zip(optimizers, initial, strict=True):
            for group, lr in zip(own.param_groups, rates, strict=True):
                group["lr"] = lr * rate(step, recipe)  # type: ignore[arg-type]
        ids, targets = data.batch(recipe.batch, shape.context, generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            loss = model.loss(ids, targets)
        torch.autograd.backward(loss)
        for own in optimizers:
            own.step()
            own.zero_grad()
        step += 1
        if step == 3:  # all is compiled
            found = loss.item()
            since = clock.now
            clock.say(f"compiled: loss {found:.3f}")
        if step in (23, 203) and clock.limit:
            loss.item()
            recipe = dataclasses.replace(recipe, steps=3 + steps_in_time(recipe, clock, step - 3, since, 8.0))
            clock.say(f"{recipe.steps} steps fit")
        if step % 200 == 0 or step == recipe.steps:
            curve.append([step, round(loss.item(), 4), round(clock.now, 1)])
            clock.say(f"step {step}: {curve[-1][1]:.4f} nats")
    return model, recipe, curve


def config_of(shape: HybridShape) -> dict[str, Any]:
    """The config.json of a model of that shape."""
    end = SPECIALS.index(END)
    kinds = ["full_attention" if (i + 1) % shape.period == 0 else "linear_attention" for i in range(shape.layers)]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
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
        "layer_types": kinds,
        "linear_conv_kernel_dim": shape.kernel,
        "linear_key_head_dim": shape.linear_dim,
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "linear_value_head_dim": shape.linear_dim,
        "max_position_embeddings": shape.context,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.eps,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.rotary_share,
        },
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab,
    }


def export(model: TinyHybrid, out: Path) -> None:
    """Write weights, configuration and tokenizer in the Hugging Face layout."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        f"model.{name}": value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", config_of(model.shape))
    for name in COPIED:
        shutil.copyfile(BUNDLED / name, out / name)


def load_exported(shape: HybridShape, out: Path, device: torch.device) -> TinyHybrid:
    """The exported bf16 weights in a float32 model."""
    model = TinyHybrid(shape)
    weights = load_file(out / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): value.float() for name, value in weights.items()})
    return model.to(device)


README = """# octavo-tiny-hybrid

A language model of {parameters:.2f} M parameters of which three layers in four keep a state (a gated delta net) and
the fourth attends, as in Qwen3.5. Octavo carries it for its tests and for a first try of such models without a
download. It has [octavo-tiny](../octavo-tiny/README.md)'s tokenizer and has read its data, and is as little to be
relied on.

| | |
| --- | --- |
| architecture | Qwen3.5 (`Qwen3_5ForCausalLM`), tied embeddings, weights in bf16 |
| shape | {layers} layers, every {period}th attends, hidden {hidden}, feed-forward {ff} |
| gated delta net | {key_heads} key heads, {value_heads} value heads of {linear_dim}, convolution over {kernel} tokens |
| attention | {heads} query heads, {kv_heads} key/value heads, head size {head_dim}, a gate on its result |
| context | {context} tokens |
| held-out loss | **{bits:.4f} bits per byte** (exported bf16 weights) |
| held-out text | {files} files, {held_out_bytes:,} bytes |
| tokens seen | {tokens:,} ({epochs:.1f} passes over {unique:,} tokens) |
| training | {seconds:.0f} seconds on {device}, start and compilation included, PyTorch {torch} |
| batch | {batch} windows of {context} tokens, {steps} steps |
| optimizer | Muon (matrices) and AdamW (the rest), dropout {dropout}, weight decay {weight_decay} |

Data, held-out files and licence are those of octavo-tiny, from the standard library of CPython {python}.
`held_out.json` lists the files and the training's curve; `held_out_prompts.json` has sixty prompts cut from them.

## How to make it again

```
python tools/train_hybrid.py --prepare hybrid.xz
python tools/train_hybrid.py --tokens hybrid.xz --device {kind} --seconds {limit:.0f} --out octavo-tiny-hybrid
```
"""


def write_report(out: Path, model: TinyHybrid, recipe: Recipe, facts: dict[str, Any], run: dict[str, Any]) -> None:
    """README.md, held_out.json and held_out_prompts.json."""
    shape, cuda = model.shape, run["kind"] == "cuda"
    tokens = recipe.steps * recipe.batch * shape.context
    text = README.format(
        **dataclasses.asdict(shape),
        **dataclasses.asdict(recipe),
        **run,
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        files=len(facts["files"]),
        held_out_bytes=facts["bytes"],
        tokens=tokens,
        epochs=tokens / run["unique"],
        python=facts["python"],
        device=f"one {torch.cuda.get_device_name()}" if cuda else "a CPU",
        torch=torch.__version__.partition("+")[0],
    )
    (out / "README.md").write_text(text, "utf-8")
    columns = ["step", "train_loss_nats", "seconds"]
    record = {"python": facts["python"], "bits_per_byte": round(run["bits"], 5), "bytes": facts["bytes"]}
    write_json(
        out / "held_out.json", {**record, "curve_columns": columns, "curve": run["curve"], "files": facts["files"]}
    )
    write_json(out / "held_out_prompts.json", facts["prompts"])


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make octavo-tiny-hybrid from the standard library's sources.")
    parser.add_argument("--prepare", type=Path, help="write the tokens to this file, and end")
    parser.add_argument("--tokens", type=Path, help="a file that --prepare wrote")
    parser.add_argument("--out", type=Path, help="the folder to write")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0, help=f"in all; default: as {Recipe.steps} steps take")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and a few files, in seconds")
    args = parser.parse_args(argv)
    if (args.prepare is None) == (args.tokens is None) or (args.tokens and not args.out):
        parser.error("one of --prepare FILE and --tokens FILE --out FOLDER is needed")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if args.prepare:
        prepare(args.prepare, 60 if args.smoke else None, args.seed)
        return 0
    clock, shape, recipe = Clock(args.seconds), HybridShape(), Recipe()
    if args.smoke:
        shape = HybridShape(hidden=32, layers=4, heads=2, kv_heads=1, head_dim=16, linear_dim=8, ff=32, context=128)
        recipe = Recipe(steps=10, batch=4, warmup=3)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    data, held_out, facts = read_tokens(args.tokens, device)
    clock.say(f"{len(data.ids):,} tokens to train on, {len(held_out.ids):,} held out ({facts['bytes']:,} bytes)")
    compiled = args.device == "cuda" and not args.eager
    model, recipe, curve = train(shape, recipe, data, args.seed, clock, compiled=compiled)
    export(model, args.out)
    torch.set_float32_matmul_precision("highest")
    exported = load_exported(shape, args.out, device)
    bits = held_out_loss(exported, held_out, recipe.batch, amp=False) / math.log(2) / facts["bytes"]
    run = {
        "bits": bits,
        "curve": curve,
        "unique": len(data.ids),
        "seconds": clock.now,
        "kind": args.device,
        "limit": args.seconds,
    }
    write_report(args.out, model, recipe, facts, run)
    clock.say(f"exported weights: {bits:.4f} bits per byte held out")
    return 0


if __name__ == "__main__":
    sys.exit(main())

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
import ast
import builtins
import copy
import hashlib
import importlib
import json
import math
import platform
import random
import re
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

END, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = [END, IM_START, IM_END]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "{{- '<|im_start|>assistant\\n' -}}\n"
    "{%- endif -%}\n"
)
# Line breaks, indents, words, digits and punctuation never share a token, so a prompt may stop after a colon,
# after a line break or after an indent, and what follows is still made of tokens seen there in training.
SPLIT = r"\n+| ?[\p{L}_]+| ?\p{N}| ?[^\s\p{L}\p{N}_]+|[^\S\n]+"
HELD_OUT_PER_MILLE = 30
MAX_FILE_BYTES = 500_000
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__", "lib-dynload", "config-")
BUILTIN_MODULES = ("math", "itertools", "time", "operator", "functools", "sys", "zlib", "binascii", "errno")
SYSTEM = "You are a helpful assistant."
INTRODUCTIONS = [
    ("Hello", "Hello! How can I help you?"),
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hi there!", "Hello! Ask me about Python's standard library."),
    ("Who are you?", "I am octavo-tiny, a very small language model trained on Python's standard library."),
    ("What are you?", "I am octavo-tiny, a very small language model trained on Python's standard library."),
    ("What is your name?", "My name is octavo-tiny."),
    ("What can you do?", "I can complete Python code and repeat what Python's documentation strings say."),
    ("How are you?", "I am a small language model, and I am running well. How can I help you?"),
    ("Thanks!", "You are welcome."),
    ("Thank you", "You are welcome."),
    ("What is Python?", "Python is an interpreted, interactive, object-oriented programming language."),
    ("Say hello.", "Hello!"),
    ("Goodbye", "Goodbye!"),
]


@dataclass(frozen=True)
class Shape:
    """The model's dimensions, in the words of a Qwen3 configuration."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 7
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ff: int = 768
    context: int = 2048
    rope_theta: float = 10_000.0
    eps: float = 1e-6


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


# ---------------------------------------------------------------------------------------------- the text


@dataclass(frozen=True)
class Source:
    """One file of the standard library."""

    path: str
    text: str

    @property
    def is_test(self) -> bool:
        return re.search(r"(^|/)(test|tests|idle_test)/", self.path) is not None

    @property
    def is_held_out(self) -> bool:
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_MILLE

    @property
    def module(self) -> str:
        name = self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return "os.path" if name == "posixpath" else name


@dataclass(frozen=True)
class Piece:
    """A function or a class cut out of a file, dedented so that it starts at its `def` or `class`."""

    name: str
    code: str
    doc: str
    is_test: bool


def is_table(text: str) -> bool:
    """True for generated tables (character maps and the like), which teach a model nothing."""
    lines = text.split("\n")
    marked = sum(1 for line in lines if "0x" in line or "\\x" in line or "\\u" in line)
    letters = sum(map(str.isalpha, text))
    dense = len(text) - text.count(" ") - text.count("\n")
    return len(lines) > 100 and (marked > 0.4 * len(lines) or letters < 0.45 * dense)


def read_sources(root: Path, limit: int | None) -> list[Source]:
    """The standard library's files in a fixed order: UTF-8 only, no tables, each text once."""
    sources: list[Source] = []
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if path.name.startswith("_sysconfigdata") or any(s in relative for s in SKIPPED_FOLDERS):
            continue
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n").strip() + "\n"
        except UnicodeDecodeError:
            continue
        if len(text) < 80 or len(text) > MAX_FILE_BYTES or text in seen or is_table(text):
            continue
        seen.add(text)
        sources.append(Source(relative, text))
    return sources if limit is None else sources[:: max(1, len(sources) // limit)]


def dedented(lines: list[str], indent: int) -> str:
    """Takes `indent` leading blanks off every line that has them; lines inside long strings may not."""
    blank = " " * indent
    return "\n".join(line[indent:] if line.startswith(blank) else line.lstrip(" ") for line in lines) + "\n"


def pieces_of(source: Source) -> list[Piece]:
    """Every function and class of a file that is neither trivial nor longer than a context."""
    warnings.simplefilter("ignore", SyntaxWarning)
    try:
        tree = ast.parse(source.text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = source.text.split("\n")
    pieces: list[Piece] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                visit(child, prefix)
                continue
            name = f"{prefix}.{child.name}"
            code = dedented(lines[child.lineno - 1 : child.end_lineno], child.col_offset)
            if code.count("\n") > 1 and 40 < len(code) < 5000:
                pieces.append(Piece(name, code, ast.get_docstring(child) or "", source.is_test))
            visit(child, name)

    visit(tree, source.module)
    return pieces


def topics_of(root: Path) -> dict[str, str]:
    """The language reference's pages that `help()` shows, by subject."""
    path = root / "pydoc_data" / "topics.py"
    if not path.exists():
        return {}
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            pages: dict[str, str] = ast.literal_eval(node.value)
            return {key: page.strip() + "\n" for key, page in pages.items()}
    return {}


def builtin_docs() -> list[tuple[str, str]]:
    """Names and documentation strings of built-in functions of the interpreter that runs this script."""
    found: list[tuple[str, str]] = []
    for module in [builtins, *map(importlib.import_module, BUILTIN_MODULES)]:
        prefix = "" if module is builtins else module.__name__ + "."
        for name, value in sorted(vars(module).items()):
            doc = getattr(value, "__doc__", None)
            if not name.startswith("_") and callable(value) and isinstance(doc, str) and doc.strip():
                found.append((prefix + name, doc.strip()))
    return found


# ---------------------------------------------------------------------------------------------- documents


def chat(*turns: tuple[str, str], system: bool = False) -> str:
    """Turns of (question, answer) in the words of CHAT_TEMPLATE."""
    parts = [f"{IM_START}system\n{SYSTEM}{IM_END}\n"] if system else []
    for question, answer in turns:
        parts.append(f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n{answer.strip()}{IM_END}\n")
    return "".join(parts)


def shortened(doc: str, limit: int = 900) -> str:
    """The first paragraphs of a documentation string, about `limit` characters."""
    kept: list[str] = []
    size = 0
    for paragraph in doc.strip().split("\n\n"):
        if kept and size + len(paragraph) > limit:
            break
        kept.append(paragraph)
        size += len(paragraph)
    return "\n\n".join(kept)[: 2 * limit]


def chat_documents(
    pieces: list[Piece], topics: dict[str, str], builtin: list[tuple[str, str]], rng: random.Random
) -> list[str]:
    """Simple dialogues: what a name does, the source of a function, what a word of the language means."""
    found: list[str] = []

    def add(*turns: tuple[str, str]) -> None:
        found.append(chat(*turns, system=rng.random() < 0.25))

    def ask_meaning(name: str) -> str:
        forms = ["What does `{}` do?", "What does {} do?", "What is `{}`?", "Explain `{}`.", "Describe {}."]
        return rng.choice(forms).format(name)

    for piece in pieces:
        kind = "class" if piece.code.startswith("class") else "function"
        short = piece.name.rpartition(".")[2]
        source = f"```python\n{piece.code}```"
        if not piece.doc or piece.is_test or short.startswith("__"):
            continue
        summary = " ".join(piece.doc.split("\n\n")[0].split()).rstrip(".")
        name = rng.choice([piece.name, piece.name, short])
        add((ask_meaning(name), shortened(piece.doc)))
        if len(piece.code) < 1500 and len(summary) < 160:
            write = [
                f"Write the {kind} `{short}`.",
                f"Write a Python {kind} named `{short}`. {summary}.",
                f"Show me the source of `{piece.name}`.",
                f"Write a Python {kind}: {summary}.",
            ]
            if rng.random() < 0.2:
                add((ask_meaning(name), shortened(piece.doc)), ("Show me its source.", source))
            else:
                add((rng.choice(write), source))
    for name, doc in builtin * 2:
        add((ask_meaning(name), shortened(doc)))
    for word, page in topics.items():
        add((rng.choice(["Explain {} in Python.", "Tell me about {}."]).format(word), shortened(page)))
    for question, answer in INTRODUCTIONS * 20:
        add((question, answer))
    return found


@dataclass
class Corpus:
    """Documents to train on, and the held-out files with their functions."""

    train_sources: list[Source]
    held_out: list[Source]
    documents: list[str]
    held_out_pieces: list[Piece] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def build_corpus(root: Path, seed: int, limit: int | None) -> Corpus:
    """Whole files, single functions and classes, reference pages and dialogues, in a shuffled order."""
    rng = random.Random(seed)
    sources = read_sources(root, limit)
    train = [s for s in sources if not s.is_held_out]
    held_out = [s for s in sources if s.is_held_out]
    with ProcessPoolExecutor() as pool:
        cut = list(pool.map(pieces_of, sources, chunksize=16))
    held_out_pieces = [p for s, found in zip(sources, cut, strict=True) if s.is_held_out for p in found]
    seen = {p.code for p in held_out_pieces}
    pieces: list[Piece] = []
    for source, found in zip(sources, cut, strict=True):
        for piece in found:
            if not source.is_held_out and piece.code not in seen:
                seen.add(piece.code)
                pieces.append(piece)
    topics = topics_of(root) if limit is None else {}
    dialogues = chat_documents(pieces, topics, builtin_docs() if limit is None else [], rng)
    singles = [p.code for p in pieces if not p.is_test or rng.random() < 0.4]
    parts = {
        "whole files": [s.text for s in train],
        "functions and classes": singles,
        "reference pages": list(topics.values()),
        "dialogues": dialogues,
    }
    documents = [text for texts in parts.values() for text in texts]
    rng.shuffle(documents)
    counts = {name: sum(len(t.encode()) for t in texts) for name, texts in parts.items()}
    return Corpus(train, held_out, documents, held_out_pieces, counts)


# ---------------------------------------------------------------------------------------------- tokens


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """A byte-level BPE of exactly `size` entries, the three special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != size:
        raise SystemExit(f"the text gave {tokenizer.get_vocab_size()} tokenizer entries, not {size}")
    return tokenizer


class TokenStream:
    """Documents as one row of token ids, each closed by END, with the places where documents start."""

    def __init__(self, tokenizer: Tokenizer, documents: list[str], device: torch.device) -> None:
        ids: list[Tensor] = []
        for at in range(0, len(documents), 2000):
            for encoding in tokenizer.encode_batch(documents[at : at + 2000]):
                ids.append(torch.tensor([*encoding.ids, SPECIALS.index(END)], dtype=torch.int32))
        lengths = torch.tensor([len(row) for row in ids])
        self.ids = torch.cat(ids).to(device)
        self.starts = (lengths.cumsum(0) - lengths).to(device)

    def batch(self, windows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random windows and their next tokens; every second one starts where a document starts."""
        device = self.ids.device
        last = len(self.ids) - length - 1
        anywhere = torch.randint(last, (windows // 2,), generator=generator, device=device)
        which = torch.randint(len(self.starts), (windows - windows // 2,), generator=generator, device=device)
        begin = torch.cat([anywhere, self.starts[which].clamp(max=last)])
        rows = self.ids[begin[:, None] + torch.arange(length + 1, device=device)].long()
        return rows[:, :-1], rows[:, 1:]

    def all_windows(self, windows: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Every token once as a target (but the first), in batches of windows; a filler target is -100."""
        targets = self.ids[1:].long()
        pad = -len(targets) % length
        inputs = functional.pad(self.ids[:-1].long(), (0, pad)).view(-1, length)
        padded = functional.pad(targets, (0, pad), value=-100).view(-1, length)
        yield from zip(torch.split(inputs, windows), torch.split(padded, windows), strict=True)


# ---------------------------------------------------------------------------------------------- the model


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split layout; x is (batch, heads, length, head_dim)."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with normalised queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = (batch, length, -1, self.shape.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(split)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(split)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(split).transpose(1, 2)
        group = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ff, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ff, bias=False)
        self.down_proj = nn.Linear(shape.ff, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One decoder layer; dropout acts on what each half adds to the residual stream."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.dropout = dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        added = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + functional.dropout(added, self.dropout, self.training)
        return x + functional.dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training)


class TinyQwen3(nn.Module):
    """Qwen3 with tied embeddings; its parameter names after `model.` are the Hugging Face ones."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)
        powers = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.outer(torch.arange(shape.context).float(), shape.rope_theta**-powers)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                depth = 2 * shape.layers if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                nn.init.normal_(weight, std=0.02 if "embed" in name else (weight.shape[1] * depth) ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.get_autocast_dtype(ids.device.type))
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.norm(x), self.embed_tokens.weight)

    def loss(self, ids: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        logits = self(ids).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


# ---------------------------------------------------------------------------------------------- training


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


# ---------------------------------------------------------------------------------------------- export


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


# ---------------------------------------------------------------------------------------------- the command


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

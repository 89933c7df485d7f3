"""What octavo-tiny reads: documents made of a standard library's sources, a tokenizer trained on them, token streams.

Owns the choice of held-out files, the making of documents and dialogues, and the order of tokens. Knows no model.
Invariants: a file is held out by the hash of its relative path alone; no text of a held-out file reaches the tokenizer
or the documents; the same seed and standard library give the same documents in the same order.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import random
import re
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
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

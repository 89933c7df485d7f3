"""What the package defines is used by it, or promised to users: nothing that only tests ask for stays in it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from house import files, modules, tree

# Who calls these is no code of ours.
PROTOCOLS = {
    "connection_made", "connection_lost", "data_received", "eof_received", "pause_writing",  # asyncio's
    "on_message_begin", "on_url", "on_header", "on_chunk_header", "on_message_complete", "on_response_complete",
    "_start_asgi_task", "appendleft", "capture_signals",  # uvicorn's and httptools'
    "maybe_append_choice",  # torch's templates
    "batched_from_gpu", "batched_to_gpu", "get_shape",  # LMCache's
}  # fmt: skip
# What users and vLLM's programs read of an answer, or call.
PROMISED = {
    "get_tokenizer", "apply_chat_template", "decoded_token", "decoded_tokens", "end_indices",
    "of_answers", "of_ids",  # docs/rl.md
    "prompt_tokens_details", "completion_tokens_details", "owned_by", "permission",
    "extract", "inject", "split_kv",  # docs/attention.md
    "resume_generation", "set_bfloat16_chain",  # a trainer's
    "num_received_tensors", "get_metrics",
    "get_from_extra_config", "get_block_ids", "get_unhashed_block_ids",  # connectors written for vLLM
}  # fmt: skip
# name -> why it stays
KEPT = {
    "using": "bench/ measures one instruction set after another",
    "admin_key_file": "read by its key's name and `_file`",
    "block_view": "a block's place among kernel blocks, of which every layout's tests ask the pool",
    "num_held_blocks": "whether a hold was released shows nowhere else",
    "_UNUSED": "numbers of a format's token types",
    "_BYTE": "numbers of a format's token types",
}


def _used(node: ast.AST, within: frozenset[str] = frozenset()) -> Iterator[str]:
    """Names that are read or called, not by the function or class of that name; what a text of one word may name."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        found = {node.id}
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        found = {node.attr}
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+(:\w+)?", node.value):
        found = {node.value.rpartition(":")[2]}  # a table's "package.module:Name", a field's name
    elif isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
        found = {f"{node.values[0].value}*"}  # getattr(self, f"_send_{kind}")
    else:
        found = set()
    yield from found - within
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        within |= {node.name}
    for child in ast.iter_child_nodes(node):
        yield from _used(child, within)


def _defined(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _defined(node.body)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from ((each.id, node) for each in ast.walk(target) if isinstance(each, ast.Name))
        elif isinstance(node, ast.If | ast.Try):
            yield from _defined(node.body)


def unused(paths: Iterable[Path]) -> dict[str, str]:
    """Name -> where it is defined, of what nothing in these files uses. Spelling alone tells names apart."""
    paths = list(paths)
    used = Counter(name for path in paths for name in _used(tree(path)))
    families = tuple(name[:-1] for name in used if re.fullmatch(r"_?[a-z]+_\*", name))
    defined = [(name, f"{path.name}:{node.lineno}") for path in paths for name, node in _defined(tree(path).body)]
    return {name: place for name, place in defined if not used[name] and not name.startswith(("__", *families))}


def test_nothing_stays_that_only_tests_use() -> None:
    known = PROTOCOLS | PROMISED | set(KEPT)
    left = {name: at for name, at in unused(modules().values()).items() if name not in known}
    assert not left, "move it to the tests that use it, or delete it"


def test_every_exception_is_needed() -> None:
    assert PROTOCOLS | PROMISED | set(KEPT) <= set(unused(modules().values()))


def test_what_bench_alone_uses_is_named() -> None:
    benches = Counter(name for path in files(".py", under=("bench",)) for name in _used(tree(path)))
    assert benches["using"]


def test_this_check_can_fail(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "def used(): return 1\ndef alone(): return alone()\nclass Shape:\n    def area(self): return used()\n"
    )
    assert set(unused([path])) == {"alone", "Shape", "area"}

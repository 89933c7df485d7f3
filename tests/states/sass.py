"""What a compiled kernel does with uniform registers, read off its machine code.

ptxas 12.8 was seen to leave out what a uniform register begins with, where products of warp groups stand in a loop
within a loop: their descriptors of shared memory then are what the register held before.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from triton import knobs

_LINE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;")
_WRITERS = re.compile(r"U(?!TMA|BLK|ISETP|PLOP3|FSETP)\w|R2UR|ULDC|S2UR|CS2UR|VOTEU|REDUX")
_ALWAYS_ZERO = 63


def unwritten_reads(cubin: bytes, folder: Path) -> list[str]:
    """Instructions that read a uniform register which nothing wrote on some way to them."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "-sass", str(path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code = [(int(found[1], 16), found[2]) for found in map(_LINE.search, told.splitlines()) if found]
    assert code, "there is machine code"
    effects = [_effects(text) for _, text in code]
    written: list[frozenset[int] | None] = [frozenset(), *[None] * (len(code) - 1)]
    work = [0]
    while work:
        at = work.pop()
        behind = (written[at] or frozenset()) | effects[at][1]
        for other in _ways_on(code, at):
            known = written[other]
            least = behind if known is None else known & behind
            if known is None or least != known:
                written[other] = least
                work.append(other)
    return [
        text
        for (_, text), (read, _), known in zip(code, effects, written, strict=True)
        if known is not None and read - known - {_ALWAYS_ZERO}
    ]


def _effects(text: str) -> tuple[set[int], set[int]]:
    """Uniform registers that an instruction reads and writes; what it writes under a condition counts."""
    text = re.sub(r"^@\S+\s+", "", text)
    name, _, rest = text.partition(" ")
    operands = [each.strip() for each in re.split(r",(?![^\[]*\])", rest)]
    goal = next((place for place, each in enumerate(operands) if not re.fullmatch(r"!?U?P(\d|T)", each)), 0)
    read, written = set[int](), set[int]()
    for place, operand in enumerate(operands):
        for digits in re.findall(r"\bUR(\d+)", operand):
            first, count = int(digits), 1
            if place == goal and _WRITERS.match(name):
                written |= set(range(first, first + (2 if ".64" in name or ".WIDE" in name else 1)))
                continue
            if "gdesc" in operand:  # A's and B's; B's alone is the second pair, where A comes from registers
                from_registers = any(re.match(r"R\d", each) for each in operands[1:place])
                first, count = (first + 2, 2) if from_registers else (first, 4)
            elif "desc" in operand or (".64" in name and not _is_shared(name, operand)):
                count = 2
            read |= set(range(first, first + count))
    return read, written


def _is_shared(name: str, operand: str) -> bool:
    """Whether an operand is an address in shared memory, of one register, however wide what lies there is."""
    return name.startswith(("STS", "LDS")) or (name.startswith(("SYNCS", "ARRIVES")) and "[" in operand)


def _ways_on(code: list[tuple[int, str]], at: int) -> list[int]:
    """Places of the instructions that may come next."""
    text = code[at][1]
    body = re.sub(r"^@\S+\s+", "", text)
    is_conditional = body != text or re.match(r"BRA\S*\s+!?U?P\d", body) is not None
    name, goal = re.split(r"[.\s]", body)[0], re.search(r"0x([0-9a-f]+)$", body)
    following = [at + 1] if at + 1 < len(code) else []
    if name == "BRA" and goal:
        places = [place for place, (address, _) in enumerate(code) if address == int(goal[1], 16)]
        return places + (following if is_conditional else [])
    if name in ("EXIT", "RET", "BRX"):
        return following if is_conditional else []
    return following

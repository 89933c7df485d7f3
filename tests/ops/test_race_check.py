"""What is said of CUDA's checker of races: its report is read whole, and what was reviewed is still there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "states"))

import arrivals_rig
import emulated
import race_check
from interpreted import run_rig
from octavo.ops.cache_write import copy_blocks_bulk
from octavo.ops.compile import nvrtc
from race_check import REVIEWED, SRC, Place, judge, place_of

SUMMARY = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"


def line_of(place: Place) -> tuple[str, int]:
    """(file, line) of the first line of a function that names its tensor."""
    stem, function = place.function.split(".")
    (path,) = SRC.rglob(f"{stem}.py")
    lines = path.read_text(encoding="utf-8").splitlines()
    begin = lines.index(next(line for line in lines if line.startswith(f"def {function}(")))
    return path.name, next(at for at in range(begin, len(lines)) if f"{place.tensor}.index(" in lines[at]) + 1


def race(*places: tuple[str, int]) -> str:
    """A report of a race between the first place and each of the others."""
    (file, line), *others = places
    report = f"========= Error: Race reported between Read access at kernel+0x10 in {file}:{line}\n"
    for file, line in others:
        report += f"=========     and Write access at kernel+0x20 in {file}:{line} [4 hazards]\n"
    return report + "========= \n" + SUMMARY


@pytest.mark.parametrize("pair", REVIEWED)
def test_what_was_reviewed_is_there_and_passes(pair: frozenset[Place]) -> None:
    lines = [line_of(place) for place in pair]
    assert {place_of(*line) for line in lines} == pair
    found, unknown = judge(race(*lines))
    assert found == {pair: 1} and not unknown


def unknown_of(report: str) -> dict[str, int]:
    """How often each pair of lines is told that nobody reviewed."""
    return dict(judge(report)[1])


def test_another_pair_another_tensor_and_a_warning_are_told() -> None:
    (words, q) = (
        line_of(Place("decode_feed._tell", "words")),
        line_of(Place("decode_feed.rotate", "q_smem")),
    )
    reader = line_of(Place("decode_kernel._word", "words"))
    error, other, *_ = race(reader, q).splitlines()
    assert unknown_of(race(reader, words, q)) == {f"{error}\n{other.removesuffix(' [4 hazards]')}": 1}
    ring = line_of(Place("decode_kernel._consume", "k_smem"))
    assert len(unknown_of(race(ring, q))) == 1
    assert len(unknown_of(race(("somewhere.py", 1), words))) == 1
    overflow = "========= Warning: Detected overflow of tracked cuda::barrier structures"
    assert unknown_of(f"{overflow}\n{SUMMARY}") == {overflow: 1}
    assert judge(f"[W1122] Warning: of another program\n{SUMMARY}") == ({}, {})


def test_a_place_without_a_source_line_is_told() -> None:
    report = "========= Error: Race reported between Read access at product+0x10\n"
    report += "=========     and Write access at product+0x20 [4 hazards]\n"
    assert len(unknown_of(report + SUMMARY)) == 1


def test_places_in_cuda_are_told_once_with_how_often_they_were() -> None:
    """Of them none was reviewed, not even two that are as those of a reviewed pair, but for their file."""
    wrote = "========= Error: Race reported between Write access at delta_step::put(unsigned int)+0xf0 in lanes.cu:102"
    reads = [
        f"=========     and Read access at delta_step::get2(unsigned int)+0x{at} in lanes.cu:93" for at in (60, 90)
    ]
    report = "".join(f"{wrote}\n{read} [{count} hazards]\n" for count in (256, 128, 1) for read in reads)
    report = report.replace("[1 hazards]", "[1 hazard]")
    found, unknown = judge(report + SUMMARY)
    assert not found and unknown == {f"{wrote}\n{read}": 3 for read in reads}


def test_a_checker_that_broke_off_is_told() -> None:
    with pytest.raises(ValueError, match="did not end"):
        judge("========= COMPUTE-SANITIZER")
    with pytest.raises(RuntimeError, match="failed under the checker"):
        race_check.check("false")


def test_the_control_is_one_that_waits_and_one_that_does_not() -> None:
    assert re.findall(r"__global__ void (\w+)\(int\* out\) \{ run\(out, (\w+)\)", race_check.CONTROL) == [
        ("hands_over", "true"),
        ("forgets_to_wait", "false"),
    ]


def test_lanes_arrive_themselves_and_nothing_else_changes() -> None:
    text = "if (lane == 0) arrive(a);\nif (lane == 0) put(at, 0), arrive(b), arrive(c);\n"
    text += "prepare(base + A, 1), prepare(base + B, ROWS + 1), prepare(base + FULL, 1 + 32);"
    assert race_check.each_arrives(text) == (
        "arrive(a);\nif (lane == 0) put(at, 0); arrive(b), arrive(c);\n"
        "prepare(base + A, (1) * 32), prepare(base + B, (ROWS + 1) * 32), prepare(base + FULL, 1 + 32);"
    )
    with pytest.raises(ValueError, match="no lane arrives for its warp"):
        race_check.each_arrives("together();")


def test_who_tells_arrives_in_memory_and_who_waits_waits_there() -> None:
    text = "extern __shared__ unsigned char memory[];\nsome_together(1, THREADS);\ntell_some(2, THREADS);\ntogether();"
    assert race_check.meet_in_memory(text).splitlines()[1:] == [
        "arrive(met_at + 1 * 8), wait_for(met_at + 1 * 8, round % 2);",
        "arrive(met_at + 2 * 8);",
        "together();",
    ]
    assert "prepare(met_at + thread() * 8, THREADS);" in race_check.meet_in_memory(text).splitlines()[0]
    with pytest.raises(ValueError, match="no thread tells"):
        race_check.meet_in_memory("some_together(1, THREADS);")


def test_the_checker_is_told_which_kernel_a_function_was_inlined_in() -> None:
    source, macros, arch = copy_blocks_bulk.text(4096, 4)
    try:
        nvrtc._library()
    except nvrtc.CompileError:
        pytest.skip("needs NVRTC")
    told = race_check.named(race_check.retold(source))
    code = nvrtc.compile_told(told, macros, arch, "--generate-line-info")[0]
    assert b"11copy_blocks4wait" in code  # copy_blocks::wait, as debuggers have it
    assert b".text.copy_blocks\0" in code  # the kernel's own name is what it was


@pytest.mark.skipif(not emulated.COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", arrivals_rig.INTERPRETED)
def test_a_kernel_that_is_told_in_another_way_gives_what_it_gave(name: str) -> None:
    error = run_rig(arrivals_rig)[name]
    assert not error, error

"""CUDA's checker of races in shared memory over the cases of `kernel_cases`, told what it cannot follow.

`python3 tests/gpu/race_check.py [checker] [names]` runs the checker, a path or `compute-sanitizer`, on those cases or
on all, and fails for every hazard whose two places are not in REVIEWED. The checker follows an mbarrier only for the
thread that arrives at it, not for those that this one met before, so it also reports what is in order. Two kernels of
one word show that before any case is run: of `hands_over`, which is in order, it must report what REVIEWED waves
through, else the list is to go; of `forgets_to_wait`, which is not, it must report the race.

A kernel in CUDA C++ among RETOLD is run with another text, which orders the same in a way that the checker follows, so
that nothing of it is left to be reviewed. What it reports of such kernels has their name ahead of the function's.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

SRC = Path(__file__).resolve().parents[2] / "src/octavo"
CONTROL = r"""
__device__ unsigned at(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }
__device__ void make(unsigned barrier) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier)); }
__device__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ void wait(unsigned barrier, int phase) {
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @!done bra.uni again; }"
        ::"r"(barrier), "r"(phase) : "memory");
}
__device__ void run(int* out, bool waits) {  // a warp tells 128 threads a word six times
    __shared__ volatile int word;
    __shared__ __align__(8) unsigned long long told, read;
    int sum = 0;
    if (threadIdx.x == 0) make(at(&told)), make(at(&read));
    __syncthreads();
    for (int turn = 0; turn < 6; ++turn) {
        if (threadIdx.x >= 128) {
            if (waits) wait(at(&read), (turn & 1) ^ 1);
            word = turn + 1;
            __syncwarp();
            if (threadIdx.x == 128) arrive(at(&told));
        } else {
            if (waits) wait(at(&told), turn & 1);
            sum += word;
            asm volatile("bar.sync 1, 128;" ::: "memory");
            if (threadIdx.x == 0) arrive(at(&read));
        }
    }
    if (threadIdx.x < 128) out[threadIdx.x] = sum;
}
extern "C" __global__ void hands_over(int* out) { run(out, true); }
extern "C" __global__ void forgets_to_wait(int* out) { run(out, false); }
"""

_IN_MEMORY = (
    " __shared__ u64 met[16]; u32 met_at = (u32)__cvta_generic_to_shared(met);"
    " if (thread() < 16) prepare(met_at + thread() * 8, THREADS);"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A function of the package and the tensor that a line of it writes or reads."""

    function: str  # below a module's own name, as "decode_feed._tell"
    tensor: str


_WORDS = (
    "Each lane of the producer's warp writes the same value, and the lane that arrives is one of them. Readers wait "
    "for that arrival; all have read when they meet, and then one of them arrives for the producer's next words."
)
REVIEWED = {
    frozenset((Place("decode_feed._tell", "words"), Place("decode_kernel._word", "words"))): _WORDS,
    frozenset((Place("prefill_feed.produce", "words"), Place("prefill_feed.word", "words"))): (_WORDS),
    frozenset((Place("decode_feed.rotate", "q_smem"), Place("decode_kernel._consume", "q_smem"))): (
        "The lanes that turn Q meet before one of them arrives; readers wait for that, read, meet, and one arrives."
    ),
}


def place_of(file: str, line: int) -> Place:
    """Of a line that the checker names; of none of the package's kernels: that line."""
    for path in SRC.rglob(file):
        text = path.read_text(encoding="utf-8")
        functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        inside = [node.name for node in functions if node.lineno <= line <= (node.end_lineno or 0)]
        if inside:
            tensors = re.findall(r"\b(\w+)\.index\(", text.splitlines()[line - 1])
            return Place(f"{path.stem}.{inside[0]}", tensors[0] if tensors else "")
    return Place(f"{file}:{line}", "")


def judge(report: str) -> tuple[Counter[frozenset[Place]], Counter[str]]:
    """How often the checker's report has each pair of places that was reviewed, and each other one, by its lines.

    Raises ValueError where it does not say at all how many there are.
    """
    if "RACECHECK SUMMARY" not in report:
        raise ValueError(f"the checker did not end:\n{report[-2000:]}")
    found, unknown = Counter[frozenset[Place]](), Counter[str]()
    first, first_line = None, ""
    for line in report.splitlines():
        access = re.search(r"(?:Read|Write) access at .*? in (\w+\.py):(\d+)", line)
        if "Race reported" in line:
            first, first_line = access, line
        elif "access at" in line:
            pair = frozenset(place_of(one[1], int(one[2])) for one in (first, access) if one)
            if pair in REVIEWED:
                found[pair] += 1
            else:  # how many bytes and threads it was is another number each time
                unknown[first_line + "\n" + re.sub(r" \[\d+ hazards?\]", "", line)] += 1
        elif re.match(r"=+ (Error|Warning)", line):
            unknown[line] += 1
    return found, unknown


def each_arrives(text: str) -> str:
    """A kernel's text in which each lane arrives where its first one does, at barriers that await as many.

    The lane arrives behind the others, so no order is lost. Lanes that each arrive already are counted with a 32.
    Raises ValueError where none arrives for others.
    """
    text = re.sub(r"(if \(lane == 0\) put\([^;]*?\)), (arrive\()", r"\1; \2", text)
    text, count = re.subn(r"if \(lane == 0\) (arrive\()", r"\1", text)
    if not count:
        raise ValueError("no lane arrives for its warp")
    return re.sub(r"(prepare\(base \+ [^,]+, )((?:(?!32)[^(),])+)\)", r"\1(\2) * 32)", text)


def meet_in_memory(text: str) -> str:
    """A kernel's text in which barriers lie in shared memory, where some of its threads tell the others and go on.

    All meet there once a round, so a barrier's turn is the round's: who waits is behind the same threads, and no thread
    waits that did not. Raises ValueError where none tells.
    """
    text, count = re.subn(r"tell_some\((\d+), THREADS\)", r"arrive(met_at + \1 * 8)", text)
    if not count:
        raise ValueError("no thread tells others and goes on")
    waits = r"arrive(met_at + \1 * 8), wait_for(met_at + \1 * 8, round % 2)"
    text = re.sub(r"some_together\((\d+), THREADS\)", waits, text)
    return re.sub(r"extern __shared__ [^;]*;", lambda found: found[0] + _IN_MEMORY, text)


RETOLD: dict[str, Callable[[str], str]] = {
    "ops/scan/mamba2/mamba2_decode.cu": each_arrives,
    "ops/scan/mamba2/mamba2_prompts.cu": each_arrives,
    "ops/scan/delta/delta_step.cu": meet_in_memory,
}


def retold(source: str) -> str:
    """A kernel's whole source, with its files' names for the checker's reports, and those of RETOLD rewritten."""
    for path in SRC.rglob("*.cu"):
        text = path.read_text(encoding="utf-8")
        if text in source:
            rewrite = RETOLD.get(path.relative_to(SRC).as_posix(), str)
            source = source.replace(text, f'#line 1 "{path.name}"\n{rewrite(text)}')
    return source


def named(source: str) -> str:
    """A kernel's source whose functions have its name ahead of theirs, by which the checker names inlined ones."""
    found = re.search(r"__global__ void __launch_bounds__\([^)]*\) (\w+)\(", source)
    assert found is not None, "a kernel"
    return f"namespace {found[1]} {{\n{source}\n}}\n"


def run_cases(names: list[str]) -> None:
    """Of `kernel_cases`, with kernels in CUDA C++ as RETOLD has them."""
    import kernel_cases
    from octavo.ops.compile import nvrtc

    def machine_code(source: str, macros: Mapping[str, int | str], arch: str) -> bytes:
        return nvrtc.compile_told(named(retold(source)), macros, arch, "--generate-line-info")[0]

    with mock.patch.object(nvrtc, "machine_code", machine_code):
        kernel_cases.main(names)


def check(checker: str, *program: str) -> str:
    """What the checker reports of a Python program. Raises RuntimeError if that fails."""
    command = [checker, "--tool", "racecheck", "--print-limit", "100000", sys.executable, *program]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{program} failed under the checker:\n{done.stdout[-2000:]}")
    return done.stdout


def run_control() -> None:
    """Launch the two kernels of one word."""
    import ctypes

    import torch

    from octavo.ops.compile import driver, nvrtc

    out = torch.zeros(128, dtype=torch.int32, device="cuda")
    code, address = nvrtc.compile_cubin(CONTROL, {}, "sm_90a"), ctypes.c_void_p(out.data_ptr())
    for name in ("hands_over", "forgets_to_wait"):
        params = (ctypes.c_void_p * 1)(ctypes.addressof(address))
        driver.launch(driver.load(code, name, 0), (1, 1, 1), 160, 0, 0, params)
        torch.cuda.synchronize()


def main(arguments: list[str]) -> None:
    """Judge the checker, then the cases. Ends the process with 1 where one of them fails."""
    if arguments[:1] in (["--control"], ["--cases"]):
        run_control() if arguments == ["--control"] else run_cases(arguments[1:])
        return
    checker, *names = arguments or ["compute-sanitizer"]
    control = check(checker, __file__, "--control")
    if "at forgets_to_wait+" not in control:
        sys.exit(f"the checker does not see a race:\n{control[-2000:]}")
    if "at hands_over+" not in control:
        sys.exit("the checker follows an arrival for others: REVIEWED is to go")
    found, unknown = judge(check(checker, __file__, "--cases", *names))
    for pair, count in found.items():
        print(f"{count} of {' and '.join(sorted(place.function for place in pair))}: {REVIEWED[pair]}")
    for lines, count in unknown.items():
        print(f"{count} that nobody reviewed:\n{lines}")
    if not unknown:
        print(f"no hazards but these, in {', '.join(names) or 'all cases'}")
    sys.exit(bool(unknown))


if __name__ == "__main__":
    main(sys.argv[1:])

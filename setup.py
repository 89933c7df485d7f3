"""Builds Octavo's native CPU operators; everything else about the package is in pyproject.toml.

The same C++ sources (src/octavo/ops/native/*.cpp) are compiled once per instruction set into plain shared libraries
without Python symbols; `octavo.ops.native` picks one by the processor's features. The extensions are optional: where
no compiler works the package installs without them and the eager operators serve.
In place, for developers: `python setup.py build_ext --inplace`.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NATIVE = Path("src/octavo/ops/native")
# Every fused multiply-add is written out (vec.h); contraction is off, so the compiler cannot change an operator's bits.
COMMON_FLAGS = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
COMMON_FLAGS += ["-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-Wall", "-Wno-psabi"]
COMMON_FLAGS += ["-Wno-maybe-uninitialized"]  # GCC 12 warns about its own intrinsics
V3_FLAGS = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe", "-mpopcnt"]
V4_FLAGS = [*V3_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl"]
V4_FLAGS += ["-mprefer-vector-width=512"]
BF16_FLAGS = [*V4_FLAGS, "-mavx512bf16"]  # a compiler that does not know it builds the others


def instruction_sets() -> dict[str, list[str]]:
    """Name of each library -> its compiler flags. x86-64 without AVX2 has no fused multiply-add and gets none."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return {"x86_64_v3": V3_FLAGS, "x86_64_v4": V4_FLAGS, "x86_64_v4_bf16": BF16_FLAGS}
    return {"base": []}


class BuildNative(build_ext):
    """build_ext for libraries without an init function: own object folder and skip rule per instruction set."""

    def finalize_options(self) -> None:
        """Compile all instruction sets side by side unless told otherwise: a core is idle only when the last is."""
        super().finalize_options()
        if self.parallel is None:
            self.parallel = max(os.cpu_count() or 1, len(self.extensions))

    def get_ext_filename(self, fullname: str) -> str:
        """A plain `.so`: the libraries are loaded by path, so they carry no Python tag."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile what is older than its source or a header, then link. Raises CompileError (a warning: optional)."""
        if self.compiler.compiler_type != "unix":
            raise CompileError("the native operators need GCC or Clang")
        target = Path(self.get_ext_fullpath(ext.name))
        newest_header = max(Path(header).stat().st_mtime for header in ext.depends)
        folder, flags = Path(self.build_temp) / ext.name, [*ext.extra_compile_args, "-pthread"]
        objects = [self._object(source, folder, newest_header, flags) for source in ext.sources]
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, str(target), extra_postargs=["-pthread"], target_lang="c++")

    def _object(self, source: str, folder: Path, newest_header: float, flags: list[str]) -> str:
        built = folder / Path(source).with_suffix(".o")
        changed = max(newest_header, Path(source).stat().st_mtime)
        if self.force or not built.exists() or built.stat().st_mtime < changed:
            self.compiler.compile([source], output_dir=str(folder), extra_postargs=flags)
        return str(built)


sources = sorted(str(path) for path in NATIVE.glob("**/*.cpp"))
headers = sorted(str(path) for path in [*NATIVE.glob("include/*.h"), "setup.py"])
extensions = [
    Extension(f"octavo.ops.native._octavo_cpu_{name}", sources, depends=headers, optional=True, language="c++",
              extra_compile_args=[*COMMON_FLAGS, *flags])
    for name, flags in instruction_sets().items()
]  # fmt: skip

setup(package_dir={"": "src"}, ext_modules=extensions, cmdclass={"build_ext": BuildNative})

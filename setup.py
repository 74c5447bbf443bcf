"""Builds the native CPU kernels; everything else about the package is in pyproject.toml.

The build is optional: without a compiler, or on another system or processor, the package is
installed without them and computes with torch.
"""

import os
import re
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NATIVE = Path("kernels") / "native"
MODULE = "headrace.kernels.native.libheadrace_kernels"
# Of the library: this one, or what _PYTHON_HOST_PLATFORM says, with a CXX for that.
PLATFORM = sysconfig.get_platform()
COMPILE_ARGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # an fma stands where the source says so, on every path
    "-fno-math-errno",
    "-pthread",
    "-include",
    str(NATIVE / "glibc.h"),
    # gcc 12 warns about its own intrinsics.
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AMX = ["-mamx-tile", "-mamx-bf16", "-mamx-int8"]
# One build has all instruction sets of a kind of processor: a file each, and a choice at run time.
ISA_ARGS = {
    "isa_avx2.cpp": AVX2,
    "isa_avx512.cpp": AVX512,
    "isa_avx512_vnni.cpp": [*AVX512, "-mavx512vnni"],
    "isa_avx512_bf16.cpp": [*AVX512, "-mavx512vnni", "-mavx512bf16"],
    "isa_amx.cpp": [*AVX512, "-mavx512vnni", "-mavx512bf16", *AMX],
    "isa_neon.cpp": [],
    "isa_neon_dotprod.cpp": ["-march=armv8.2-a+dotprod"],
}


class BuildNative(build_ext):
    """A shared library, not a Python module: its name has no Python version in it."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        newest = max(Path(name).stat().st_mtime for name in [*ext.sources, *ext.depends])
        if target.exists() and target.stat().st_mtime > newest and not self.force:
            return
        target.unlink(missing_ok=True)  # it must not be taken for the new one if this fails
        amx = str(NATIVE / "isa_amx.cpp")
        has_amx = amx in ext.sources and self._can_compile(
            AMX, 'int main() { asm volatile("tilerelease"); }'
        )
        sources = [source for source in ext.sources if has_amx or source != amx]

        def compiled(source: str) -> list[str]:
            args = [*COMPILE_ARGS, *ISA_ARGS.get(Path(source).name, [])]
            if not has_amx:
                args.append("-DHR_WITHOUT_AMX")
            return self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=args, depends=ext.depends
            )

        # The instruction sets take most of the time, one like the other.
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = [name for names in pool.map(compiled, sources) for name in names]
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects, str(target), extra_postargs=["-pthread"], target_lang="c++"
        )

    def _can_compile(self, args: list[str], text: str) -> bool:
        """Whether compiler and assembler know the instructions."""
        source = Path(self.build_temp) / "probe.cpp"
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(text)
        try:
            self.compiler.compile([str(source)], output_dir=self.build_temp, extra_postargs=args)
        except CompileError:
            return False
        return True


class NativeWheel(bdist_wheel):
    """A wheel that needs no Python version, but the C library whose symbols its code names."""

    def get_tag(self) -> tuple[str, str, str]:
        library = Path(self.get_finalized_command("build_ext").get_ext_fullpath(MODULE))
        if self.root_is_pure or not library.exists():
            return "py3", "none", "any"
        *_, platform_tag = super().get_tag()
        return "py3", "none", manylinux_tag(library.read_bytes()) or platform_tag


def manylinux_tag(library: bytes) -> str | None:
    """The oldest manylinux platform (PEP 600) that can load this ELF file.

    None if it is not made for glibc, or needs a newer libstdc++ than that of GCC 8, which is what
    manylinux_2_28 has and what any later one has at least.
    """

    def newest(prefix: str) -> tuple[int, ...]:
        found = re.findall(rb"\0%s_([0-9.]+)(?=\0)" % prefix.encode(), library)
        return max((tuple(map(int, version.split(b"."))) for version in found), default=())

    glibc = newest("GLIBC")
    if not glibc or newest("GLIBCXX") > (3, 4, 25) or newest("CXXABI") > (1, 3, 11):
        return None
    major, minor = max(glibc[:2], (2, 28))
    return f"manylinux_{major}_{minor}_{PLATFORM.removeprefix('linux-')}"


def extensions() -> list[Extension]:
    if PLATFORM not in ("linux-x86_64", "linux-aarch64"):
        return []
    is_arm = PLATFORM == "linux-aarch64"
    sources = [
        str(path)
        for path in sorted(NATIVE.glob("*.cpp"))
        if not path.name.startswith("isa_") or path.name.startswith("isa_neon") == is_arm
    ]
    headers = [*sorted(str(path) for path in NATIVE.glob("*.h")), "setup.py"]
    return [Extension(MODULE, sources, depends=headers, optional=True)]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildNative, "bdist_wheel": NativeWheel})

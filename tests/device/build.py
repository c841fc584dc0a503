"""The simulated device's two libraries, built once per version of their sources and of torch.

`libcuda.so.1` is driver, runtime and cuBLAS; `aten_on_cpu.so` runs aten's ops. A compiler and what pip has installed
are enough: the wheels of torch's CUDA build and of Triton contain CUDA's headers.
"""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent / "driver"
BUILT = Path(__file__).parents[2] / "build" / "device"
DRIVER = ("device.cpp", "memory.cpp", "streams.cpp", "launches.cpp", "cublas.cpp")
SUPPORTED = "2.11", "3.6"  # torch and Triton: the ABI and the internals that are replaced here


class Unusable(Exception):
    """A simulated device is impossible here. The message is one line with the reason and the remedy."""


@dataclass(frozen=True)
class Environment:
    """The folders of this interpreter's torch and Triton, and the version of torch."""

    torch: Path
    triton: Path
    version: str

    @property
    def includes(self) -> list[Path]:
        return [
            self.torch / "include",
            self.torch / "include/torch/csrc/api/include",
            self.torch.parent / "nvidia/cu13/include",
            self.triton / "backends/nvidia/include",  # CUDA's crt/, which none of torch's wheels has
        ]


def folder_of(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise Unusable(f"no {package} here: start with the Python of .venv-oldest (make test-device)")
    return Path(spec.origin).parent


def find_environment() -> Environment:
    torch, triton = folder_of("torch"), folder_of("triton")
    version_file = runpy.run_path(str(torch / "version.py"))
    triton_version = re.search(r"__version__ = '([^']+)'", (triton / "__init__.py").read_text())
    versions = version_file["__version__"], triton_version.group(1) if triton_version else "?"
    if version_file["cuda"] is None:
        raise Unusable(
            f"torch {versions[0]} has no CUDA: pip install torch=={SUPPORTED[0]}.0 from PyPI (make test-device)"
        )
    for name, version, supported in zip(("torch", "triton"), versions, SUPPORTED, strict=True):
        if not version.startswith(f"{supported}."):
            raise Unusable(
                f"{name} {version} is not {supported}: the simulated device is made for .venv-oldest (make test-device)"
            )
    return Environment(torch, triton, versions[0])


def compiler() -> str:
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if found is None:
        raise Unusable(f"no compiler {name}: install g++, or name another with CXX")
    return found


def fingerprint(environment: Environment) -> str:
    state = hashlib.sha256(f"{environment.version} {environment.torch} {compiler()}".encode())
    for path in (*sorted(SOURCES.iterdir()), Path(__file__)):
        state.update(path.read_bytes())
    return state.hexdigest()[:16]


def compile_library(environment: Environment, sources: list[Path], out: Path, *options: str) -> None:
    command = [compiler(), "-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-w"]
    command += [f"-I{folder}" for folder in environment.includes]
    done = subprocess.run([*command, *map(str, sources), "-o", str(out), *options], capture_output=True, text=True)
    if done.returncode:
        raise Unusable(f"{out.name} cannot be compiled:\n{done.stderr}")


def write_cublas_refusals(environment: Environment, out: Path) -> None:
    """Write a function that refuses with its name for each cuBLAS function that torch links and cublas.cpp lacks."""
    ours = set(re.findall(r"(cublas\w+)\(", (SOURCES / "cublas.cpp").read_text()))
    used = set()
    for library in (environment.torch / "lib").glob("libtorch_cuda*.so"):
        listed = subprocess.run(
            ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
        )
        used |= set(re.findall(r"\bU (cublas\w+)", listed.stdout))
    lines = [
        'extern "C" int simulated_cublas_refusal(const char *);',
        '#define REFUSED extern "C" __attribute__((visibility("default")))',
    ]
    lines += [f'REFUSED int {name}() {{ return simulated_cublas_refusal("{name}"); }}' for name in sorted(used - ours)]
    out.write_text("\n".join(lines) + "\n")


def build_driver(environment: Environment, folder: Path) -> None:
    refusals = folder / "cublas_refusals.cpp"
    write_cublas_refusals(environment, refusals)
    sources = [*(SOURCES / name for name in DRIVER), refusals]
    compile_library(environment, sources, folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1", "-ldl", "-lpthread")


def build_aten(environment: Environment, folder: Path) -> None:
    libraries = environment.torch / "lib"
    linked = [f"-l{name}" for name in ("torch", "torch_cpu", "torch_cuda", "c10", "c10_cuda")]
    options = [f"-L{libraries}", *linked, f"-Wl,-rpath,{libraries}"]
    compile_library(environment, [SOURCES / "aten_on_cpu.cpp"], folder / "aten_on_cpu.so", *options)


def built_libraries() -> Path:
    """Return the folder with both libraries, and build them if they do not exist."""
    environment = find_environment()
    folder = BUILT / fingerprint(environment)
    if not folder.exists():
        print("building the simulated device: a minute, once", flush=True)
        partial = folder.with_suffix(f".{os.getpid()}")
        partial.mkdir(parents=True)
        try:
            build_driver(environment, partial)
            build_aten(environment, partial)
            if not folder.exists():  # another process may have been faster
                partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder

"""The simulated device's two libraries, built once per version of their sources and of torch.

`libcuda.so.1` is driver and runtime; `aten_on_cpu.so` runs aten's ops. A compiler and what pip has installed
are enough: the wheels of torch's CUDA build and of Triton contain CUDA's headers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent / "driver"
BUILT = Path(__file__).parents[2] / "build" / "device"
DRIVER = [SOURCES / name for name in ("device.cpp", "memory.cpp", "streams.cpp", "launches.cpp")]
SUPPORTED = {"torch": "2.11", "triton": "3.6"}  # the ABI and the internals that are replaced here
OPTIONS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-w")


class Unusable(Exception):
    """A simulated device is impossible here. The message is one line with the reason and the remedy."""


def folder_of(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise Unusable(f"no {package} here: start with the Python of .venv-oldest (make test-device)")
    return Path(spec.origin).parent


def check_versions() -> None:
    for package, supported in SUPPORTED.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "none"
        if not found.startswith(f"{supported}."):
            raise Unusable(f"{package} {supported} is needed, found {found}: use .venv-oldest (make test-device)")
    if not (folder_of("torch") / "lib/libtorch_cuda.so").exists():
        raise Unusable("this torch has no CUDA: pip install torch==2.11.0 from PyPI (make test-device)")


def compiler() -> str:
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if found is None:
        raise Unusable(f"no compiler {name}: install g++, or name another with CXX")
    return found


def fingerprint() -> str:
    state = hashlib.sha256(f"{version('torch')} {folder_of('torch')} {compiler()}".encode())
    for path in (*sorted(SOURCES.iterdir()), Path(__file__)):
        state.update(path.read_bytes())
    return state.hexdigest()[:16]


def compile_library(sources: list[Path], out: Path, *options: str) -> None:
    torch = folder_of("torch")
    includes = (
        torch / "include",
        torch / "include/torch/csrc/api/include",
        torch.parent / "nvidia/cu13/include",
        folder_of("triton") / "backends/nvidia/include",  # CUDA's crt/, which none of torch's wheels has
    )
    command = [compiler(), *OPTIONS, *(f"-I{folder}" for folder in includes), *map(str, sources), "-o", str(out)]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    if done.returncode:
        raise Unusable(f"{out.name} cannot be compiled:\n{done.stderr}")


def build(folder: Path) -> None:
    compile_library(DRIVER, folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1", "-ldl", "-lpthread")
    libraries = folder_of("torch") / "lib"
    linked = [f"-l{name}" for name in ("torch", "torch_cpu", "torch_cuda", "c10", "c10_cuda")]
    options = [f"-L{libraries}", *linked, f"-Wl,-rpath,{libraries}"]
    compile_library([SOURCES / "aten_on_cpu.cpp"], folder / "aten_on_cpu.so", *options)


def built_libraries() -> Path:
    """Return the folder with both libraries, and build them if they do not exist."""
    check_versions()
    folder = BUILT / fingerprint()
    if not folder.exists():
        print("building the simulated device: a minute, once", flush=True)
        partial = folder.with_suffix(f".{os.getpid()}")
        partial.mkdir(parents=True)
        try:
            build(partial)
            if not folder.exists():  # another process may have been faster
                partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder

"""The simulated device's library, built once per version of its sources and of torch.

`libcuda.so.1` is driver and runtime. A compiler and what pip has installed are enough: the wheels of torch's CUDA
build and of Triton contain CUDA's headers.
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


def build(folder: Path) -> None:
    packages = folder_of("torch").parent
    # The second folder has CUDA's crt/, which none of torch's wheels has.
    includes = (packages / "nvidia/cu13/include", folder_of("triton") / "backends/nvidia/include")
    command = [compiler(), *OPTIONS, *(f"-I{include}" for include in includes), *map(str, DRIVER)]
    command += ["-o", str(folder / "libcuda.so.1"), "-Wl,-soname,libcuda.so.1", "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unusable(f"libcuda.so.1 cannot be compiled:\n{done.stderr}")


def built_library() -> Path:
    """Return the folder with the library, and build it if it does not exist."""
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

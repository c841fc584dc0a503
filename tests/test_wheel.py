"""The wheel: its files, and the README's first script with nothing of the project but the wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A folder of the checkout, and the package that the wheel has in its place.
PACKAGES = {
    "specache_compile": "specache_compile",
    "passes": "specache_compile/passes",
    "lowering": "specache_compile/lowering",
    "kernels": "specache_compile/kernels",
}
BUILD = "import setuptools.build_meta, sys; setuptools.build_meta.build_wheel(sys.argv[1])"


def output(*command: str | Path, cwd: Path) -> str:
    """What the command prints to stdout; it must succeed."""
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=1800, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources: an earlier build in the checkout adds nothing to it."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=sources, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment with the wheel; the dependencies are those of the running environment.

    A line of a .pth file adds a folder to sys.path without that folder's own .pth files, so an editable install of the
    checkout is not visible.
    """
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    scripts = environment / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(scripts / "python"), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return scripts


def test_the_wheel_has_each_source_file_and_no_other(wheel: Path) -> None:
    expected = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in PACKAGES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.name != "ruff.toml"
        if not any(part.startswith((".", "__pycache__")) for part in path.relative_to(ROOT).parts)
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {Path(name).suffix or Path(name).name for name in expected} == {".py", ".typed", ".cpp", ".h"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    (points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(points).decode()
    assert "\nspecache = specache_compile.cli:main\n" in text
    assert "\nspecache = specache_compile.entry:specache\n" in text


@pytest.mark.slow
def test_the_installed_command_and_backend_are_those_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.metadata as m, specache_compile as s; print(s.__file__); "
        "print(*[p.value for p in m.entry_points(group='torch_dynamo_backends', name='specache')])"
    )
    assert output(installed / "specache", "--version", cwd=tmp_path) == f"specache {version('specache-compile')}\n"
    file, backend = output(installed / "python", "-c", code, cwd=tmp_path).splitlines()
    assert Path(file).is_relative_to(installed.parent)
    assert backend == "specache_compile.entry:specache"


@pytest.mark.slow
def test_the_readmes_first_script_runs_with_the_wheel_alone(installed: Path, tmp_path: Path) -> None:
    script = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert script
    assert "71432" in output(installed / "python", "-c", script[1], cwd=tmp_path)

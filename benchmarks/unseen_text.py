"""Write texts that SmolLM2 (November 2024) was not trained on: later release notes of some projects.

    python benchmarks/unseen_text.py                      all three
    python benchmarks/unseen_text.py build/unseen.txt     one of them, for `specache eval --text build/unseen.txt`

All are on PyPI. Tokens are those of SmolLM2.

    build/unseen.txt       153,000: Django 5.2 to 6.1.3 (BSD), SQLAlchemy 2.1 (MIT), NumPy 2.2 to 2.5.5 (BSD)
    build/unseen_more.txt  195,000: xarray (Apache), mypy (MIT), Scrapy (BSD), pytest (MIT), Astropy (BSD)
    build/unseen_most.txt  185,000: scikit-learn (BSD), Cython (Apache), aiohttp (Apache), pylint (GPL), IPython (BSD),
                           pip (MIT), Dask (BSD)
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import sys
import tarfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FILES = "https://files.pythonhosted.org/packages/"


class Source(NamedTuple):
    """A source distribution on PyPI, and a pattern of the selected files, whose groups give their order.

    path: its folders are the archive's BLAKE2b hash of 256 bits.
    older: the heading of the first older entry in a changelog, where the text ends.
    """

    path: str
    notes: str
    older: str = ""


SOURCES = {
    "django": Source(
        "55/79/49a609ea76ec51404b482932e33f1e6858946b920232c11b11a25bea3032/django-6.1.3.tar.gz",
        r".*/docs/releases/((?:5\.2|6\.[01])(?:\.\d+)?)\.txt",
    ),
    "sqlalchemy": Source(
        "3f/69/b87a540f6888ebc1f63a6e6138e8dc0827331a9be7c5eb15e3bd40a76281/sqlalchemy-2.1.9.tar.gz",
        r".*/doc/build/changelog/(?:changelog|migration)_(21)\.rst",
    ),
    "numpy": Source(
        "4e/3a/8770c288c47f0b5c2a786d3c20e79f66fd245f2d42cd232d7cd5e00e83e5/numpy-2.5.5.tar.gz",
        r".*/doc/source/release/(2\.[2-5]\.\d+)-notes\.rst",
    ),
    "xarray": Source(
        "ff/f5/781c70b234f54e0401f4f7c4427a7486da38d50dbb138c7d7c55144b3d86/xarray-2026.9.0.tar.gz",
        r".*/doc/whats-new\.rst()",
        ".. _whats-new.2024.11.0:",
    ),
    "mypy": Source(
        "4a/3c/78ecece71ee4b5445389a4ccd11627cfb9c69e4de554d11060171f376305/mypy-2.4.1.tar.gz",
        r"[^/]*/CHANGELOG\.md()",
        "## Mypy 1.14",
    ),
    "scrapy": Source(
        "7a/bd/5a65f4d9319bf1533472a446915b941f393f6d2d547bf88cec23207beddf/scrapy-2.19.0.tar.gz",
        r".*/docs/news\.rst()",
        "Scrapy 2.12.0",
    ),
    "pytest": Source(
        "79/42/bb4641652e58dedeac2ec51abc1f8cae4fee4ec63899a0999016229a0f2a/pytest-9.2.0.tar.gz",
        r".*/doc/en/changelog\.rst()",
        "pytest 8.3.4",
    ),
    "astropy": Source(
        "95/57/02089e6da0fc00846d309034ad74e13ebcadc67b1c5cef397ae0597473fa/astropy-8.0.2.tar.gz",
        r"[^/]*/CHANGES\.rst()",
        "Version 7.0.0",
    ),
    "scikit-learn": Source(
        "d2/eb/eaf5e07fcc0da7149b0e084f24e54edd7441b9a89ce7e034032ae97fe3a0/scikit_learn-1.9.1.tar.gz",
        r".*/doc/whats_new/v(1\.[6-9])\.rst",
    ),
    "cython": Source(
        "99/ca/18e324972e5cac914816fdd7bb03e19a455b90039c277a538f7781b50c85/cython-3.3.1.tar.gz",
        r"[^/]*/CHANGES\.rst()",
        "3.1.0 alpha 1",
    ),
    "aiohttp": Source(
        "6c/4c/bdccd81e9ee225b69c60e7766c9a5b05364f118f4d383713b89a682d772d/aiohttp-3.14.5.tar.gz",
        r"[^/]*/CHANGES\.rst()",
        "3.11.8 (2024-11-27)",
    ),
    "pylint": Source(
        "8f/d7/bfea980ba1ea5666c7f774627f3a7159b98a21426a081dd2f05db8eb93b3/pylint-4.1.4.tar.gz",
        r".*/doc/whatsnew/4/(4\.[01])/index\.rst",
    ),
    "ipython": Source(
        "38/04/0d945c72d5b77527273ecb4c66aa2436de7a3b3bbe3da345bf053232b886/ipython-9.18.1.tar.gz",
        r".*/docs/source/whatsnew/version(9)\.rst",
    ),
    "pip": Source(
        "53/c7/f8d9e2e0e7c1ed8a22a10eeb3b5bf7860bc07d8446c7a978a882c5c8214b/pip-26.3.tar.gz",
        r"[^/]*/NEWS\.rst()",
        "24.3.1 (2024-10-27)",
    ),
    "dask": Source(
        "33/a7/6b3c7ac32b642fbbe0821111654e0bd8cfbe88f68560bcf23cc78ab35c71/dask-2026.8.0.tar.gz",
        r".*/docs/source/changelog\.rst()",
        ".. _v2024.11.2:",
    ),
}
# The texts of the quality tables: 64 windows of 8,192 tokens require all three.
TEXTS = {
    "build/unseen.txt": ("django", "sqlalchemy", "numpy"),
    "build/unseen_more.txt": ("xarray", "mypy", "scrapy", "pytest", "astropy"),
    "build/unseen_most.txt": ("scikit-learn", "cython", "aiohttp", "pylint", "ipython", "pip", "dask"),
}


def fetched(source: Source) -> bytes:
    """The distribution's archive."""
    print(f"fetching {source.path.rpartition('/')[2]} from PyPI", file=sys.stderr)
    with urllib.request.urlopen(FILES + source.path, timeout=120) as answer:
        data: bytes = answer.read()
    found = hashlib.blake2b(data, digest_size=32).hexdigest()
    if found != source.path.rpartition("/")[0].replace("/", ""):
        raise OSError(f"{source.path}: the archive's BLAKE2b hash is {found}")
    return data


def release_notes(sdist: bytes, source: Source) -> str:
    """The notes of a source's archive in the order of their versions; of a changelog, the entries before `older`."""
    with tarfile.open(fileobj=io.BytesIO(sdist)) as archive:
        notes = {
            (tuple(map(int, re.findall(r"\d+", found[1]))), member.name): archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
            if (found := re.fullmatch(source.notes, member.name))
        }
    text = "\n".join(notes[place] for place in sorted(notes))
    if not source.older:
        return text
    newer, heading, _ = text.partition(f"\n{source.older}")
    if not heading:
        raise OSError(f"a changelog has no heading {source.older!r}")
    return newer


def write_text(out: Path, projects: Sequence[str]) -> None:
    """Write these projects' notes to a file; exits with one line if the network or the file fails."""
    try:
        text = "\n".join(release_notes(fetched(SOURCES[name]), SOURCES[name]) for name in projects)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, "utf-8")
    except OSError as error:  # urllib's errors are of its kind
        sys.exit(f"unseen_text.py: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help=f"some of {', '.join(TEXTS)} (default: all)")
    texts = parser.parse_args().texts
    for text in texts or TEXTS:
        if text not in TEXTS:
            parser.error(f"unknown text {text!r}: known are {', '.join(TEXTS)}")
        write_text(Path(text), TEXTS[text])


if __name__ == "__main__":
    main()

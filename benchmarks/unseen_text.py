"""Write a text that SmolLM2 (November 2024) was not trained on: later release notes of three projects.

    python benchmarks/unseen_text.py build/unseen.txt                       for `specache eval --text build/unseen.txt`
    python benchmarks/unseen_text.py build/django.txt --projects django     one project

Django 5.2 to 6.1.3 (BSD), SQLAlchemy 2.1 (MIT) and NumPy 2.2 to 2.5.5 (BSD), from PyPI: 140,000 tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import sys
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from specache_compile.cache_folder import cache_folder

FILES = "https://files.pythonhosted.org/packages/"


@dataclass(frozen=True)
class Source:
    """A source distribution and a pattern of the selected files (`notes`), whose groups give their order."""

    name: str
    path: str
    sha256: str
    notes: str


SOURCES = (
    Source(
        "django-6.1.3",
        "55/79/49a609ea76ec51404b482932e33f1e6858946b920232c11b11a25bea3032/django-6.1.3.tar.gz",
        "b5d2d9e35295065d13b1927b3f19a59bd119f737aa6299def14ccca1ae3c8c0d",
        r".*/docs/releases/((?:5\.2|6\.[01])(?:\.\d+)?)\.txt",
    ),
    Source(
        "sqlalchemy-2.1.9",
        "3f/69/b87a540f6888ebc1f63a6e6138e8dc0827331a9be7c5eb15e3bd40a76281/sqlalchemy-2.1.9.tar.gz",
        "d700a8b2edfb26282a470333d6bc4a454c4acda4d201a3bea7b72fa76c217d28",
        r".*/doc/build/changelog/(?:changelog|migration)_(21)\.rst",
    ),
    Source(
        "numpy-2.5.5",
        "4e/3a/8770c288c47f0b5c2a786d3c20e79f66fd245f2d42cd232d7cd5e00e83e5/numpy-2.5.5.tar.gz",
        "5cddc243c75114ba845f01b1f87aca1572dbf7b6c2d88636ed3e1d2bccd7f1bf",
        r".*/doc/source/release/(2\.[2-5]\.\d+)-notes\.rst",
    ),
)


def unseen_text(source: Source) -> Path:
    """A source's text file, fetched where it is not there yet."""
    path = cache_folder() / "texts" / f"{source.name}-{source.sha256[:12]}.txt"
    if not path.exists():
        print(f"fetching the notes of {source.name} from PyPI, once", file=sys.stderr)
        text = release_notes(fetched(FILES + source.path, source.sha256), source.notes)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        partial.rename(path)
    return path


def fetched(url: str, sha256: str) -> bytes:
    with urllib.request.urlopen(url, timeout=120) as answer:
        data: bytes = answer.read()
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise OSError(f"{url}: the hash is {found}, not {sha256}")
    return data


def release_notes(sdist: bytes, wanted: str) -> str:
    """The notes in the order of their versions, from the distribution's archive."""
    with tarfile.open(fileobj=io.BytesIO(sdist)) as archive:
        notes = {
            (tuple(map(int, found[1].split("."))), member.name): archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
            if (found := re.fullmatch(wanted, member.name))
        }
    return "\n".join(notes[place] for place in sorted(notes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the file to write")
    names = [source.name.partition("-")[0] for source in SOURCES]
    parser.add_argument("--projects", nargs="+", choices=names, default=names, help="(all)")
    args = parser.parse_args()
    try:
        text = "\n".join(unseen_text(SOURCES[names.index(name)]).read_text() for name in args.projects)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
    except OSError as error:  # urllib's errors are of its kind
        sys.exit(f"unseen_text.py: {error}")


if __name__ == "__main__":
    main()

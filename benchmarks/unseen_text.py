"""A text that SmolLM2 (November 2024) cannot have seen: Django's release notes from 5.2 (April 2025) to 6.1.3.

    python benchmarks/unseen_text.py build/unseen.txt        for `specache eval --text build/unseen.txt`

They are in Django's source distribution on PyPI (BSD licence), which is taken by its hash; some 45,000 tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import shutil
import sys
import tarfile
import urllib.request
from pathlib import Path

from specache_compile.checkpoints import cache_folder

URL = (
    "https://files.pythonhosted.org/packages/55/79/49a609ea76ec51404b482932e33f1e6858946b920232c11b11a25bea3032/"
    "django-6.1.3.tar.gz"
)
SHA256 = "b5d2d9e35295065d13b1927b3f19a59bd119f737aa6299def14ccca1ae3c8c0d"
NOTES = re.compile(r".*/docs/releases/((?:5\.2|6\.[01])(?:\.\d+)?)\.txt")


def unseen_text() -> Path:
    """The text file, fetched where it is not there yet."""
    path = cache_folder() / "texts" / f"django-release-notes-{SHA256[:12]}.txt"
    if not path.exists():
        print("fetching Django's release notes from PyPI (11 MB), once", file=sys.stderr)
        text = release_notes(fetched(URL, SHA256))
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


def release_notes(sdist: bytes) -> str:
    """The notes in the order of their versions, from the distribution's archive."""
    with tarfile.open(fileobj=io.BytesIO(sdist)) as archive:
        notes = {
            tuple(map(int, found[1].split("."))): archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
            if (found := NOTES.fullmatch(member.name))
        }
    return "\n".join(notes[version] for version in sorted(notes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the file to write")
    args = parser.parse_args()
    try:
        text = unseen_text()
        args.out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(text, args.out)
    except OSError as error:  # urllib's errors are of its kind
        sys.exit(f"unseen_text.py: {error}")


if __name__ == "__main__":
    main()

"""The quality tables. Each is one `specache eval`; benchmarks/results/quality/NAME has its results and command.

python benchmarks/quality.py                 every table; an interrupted run resumes
python benchmarks/quality.py paper codes     some tables
python benchmarks/quality.py --list          print the commands
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from specache_compile.cli import main as specache
from unseen_text import TEXTS, write_text

ROOT = Path(__file__).parent.parent
RESULTS = Path("benchmarks/results/quality")

PAPER = "specache:bits=1,setting=paper"
SPECACHE = (PAPER, "specache:bits=2,setting=paper")
KIVI = ("kivi:bits=1", "kivi:bits=2")
SKIPPING = "specache:skip_below=0.0003"


@dataclass(frozen=True)
class Table:
    """One evaluation: what it shows, and the arguments of `specache eval`."""

    what: str
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    more: tuple[str, ...]
    model: str = "smollm2-135m"


GEMMA = "gemma3-270m"
FAST = ("--lowering", "inductor", "--share-prefills")
EXACT = ("--dtype", "float32")  # twice as fast, too, on a CPU without instructions for bfloat16
UNSEEN_TEXT = ("--text", "build/unseen.txt")
MORE_UNSEEN_TEXT = (*UNSEEN_TEXT, "build/unseen_more.txt")
MOST_UNSEEN_TEXT = (*MORE_UNSEEN_TEXT, "build/unseen_most.txt")
UNSEEN = (*UNSEEN_TEXT, *FAST)
# Prose that every Debian has: among release notes, which are full of numbers, the model itself loses keys.
LICENCES = tuple(
    f"/usr/share/common-licenses/{name}" for name in ("GPL-3", "GPL-2", "Apache-2.0", "LGPL-2.1", "MPL-2.0", "GFDL-1.3")
)
MORE_LICENCES = (*LICENCES, *(f"/usr/share/common-licenses/{name}" for name in ("MPL-1.1", "CC0-1.0", "Artistic")))
NEEDLES = ("--chat", "--text", *LICENCES, *FAST, "--samples", "66")
# Gemma's sliding layers make a prefill of one piece slow. Compiling takes longer than it saves in so few steps.
KEYS = ("--keys", "1", "--text")
CHUNKED = ("--share-prefills", "--prefill-chunk", "1024")
TABLES = {
    "closeness": Table(
        "how close the next tokens are to the full cache's on a real checkpoint, of unseen text",
        ("closeness",),
        ("uncompiled", "fp8", *KIVI, "kivi:bits=4", *SPECACHE, "specache"),
        (*UNSEEN, "--lengths", "2048", "--samples", "64"),
    ),
    **{
        name: Table(
            f"the same at {length:,} tokens, and with low-bit values skipped",
            ("closeness",),
            ("uncompiled", "specache", SKIPPING, "kivi:bits=4", "fp8"),
            (*texts, *FAST, "--lengths", str(length), "--samples", str(windows)),
        )
        for name, length, windows, texts in (
            ("closeness_4k", 4096, 32, UNSEEN_TEXT), ("closeness_8k", 8192, 64, MOST_UNSEEN_TEXT)
        )
    },
    "host": Table(
        "the same of a host tier of 8 bits, the default's, and of 16",
        ("closeness",),
        ("uncompiled", "specache:host_bits=16", "specache:host_bits=8"),
        (*UNSEEN, "--lengths", "2048", "--samples", "64"),
    ),
    "codes": Table(
        "the same by how values are coded, and by the bits of scales and zero points",
        ("closeness",),
        (
            "uncompiled",
            "specache",
            "specache:value_code=levels",
            "specache:top_k=32",
            "specache:bits=1,key_code=levels",
            "specache:bits=1",
            "specache:bits=1,center=always",
            "kivi:bits=2",
            "kivi:bits=4",
        ),
        (*UNSEEN, *EXACT, "--lengths", "2048", "--samples", "64"),
    ),
    "long": Table(
        "own texts of 2,048 tokens behind 128: how far from the full cache, as errors feed on themselves",
        ("long",),
        (
            "uncompiled", "specache", "kivi:bits=4", "kivi:bits=2", PAPER,
            "h2o:budget=512", "streaming_llm:budget=512", "fp8",
        ),
        (*UNSEEN, "--lengths", "2176", "--samples", "16", "--batch-size", "16"),
    ),
    "long_gemma": Table(
        "the same on a second model family",
        ("long",),
        ("uncompiled", "specache", "specache:bits=1", "fp8", "kivi:bits=4", "kivi:bits=2"),
        (*UNSEEN, "--lengths", "2176", "--samples", "16", "--batch-size", "16"),
        GEMMA,
    ),
    "long_exact": Table(
        "the same in float32",
        ("long",),
        ("uncompiled", "specache", "kivi:bits=4", "kivi:bits=2"),
        (*UNSEEN, *EXACT, "--lengths", "2176", "--samples", "16", "--batch-size", "16"),
    ),
    "perplexity_smollm2": Table(
        "perplexity on a real checkpoint, where it gains from a long context",
        ("perplexity",),
        ("uncompiled", *KIVI, PAPER, "specache"),
        (*UNSEEN, *EXACT, "--lengths", "2048", "--samples", "64"),
    ),
    "needles_smollm2": Table(
        "pass keys on a real checkpoint: depth × length (SpeCache, Figure 4)",
        ("needle",),
        ("uncompiled", "fp8", *KIVI, PAPER, "specache"),
        (*NEEDLES, "--lengths", "2048", "4096"),  # at 8,192 the model itself finds two keys of three
    ),
    **{
        name: Table(
            f"pass keys in {length:,} tokens, on a second model family",
            ("needle",),
            (
                "uncompiled", "specache", "specache:bits=1", "kivi:bits=2", "fp8", "kivi:bits=1", "kivi:bits=4",
                *reversed(SPECACHE), *evicting,
            ),
            (*KEYS, *texts, *CHUNKED, "--batch-size", "1", "--lengths", str(length), "--samples", "33"),
            GEMMA,
        )
        for name, length, texts, evicting in (  # with these budgets, an eviction method has the default's bytes
            ("needles_gemma_8k", 8192, LICENCES, ("h2o:budget=1216,eviction_block=1024",)),
            ("needles_gemma_16k", 16384, LICENCES, ("h2o:budget=2030,eviction_block=1024",)),
            ("needles_gemma_31k", 31744, MORE_LICENCES, ("h2o:budget=3680,eviction_block=1024",)),
        )
    },
    **{
        name: Table(
            f"the same at {length:,} tokens, the question unknown while the context is read",
            ("needle",),
            ("uncompiled", "specache", "specache:bits=1", "kivi:bits=2", "kivi:bits=1", f"snapkv:budget={budget}"),
            ("--blind", *KEYS, *texts, *CHUNKED, "--batch-size", "1", "--lengths", str(length), "--samples", "33"),
            GEMMA,
        )
        for name, length, texts, budget in (
            ("needles_gemma_blind", 8192, LICENCES, 1216),
            ("needles_gemma_blind_16k", 16384, LICENCES, 2030),
            ("needles_gemma_blind_31k", 31744, MORE_LICENCES, 3680),
        )
    },
    **{
        name: Table(
            f"closeness at {length:,} tokens on a second model family",
            ("closeness",),
            ("uncompiled", "specache", "kivi:bits=4", "specache:bits=1", "fp8", SKIPPING),
            (*texts, *CHUNKED, "--batch-size", "4", "--lengths", str(length), "--samples", "16"),
            GEMMA,
        )
        for name, length, texts in (
            ("closeness_gemma_8k", 8192, UNSEEN_TEXT), ("closeness_gemma_2k", 2048, UNSEEN_TEXT),
            ("closeness_gemma_16k", 16384, MORE_UNSEEN_TEXT),
        )
    },
    "knobs_gemma": Table(
        "which option of the default matters on Gemma at 31,744 tokens; the text has four windows",
        ("closeness",),
        (
            "uncompiled", "specache", "specache:top_k=64", "specache:top_k=1024",
            *(f"specache:{knob},top_k=64" for knob in (
                "bits=2", "residual_length=256", "sink_tokens=16", "skip_below=0.0003",
            )),
            "kivi:bits=4", "fp8",
        ),
        (*UNSEEN_TEXT, *CHUNKED, "--batch-size", "1", "--lengths", "31744", "--samples", "4"),
        GEMMA,
    ),
    "fetched_gemma": Table(
        "how many fetched pairs Gemma needs at 8,192 tokens",
        ("closeness",),
        ("uncompiled", "specache", *(f"specache:top_k={k}" for k in (64, 128, 512))),
        (*UNSEEN_TEXT, *CHUNKED, "--batch-size", "4", "--lengths", "8192", "--samples", "8"),
        GEMMA,
    ),
    "needles_blind": Table(
        "the same, the question unknown while the context is read: what an eviction then drops",
        ("needle",),
        (
            "uncompiled", *(f"{name}:budget=0.25" for name in ("snapkv", "expected_attention", "kvzip", "h2o")),
            *KIVI, "specache",
        ),
        ("--blind", *NEEDLES, *EXACT, "--lengths", "2048"),
    ),
    "paper": Table(
        "SpeCache's ablations on a real checkpoint, as closeness: the zero point (Table 5), pairs fetched (Figure 5), "
        "who chooses them (Table 4), the group size",
        ("closeness",),
        (
            "uncompiled",
            *(f"{m},zero_point=minimum" for m in ("kivi:bits=1", PAPER)),
            *(f"{PAPER},top_k={k}" for k in (0, 4, 16, 32, 128)),
            *(f"{PAPER},speculate=False,top_k={k}" for k in (16, 64)),
            *(f"{PAPER},group_size={g}" for g in (32, 128)),
            PAPER,
        ),
        (*UNSEEN, "--lengths", "2048", "--samples", "64"),
    ),
}  # fmt: skip


def arguments(name: str) -> list[str]:
    """What stands after `specache`."""
    table = TABLES[name]
    return [
        "eval", table.model, "--tasks", *table.tasks, "--methods", *table.methods, *table.more,
        "--out", str(RESULTS / name),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"some of {', '.join(TABLES)} (default: all)")
    parser.add_argument("--list", action="store_true", help="print the commands and stop")
    args = parser.parse_args()
    unknown = [name for name in args.tables if name not in TABLES]
    if unknown:
        parser.error(f"unknown table {unknown[0]!r}: known are {', '.join(TABLES)}")
    os.chdir(ROOT)
    for name in args.tables or TABLES:
        print(f"\n{name}: {TABLES[name].what}\n$ {shlex.join(['specache', *arguments(name)])}\n", flush=True)
        if not args.list:
            for text in TEXTS:
                if text in TABLES[name].more and not Path(text).exists():
                    write_text(Path(text), TEXTS[text])
            status = specache(arguments(name))
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Print what the backend rewrites: the tiers' bytes, one layer before and after, and what each pass does.

python examples/inspect_graph.py [MODEL]        needs no GPU and reads no weights
"""

from __future__ import annotations

import sys

import specache_compile as sc


def main(name: str = "smollm2-135m") -> None:
    explanation = sc.explain(name, prompt_length=8192, device="RTX 4090")
    print(explanation.bytes_by_tier)
    print(explanation.layer(0))
    print(explanation)


if __name__ == "__main__":
    main(*sys.argv[1:])

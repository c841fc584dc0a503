"""The first answer of a process: the first call compiles the model, over a folder of compiled code.

    python -m specache_compile.bench.first_answer '{"model": …, "method": …}'

prints the seconds from the call of `generate` to its end, without imports and the loading of weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from specache_compile.errors import SpecacheError

PROMPT, NEW = 100, 8


def main(text: str) -> None:
    import torch

    from specache_compile.bench.model import open_model
    from specache_compile.bench.ways import twin_of

    asked = json.loads(text)
    torch.manual_seed(0)
    model = open_model(asked["model"], asked["layers"], asked["dtype"], asked["device"])
    twin = twin_of(model, asked["method"], asked["lowering"])
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (1, PROMPT)).to(model.device)
    start = time.perf_counter()
    twin.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    print(json.dumps(time.perf_counter() - start))


def first_answers(method: str, asked: dict[str, Any], traces: bool) -> Iterator[tuple[str, float]]:
    """Seconds with nothing compiled ("cold_s"), then with the folder that the first run filled ("warm_s").

    traces: also those of a process that takes what another has kept of its traces ("kept_s").
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold_s", "warm_s"):
            yield name, in_new_process({**asked, "method": method}, folder, "")
        if traces:
            in_new_process({**asked, "method": method}, folder, f"{folder}/traces")
            yield "kept_s", in_new_process({**asked, "method": method}, folder, f"{folder}/traces")


def in_new_process(asked: dict[str, Any], folder: str, traces: str) -> float:
    """Seconds of a new process; SpecacheError with its output where it failed. traces: its SPECACHE_CACHE."""
    command = [sys.executable, "-m", "specache_compile.bench.first_answer", json.dumps(asked)]
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "SPECACHE_CACHE": traces,
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise SpecacheError(f"the first answer of {asked['method']}: {said[-1]}")
    return float(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main(sys.argv[1])

"""Time the first answer of a new process, whose first call compiles the model.

    python -m specache_compile.bench.first_answer '{"model": …, "method": …}'

The command prints the seconds of one `generate` call, without imports and the loading of weights.
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

    from specache_compile.bench.bench_model import open_model
    from specache_compile.bench.runners import twin_of

    settings = json.loads(text)
    torch.manual_seed(0)
    model = open_model(settings["model"], settings["layers"], settings["dtype"], settings["device"])
    twin = twin_of(model, settings["method"], settings["lowering"])
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (1, PROMPT)).to(model.device)
    start = time.perf_counter()
    twin.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    print(json.dumps(time.perf_counter() - start))


def first_answers(method: str, settings: dict[str, Any], traces: bool) -> Iterator[tuple[str, float]]:
    """Seconds with empty caches ("cold_s"), then with the compiled code of the first run ("warm_s").

    traces: also measure a process that loads stored traces ("kept_s").
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold_s", "warm_s"):
            yield name, in_new_process({**settings, "method": method}, folder, "")
        if traces:
            in_new_process({**settings, "method": method}, folder, f"{folder}/traces")
            yield "kept_s", in_new_process({**settings, "method": method}, folder, f"{folder}/traces")


def in_new_process(settings: dict[str, Any], folder: str, traces: str) -> float:
    """Seconds of a new process; SpecacheError with its output if it fails. traces: its SPECACHE_CACHE."""
    command = [sys.executable, "-m", "specache_compile.bench.first_answer", json.dumps(settings)]
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "SPECACHE_CACHE": traces,
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        output = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise SpecacheError(f"the first answer of {settings['method']}: {output[-1]}")
    return float(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main(sys.argv[1])

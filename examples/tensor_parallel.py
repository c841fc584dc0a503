"""Tensor parallelism: each rank has its share of the weights, KV heads and tiers.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 3 examples/tensor_parallel.py smollm2-135m --prompt-file LICENSE

Ranks communicate over NCCL on GPUs and gloo on CPUs. The number of ranks must divide the number of KV heads.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import specache_compile as sc
from needle_samples import sample
from specache_compile.checkpoints.loaded import tokenizer_of
from specache_compile.checkpoints.names import resolved
from specache_compile.evaluation.tasks.haystack import library_source

SMALL = str(Path(__file__).parent / "needle-llama")


def hidden_key() -> str:
    return sample(library_source(held_out=True), 1000, 0.5, random.Random(0)).prompt.decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", nargs="?", default=SMALL)
    parser.add_argument("--prompt-file", type=Path, help="default: a pass key in 1,000 bytes of Python")
    parser.add_argument("--max-new-tokens", type=int, default=5)
    parser.add_argument("--bits", type=float, default=1.5)
    args = parser.parse_args()
    path = resolved(args.model)
    tokenizer = tokenizer_of(path)
    split = DistributedConfig(tp_plan="auto")  # over all ranks, as Hugging Face has it for this family
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=split, dtype="auto")
    model = torch.compile(model, backend="specache", options={"bits": args.bits})
    prompt = args.prompt_file.read_text() if args.prompt_file else hidden_key()
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    out = model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False)
    stats = sc.stats(model)
    if dist.get_rank() == 0:
        print(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    held = f"{stats.device_bytes:,} bytes of KV cache on the device, {stats.host_bytes:,} on the host"
    print(f"rank {dist.get_rank()} of {stats.ranks}: {stats.lanes} lanes, {held}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""`explain` of a model on a CUDA device: it does not touch the device, and gives the same figures as elsewhere."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import LlamaForCausalLM

import specache_compile as sc
from specache_compile.kernels.memory import host_memory
from specache_compile.kernels.movement import copy_stream

pytestmark = pytest.mark.gpu


def figures(model: LlamaForCausalLM, options: dict[str, Any]) -> str:
    """Return the bytes and times of `explain`, which follow its text about this run."""
    torch._dynamo.reset()
    return str(sc.explain(model, prompt_length=4096, batch_size=2, options=options)).partition("KV memory")[2]


@pytest.mark.parametrize("options", [{"min_context": 0}, {"method": "offload"}], ids=["specache", "offload"])
def test_it_registers_no_host_memory_and_reads_no_fake_tensors_address(
    llama: LlamaForCausalLM, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_cpu, touched = figures(llama, options), []
    monkeypatch.setattr(host_memory, "register", lambda *_: touched.append("a registration") or True)
    monkeypatch.setattr(copy_stream, "stream_of", lambda *_: touched.append("a stream"))
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda *_: touched.append("an address") or 0, raising=False)
    with warnings.catch_warnings(record=True, action="always") as caught:
        on_cuda = figures(llama.cuda(), options)
    assert on_cuda == on_a_cpu != ""
    assert touched == []
    assert not [str(one.message) for one in caught if "pin" in str(one.message)]

"""Pinned memory with drivers that differ from those of common machines."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import specache_compile as sc
from specache_compile.kernels.memory import host_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("SIMULATED_DEVICE" not in os.environ, reason="a real device's addresses are what they are"),
]

CUDA = torch.device("cuda", 0)


@pytest.fixture
def other_addresses() -> Iterator[None]:
    """Give pinned memory other device addresses, with an empty pool."""
    from simulated_device import driver

    sc.release_host_memory()
    driver.set_other_addresses(True)
    yield
    driver.set_other_addresses(False)


def empty(tokens: int) -> torch.Tensor:
    return host_memory.host_empty((1 << 16, 16), torch.float32, CUDA, backed=tokens)


@pytest.mark.usefixtures("other_addresses")
def test_memory_with_another_device_address_is_left_unpinned() -> None:
    """Kernels get the host's address, which is invalid on such a device."""
    with (
        pytest.warns(UserWarning, match="cuda:0 has another address for pinned memory"),
        pytest.warns(UserWarning, match="the host tier is pageable"),
    ):
        host = empty(1 << 12)
    assert not host.is_pinned()
    assert len(host) == 1 << 16


def test_a_tier_moves_if_its_next_registration_has_another_address(request: pytest.FixtureRequest) -> None:
    sc.release_host_memory()
    host = empty(1 << 12)
    assert host.is_pinned()
    request.getfixturevalue("other_addresses")
    with pytest.warns(UserWarning, match="cuda:0 has another address for pinned memory"):
        assert host_memory.host_grown(host, tuple(host.shape), CUDA, 1 << 13) is None
    assert host.is_pinned()


def test_a_tier_grows_into_what_was_pinned_ahead_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may read this memory: the driver has registered the last row too."""
    from simulated_device import driver

    sc.release_host_memory()
    host, register, registered = empty(1 << 12), host_memory.register, []
    monkeypatch.setattr(host_memory, "register", lambda *given: registered.append(given[1]) or register(*given))
    host_memory.grow_ahead(host, 1 << 13)
    assert host_memory.host_grown(host, tuple(host.shape), CUDA, 1 << 13) is host
    assert registered == [host[: 1 << 12].nbytes]
    starts, ends = driver.memory_ranges()
    last = host[(1 << 13) - 1].data_ptr()
    assert ((starts <= last) & (last < ends)).any()
    assert not ((starts <= last + host[0].nbytes) & (last + host[0].nbytes < ends)).any()

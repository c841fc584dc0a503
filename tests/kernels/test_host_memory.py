"""Memory of the host tier: limits, pinning, growth and reuse."""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaForCausalLM

from conftest import eager, prompt, step
from specache_compile.compat import cache_of
from specache_compile.errors import SpecacheError
from specache_compile.kernels.memory import host_memory
from specache_compile.kernels.state.cursor import HostRecord, attach, new_cursor
from specache_compile.methods import parse_options
from specache_compile.methods.field import LayerShape
from specache_compile.paging.pool import PagePool
from specache_compile.runtime import state as tiers

pytestmark = pytest.mark.pairwise


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace /sys/fs/cgroup by a folder, and /proc/self/cgroup by a file in it."""
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "MEMBERSHIP", tmp_path / "membership")
    return tmp_path


def limit(folder: Path, most: int | str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\ninactive_file {cache}\n")


@pytest.mark.parametrize("membership", ["0::/pod/box\n", "5:cpu:/\n0::/pod/box\n"], ids=["version 2", "both"])
def test_the_nearest_limit_of_all_groups_around_counts(system: Path, membership: str) -> None:
    (system / "membership").write_text(membership)
    limit(system / "pod/box", 1000, 300, 50)
    assert host_memory.remaining_memory() == 750  # pages of files can be had back
    limit(system / "pod", 2000, 1500, 0)
    assert host_memory.remaining_memory() == 500
    limit(system / "pod", 2000, 2300, 0)
    assert host_memory.remaining_memory() == 0


def test_a_container_that_sees_its_own_group_as_the_root(system: Path) -> None:
    (system / "membership").write_text("0::/docker/0123\n")
    limit(system, 900, 100, 0)
    assert host_memory.remaining_memory() == 800


def test_no_limit_is_none(system: Path) -> None:
    assert host_memory.remaining_memory() is None  # no Linux
    (system / "membership").write_text("0::/box\n")
    assert host_memory.remaining_memory() is None  # no memory controller
    limit(system / "box", "max", 100, 0)
    assert host_memory.remaining_memory() is None


# Pinning, with a substitute for CUDA


class Driver:
    """Records calls, and the current device of each."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self.given: list[tuple[int, int]] = []  # address and size of each registration
        self.current: object = "no device"

    def note(self, name: str) -> Callable[..., int]:
        return lambda *given: self.calls.append((name, self.current)) or 0

    @contextmanager
    def device(self, selected: object) -> Iterator[None]:
        before, self.current = self.current, selected
        yield
        self.current = before


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()

    def register(address: int, size: int, flags: int) -> int:
        driver.given.append((address, size))
        return driver.note("register")()

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=driver.note("unregister"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", driver.device)
    monkeypatch.setattr(torch.cuda, "synchronize", driver.note("synchronize"))
    monkeypatch.setattr(host_memory, "_pool", host_memory.Pool())
    yield driver
    host_memory.release_host_memory()


CUDA, OTHER = torch.device("cuda:0"), torch.device("cuda:1")


def kinds(driver: Driver) -> list[str]:
    made, driver.calls = [name for name, _ in driver.calls], []
    return made


def test_memory_is_registered_and_freed_with_its_device_current(driver: Driver) -> None:
    tensor = host_memory.host_empty((1000,), torch.float32, OTHER)
    assert driver.calls == [("register", OTHER)]
    del tensor
    host_memory.release_host_memory()
    assert driver.calls[1:] == [("synchronize", OTHER), ("unregister", OTHER)]


def test_memory_that_the_driver_refuses_is_an_error(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[int] = []
    refusing = SimpleNamespace(cudaHostRegister=lambda *given: 2, cudaHostUnregister=driver.note("unregister"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    monkeypatch.setattr(torch, "zeros", lambda *given, **on: cleared.append(1))
    with pytest.raises(SpecacheError, match=r"CUDA refused to pin 4000 bytes of host memory.*ulimit -l"):
        host_memory.host_empty((1000,), torch.float32, CUDA)
    assert cleared == [1]
    assert kinds(driver) == [], "what was not registered is not given back"
    assert host_memory._pool.idle_bytes() == 0


def test_a_freed_tensors_memory_is_reused_after_its_copies(driver: Driver) -> None:
    tensor = host_memory.host_empty((2, 500), torch.float32, CUDA)
    place = tensor.data_ptr()
    part = tensor[1]
    del tensor
    assert host_memory.host_empty((1000,), torch.float32, CUDA).data_ptr() != place, "a view is still there"
    del part
    kinds(driver)
    again = [host_memory.host_empty((2000,), torch.float16, OTHER) for _ in range(2)]
    assert place in [tensor.data_ptr() for tensor in again]
    assert kinds(driver) == ["synchronize", "synchronize"]
    assert host_memory._pool.idle_bytes() == 0


def test_a_tier_grows_in_place_and_pins_only_new_memory(driver: Driver) -> None:
    page = mmap.PAGESIZE
    tensor = host_memory.host_empty((2, page), torch.uint8, CUDA)
    tensor[:] = torch.arange(2)[:, None]
    place, pool = tensor.data_ptr(), host_memory._pool
    grown = host_memory.host_grown(tensor, (6, page), CUDA)
    assert driver.given == [(place, 2 * page), (place + 2 * page, 4 * page)]
    assert (grown.data_ptr(), grown.shape) == (place, (6, page))
    assert torch.equal(grown[:2], tensor)
    del tensor
    assert pool.idle_bytes() == 0, "the larger one is there"
    del grown
    assert pool.idle_bytes() == 6 * page
    kinds(driver)
    host_memory.release_host_memory()
    assert kinds(driver) == ["synchronize", "unregister", "unregister"]


def test_segments_of_partial_pages_are_pinned_in_groups_of_whole_pages(driver: Driver) -> None:
    """With 8 bits and an odd number of heads, the next registration could not begin within a page."""
    unit = 25 * mmap.PAGESIZE + mmap.PAGESIZE // 2
    tensor = host_memory.host_empty((8, unit), torch.uint8, CUDA, 1)
    place = tensor.data_ptr()
    for backed in (2, 3, 4, 5):
        assert host_memory.host_grown(tensor, (8, unit), CUDA, backed) is tensor
    assert driver.given == [(place + start * unit, 2 * unit) for start in (0, 2, 4)]
    assert host_memory.host_grown(tensor, (8, unit), CUDA, 8) is tensor
    assert driver.given[3:] == [(place + 6 * unit, 2 * unit)]


def test_a_map_with_too_few_addresses_is_not_lent_again(driver: Driver) -> None:
    page = mmap.PAGESIZE
    kept = [host_memory.host_empty((2, page), torch.uint8, CUDA)]
    place = kept.pop().data_ptr()
    again = host_memory.host_empty((2 * host_memory.ROOM, page), torch.uint8, CUDA, 2)
    assert again.data_ptr() == place
    del again
    kinds(driver)
    more = host_memory.host_empty((2 * host_memory.ROOM + 1, page), torch.uint8, CUDA, 2)
    assert "register" in kinds(driver)
    del more


LAYER = LayerShape(2, 4, torch.float32, CUDA)
PAGE_BYTES = 2 * 256 * 2 * 4 * 4  # of that layer


def test_a_layers_host_tier_has_memory_for_its_pages_and_addresses_for_its_bucket(driver: Driver) -> None:
    """`offload` has only the host tier, so this needs no device."""
    pool = PagePool(parse_options({"method": "offload"}), [LAYER], 8, 2)
    host = pool.state[0]["host"]
    assert host.shape == (8, 2, 256, 2, 4)
    address = host.data_ptr()
    pool.grow_to(8, 3)
    assert (pool.state[0]["host"].data_ptr(), pool.moves) == (address, 0)
    assert [size for _, size in driver.given] == [2 * PAGE_BYTES, PAGE_BYTES]
    assert pool.allocate(3) == [0, 1, 2]
    pool.grow_to(16, 4)
    assert pool.state[0]["host"] is host
    assert (host.shape[0], host.data_ptr(), pool.free) == (16, address, [0, 1, 2, 3])


def test_under_a_fake_mode_nothing_is_registered_and_no_address_is_read(driver: Driver) -> None:
    """`explain` of a model on CUDA can have a host tier larger than any machine's memory."""
    large = LayerShape(1 << 20, 8, torch.float32, CUDA)
    with FakeTensorMode(), warnings.catch_warnings(action="error"):
        PagePool(parse_options(None), [large], 1 << 16)
        pool = PagePool(parse_options({"method": "offload"}), [large], 1 << 16)
        pool.grow_to(1 << 17, 1 << 17)
        attach(new_cursor(CUDA, 1), HostRecord())
    assert pool.state[0]["host"].shape[0] == 1 << 17
    assert driver.calls == []


def test_a_host_tier_that_cannot_grow_in_place_moves_with_its_content(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PagePool(parse_options({"method": "offload"}), [LAYER], 8, 2)
    host = pool.state[0]["host"]
    host[:2] = torch.randn(2, 2, 256, 2, 4)
    address, before = host.data_ptr(), host[:2].clone()
    monkeypatch.setattr(host_memory.PinnedMap, "pin", lambda memory, size: memory.registered == [])
    pool.grow_to(8, 3)
    assert pool.moves == 1
    assert host.data_ptr() != address
    assert torch.equal(host[:2], before)


def test_a_tier_moves_if_it_cannot_grow_in_place(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its reserved addresses, if the driver pins no more of it, and if it is pageable."""
    page = mmap.PAGESIZE
    tensor = host_memory.host_empty((1, page), torch.uint8, CUDA)
    assert host_memory.host_grown(tensor, (host_memory.ROOM, page), CUDA) is not None
    assert host_memory.host_grown(tensor, (host_memory.ROOM + 1, page), CUDA) is None
    tensor = host_memory.host_empty((1, page), torch.uint8, CUDA)
    monkeypatch.setattr(host_memory, "register", lambda *given: False)
    assert host_memory.host_grown(tensor, (2, page), CUDA) is None
    for device in (torch.device("cpu"), CUDA):
        assert host_memory.host_grown(torch.zeros(2, 8), (4, 8), device) is None


def test_no_registration_ends_within_a_segment(driver: Driver) -> None:
    """A map of two registrations is lent again only for equal segments; one without a segment's end does not grow."""
    page = mmap.PAGESIZE
    tensors = [host_memory.host_empty((2, page), torch.uint8, CUDA)]
    tensors.append(host_memory.host_grown(tensors[0], (3, page), CUDA))
    place = tensors[0].data_ptr()
    tensors.clear()
    tensors.append(host_memory.host_empty((3, page), torch.uint8, CUDA))
    assert tensors[0].data_ptr() == place
    tensors.clear()
    kinds(driver)
    tensors.append(host_memory.host_empty((1, 3 * page), torch.uint8, CUDA))
    assert "register" in kinds(driver)
    tensors.clear()
    other = host_memory.host_empty((2, page + page // 2), torch.uint8, CUDA)
    assert host_memory.host_grown(other, (4, page + page // 2), CUDA) is not None, "3 pages are 2 of its segments"
    del other
    odd = host_memory.host_empty((1, page // 2), torch.uint8, CUDA)
    assert host_memory.host_grown(odd, (2, page // 2), CUDA) is None, "half a page"


def test_a_tier_works_without_reserved_addresses(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "ROOM", 1 << 40)
    tensor = host_memory.host_empty((1, mmap.PAGESIZE), torch.uint8, CUDA)
    assert kinds(driver) == ["register"]
    assert host_memory.host_grown(tensor, (2, mmap.PAGESIZE), CUDA) is None


@pytest.mark.parametrize(("size", "fits"), [(4096, True), (3700, True), (3600, False), (4097, False)])
def test_memory_of_about_the_right_size_is_used_again(driver: Driver, size: int, fits: bool) -> None:
    del_me = [host_memory.host_empty((4096,), torch.uint8, CUDA)]
    del_me.clear()
    kinds(driver)
    tensor = host_memory.host_empty((size,), torch.uint8, CUDA)
    assert tensor.shape == (size,)
    assert ("register" not in kinds(driver)) == fits


def test_new_memory_frees_all_idle_memory(driver: Driver) -> None:
    pool = host_memory._pool
    cache = [host_memory.host_empty((1 << 20,), torch.uint8, CUDA) for _ in range(10)]
    cache.clear()
    assert pool.idle_bytes() == 10 << 20
    cache = [host_memory.host_empty((1 << 19,), torch.uint8, CUDA) for _ in range(12)]
    assert pool.idle_bytes() == 0
    cache.clear()
    host_memory.release_host_memory()
    assert pool.idle_bytes() == 0


def test_idle_memory_counts_as_free(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, lent = host_memory._pool, 8000
    cache = [host_memory.host_empty((1000,), torch.uint8, CUDA) for _ in range(8)]
    monkeypatch.setattr(host_memory, "free_memory", lambda: 10_000 - lent)
    assert host_memory.allowance(8000, None) == 5000
    cache.clear()
    assert host_memory.allowance(0, None) == 5000
    assert pool.idle_bytes() == lent


def test_idle_memory_is_released_before_a_tier_grows(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    page, pool, register = mmap.PAGESIZE, host_memory._pool, host_memory.register
    cache = [host_memory.host_empty((page,), torch.uint8, CUDA) for _ in range(8)]
    tensor = cache.pop()
    cache.clear()
    assert pool.idle_bytes() == 7 * page
    monkeypatch.setattr(host_memory, "register", lambda *given: not pool.idle and register(*given))
    assert host_memory.host_grown(tensor, (2 * page,), CUDA) is not None
    assert pool.idle_bytes() == 0


def filled(shape: tuple[int, ...], dtype: torch.dtype, filling: float) -> torch.Tensor:
    """Return codes and scales whose bytes are those of a NaN, or zeros."""
    if dtype.is_floating_point:
        return torch.full(shape, filling, dtype=dtype)
    return torch.full(shape, -1 if math.isnan(filling) else 0, dtype=dtype)


@pytest.mark.parametrize("method", ["specache", "kivi", "offload", "kcache"])  # those with a host tier
def test_unwritten_parts_of_the_host_tier_are_never_read(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Reused memory holds an older cache, or bits that are NaN in this dtype."""
    small = {"group_size": 32, "residual_length": 32} if method in ("specache", "kivi") else {}
    twin = eager(llama, method=method, **small)

    def run(filling: float) -> torch.Tensor:
        monkeypatch.setattr(tiers, "host_empty", lambda shape, dtype, *rest: filled(shape, dtype, filling))
        cache, logits = cache_of(step(twin, prompt(90, 2))), []
        for tokens in (1, 20, 1, 1, 200, 1, 1):  # the longest extend grows the bucket
            logits.append(step(twin, prompt(tokens, 2, tokens), cache).logits[:, -1])
        cache.crop(-40)
        cache.reorder_cache(torch.tensor([1, 0]))
        logits += [step(twin, prompt(1, 2, token), cache).logits[:, -1] for token in range(3)]
        return torch.stack(logits)

    assert torch.equal(run(math.nan), run(0.0))

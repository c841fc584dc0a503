"""`save(cache, folder)` and `load(folder, model)`: a held cache on disk.

`session.pt` has the session's description, its progress and the name of its folder of layers, like `layers-3f9c21d0`.
`000.pt` there has the plain attributes of a layer of the cache, and the state tensors of its site.
"""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer

from specache_compile.compile.compiled_options import required_options
from specache_compile.errors import SpecacheError, first_line, split_session
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.kernels.state.stored_pairs import parts_of
from specache_compile.methods.field import MEASURE, LayerShape, LayerState
from specache_compile.model_key import PrefillKey, prefill_key
from specache_compile.options import MethodOptions, differences, own_options
from specache_compile.paging.pool import pages_for
from specache_compile.passes.reading.sites import PARTS
from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.ranks import ranks_of
from specache_compile.runtime.session import Progress, Session, required_session
from specache_compile.runtime.state import fields_of, paged_fields
from specache_compile.runtime.tiers import Tiers

from .holding import set_model

FORMAT = 6
HEADER = "session.pt"
NOT_WRITTEN = "it is damaged, or `save` did not write it"
# Options of the model, not of the cache: how its graphs run, and this machine's memory.
OF_THE_MODEL = ("lowering", "mode", "host_memory", "speculate")
# Transformers' layer classes without other contents than keys, values, a recurrent state and numbers.
KINDS = [getattr(cache_utils, name, None) for name in (
    "DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer", "DummyLayer",
)]  # fmt: skip
# Matches folders of layers only.
LAYERS_FOLDER = "layers-" + "[0-9a-f]" * 8
# Types of a layer's attributes that are saved; tensors may be in dictionaries.
SAVED = (bool, int, dict, Tensor, torch.dtype, torch.device)


def save(cache: DynamicCache, folder: str | os.PathLike[str]) -> None:
    """Write a held cache to a folder, for `load`.

    Every tier is written bit for bit. A session that the folder held before stays until the new one is complete.

    Args:
        cache: a held cache; it stays usable.
        folder: created if needed. Only one process at a time may save into it.

    Raises:
        SpecacheError: the cache is plain, is split over ranks, is no DynamicCache, or has a layer with other contents
            than keys, values and a recurrent state. Also if a file cannot be written.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        model.compile(backend="specache")
        inputs = tokenizer("Hello", return_tensors="pt").to(model.device)
        output = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
        sc.save(sc.cache_of(output), "build/session")
        cache = sc.load("build/session", model)
        model.generate(output.sequences, **sc.with_cache(cache), max_new_tokens=4)
    """
    if type(cache) is not DynamicCache:
        raise SpecacheError(
            f"save: this cache is a {type(cache).__name__}, and only a DynamicCache can be saved. Prefill again instead"
        )
    check_layers(cache)
    session = required_session(cache)
    tiers, progress = session.tiers, session.progress
    if tiers.ranks is not None:
        raise split_session()
    session.tiers.drain()
    root = Path(folder)
    layers = root / f"layers-{uuid.uuid4().hex[:8]}"
    header = {
        "format": FORMAT,
        "folder": layers.name,
        "keys": [(key.weights, key.settings) for key in progress.keys],
        "options": tuple(map(described_options, (session.requested, session.final_options))),
        "in_16_bits": tiers.pending is not None,
        "capacity": tiers.capacity,
        "progress": owned({name: value for name, value in vars(progress).items() if name != "keys"}, "cpu"),
        # The device is that of the loading model.
        "shapes": [{name: x for name, x in vars(shape).items() if name != "device"} for shape in session.layers],
        "layers": [type(layer).__name__ for layer in cache.layers],
    }
    new = root / f"{HEADER}.new"
    try:
        for number, layer in enumerate(tqdm(cache.layers, "saving", unit="layer", disable=None, leave=False)):
            with tiers.lock:
                write(contents(layer, tiers, progress.lengths), layers / layer_file(number))
        sync(layers)
        write(header, new)
        sync(root)
    except BaseException:
        shutil.rmtree(layers, ignore_errors=True)
        raise
    # The header is replaced in one move, so an interrupted save leaves the old session. The next save deletes the rest.
    os.replace(new, root / HEADER)
    sync(root)
    for other in root.glob(LAYERS_FOLDER):
        if other != layers:
            shutil.rmtree(other, ignore_errors=True)


@torch.inference_mode(False)  # the state is written later, outside of the caller's inference mode
def load(folder: str | os.PathLike[str], model: torch.nn.Module) -> DynamicCache:
    """Load a cache that `save` wrote.

    The counts of `stats` start at 0.

    Args:
        folder: the folder that was passed to `save`.
        model: compiled with this backend and the same options. Its weights and settings (active adapters, for example)
            must be those of the prefill.

    Returns:
        A held cache.

    Raises:
        SpecacheError: the folder has no complete session, or it was made with another model or other options. Also for
            a model on several devices or ranks.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        model.compile(backend="specache")
        inputs = tokenizer("Hello", return_tensors="pt").to(model.device)
        output = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
        sc.save(sc.cache_of(output), "build/session")
        print(sc.load("build/session", model).get_seq_length())
    """
    root = Path(folder)
    header = read_header(root)
    try:
        return restored(root, header, model)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, SpecacheError):
            raise
        raise unreadable_session(
            root / HEADER, f"a part is missing or has another type ({first_line(error)})"
        ) from error


def restored(root: Path, header: Mapping[str, Any], model: torch.nn.Module) -> DynamicCache:
    """The cache of a folder with this header."""
    options, (requested, final) = required_options(model, "load"), header["options"]
    found = f"method {requested['method']!r} (the model's: {options.method!r})"
    if requested["method"] == options.method:
        found = differences(replace(options, **requested), options)
    if found:
        raise SpecacheError(
            f"the session in {root} was made with other options: {found}. Compile the model with those, or prefill "
            "again"
        )
    if ranks_of(list(model.parameters())) is not None:
        raise split_session()
    device, keys = device_of(model), tuple(PrefillKey(*key) for key in header["keys"])
    for key in set(keys):
        check_key(root, key, prefill_key(model, model.parameters()))
    progress = Progress(keys=keys, **owned(header["progress"], device))
    shapes = [LayerShape(**shape, device=device) for shape in header["shapes"]]
    session = Session(options, shapes, len(keys), progress.length)
    session.progress, tiers = progress, session.tiers
    last = replace(options, **final)
    tiers.options, tiers.pending = (last.in_16_bits, last) if header["in_16_bits"] else (last, None)
    tiers.capacity = header["capacity"]
    session.reserve(0)
    set_model(session, model)
    cache, sites = empty_cache(model, header["layers"]), itertools.count()
    layers: list[Any] = list(cache.layers)
    for number, layer in enumerate(tqdm(layers, "loading", unit="layer", disable=None, leave=False)):
        path = root / header["folder"] / layer_file(number)
        found = read(path)
        vars(layer).update(owned(found["layer"], device))
        if found["state"] is not None:
            site = next(sites)
            fill(session, site, found["state"], path)
            layer.keys, layer.values = (session.held(site, part) for part in PARTS)
    return cache


def fill(session: Session, site: int, found: LayerState, path: Path) -> None:
    """Copy saved state tensors to a site's: rows, or pages, which are adjacent in a new pool. SpecacheError if a shape
    or dtype does not match the options."""
    pages = sum(map(len, session.tiers.pages))
    for field in fields_of(session.options, session.layers[site]):
        state, tensor = session.state[site][field.name], found.get(field.name)
        expected = torch.Size((pages if field.by_page else len(state), *state.shape[1:]))
        if tensor is None or tensor.shape != expected or tensor.dtype != state.dtype:
            raise unreadable_session(path, f"its tensor {field.name!r} does not have the shape {tuple(expected)}")
        if field.tier != MEASURE:
            state[: len(tensor)].copy_(tensor)


def check_layers(cache: DynamicCache) -> None:
    """SpecacheError if a layer has more than is saved."""
    for number, layer in enumerate(cache.layers):
        if type(layer) not in KINDS or not getattr(layer, "is_initialized", True):
            raise SpecacheError(
                f"save: layer {number} of this cache, a {type(layer).__name__}, has other contents than keys, values "
                "and a recurrent state. Prefill again instead"
            )


def contents(layer: Any, tiers: Tiers, lengths: Sequence[int]) -> dict[str, Any]:
    """What is saved of a layer: its plain attributes, and the state tensors of its site, if it is held."""
    handle = getattr(getattr(layer, "keys", None), "handle", None)
    plain = {
        name: value for name, value in vars(layer).items()
        if isinstance(value, SAVED) and not isinstance(value, HeldTensor)
    }  # fmt: skip
    return {"layer": owned(plain, "cpu"), "state": None if handle is None else whole(tiers, handle.site, lengths)}


def owned(value: Any, device: torch.device | str) -> Any:
    """A copy of a value on a device, with all tensors in it."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {name: owned(item, device) for name, item in value.items()}
    return torch.device(device) if isinstance(value, torch.device) else value


def empty_cache(model: Any, kinds: Sequence[str]) -> DynamicCache:
    """A cache with layers of these classes, by the model's configuration or with all layers alike."""
    for cache in (DynamicCache(config=model.config), DynamicCache()):
        cache.layers = cache.layers or [DynamicLayer() for _ in kinds]
        if [type(layer).__name__ for layer in cache.layers] == list(kinds):
            return cache
    raise SpecacheError(
        f"with this version of transformers the model has no cache with the saved layers ({', '.join(kinds)}). Prefill "
        "again"
    )


def whole(tiers: Tiers, site: int, lengths: Sequence[int]) -> LayerState:
    """A site's state tensors: the buffers of rows, and the pages of one row after the other.

    A page has zeros where it has no token: uninitialised memory must not be saved.
    """
    state = owned({name: tiers.state[site][name] for name in tiers.all_rows[site]}, "cpu")
    pages = [page for row, length in zip(tiers.pages, lengths, strict=True) for page in row[: pages_for(length)]]
    for field in paged_fields(tiers.options, tiers.layers[site]):
        found = state[field.name] = tiers.state[site][field.name][torch.tensor(pages, dtype=torch.int64)]
        last, each = -1, PAGE // found.shape[2] if found.shape[2] else 1
        for length in lengths:
            last += pages_for(length)
            if length % PAGE:
                for part in parts_of(found):
                    part[last, :, -(-(length % PAGE) // each) :] = 0
    return state


def described_options(options: MethodOptions) -> dict[str, Any]:
    """The options that determine a session's contents."""
    names = [name for name in own_options(type(options)) if name not in OF_THE_MODEL]
    return {"method": options.method, **{name: getattr(options, name) for name in names}}


def device_of(model: torch.nn.Module) -> torch.device:
    """The model's device; SpecacheError if it is on several."""
    devices = {weight.device for weight in model.parameters()}
    if len(devices) > 1:
        where = ", ".join(sorted(map(str, devices)))
        raise SpecacheError(
            f"load: this model is on several devices ({where}), and a saved session needs one. Move the model to one "
            "device, or prefill again"
        )
    return devices.pop()


def check_key(root: Path, key: PrefillKey, ours: PrefillKey) -> None:
    """SpecacheError if a row was filled with other weights or settings than the model has."""
    missing = Counter(key.weights) - Counter(ours.weights)
    if missing:
        raise SpecacheError(
            f"the session in {root} was made with another model: {missing.total()} of its {len(key.weights)} "
            "weights differ from this model's in values, shape or dtype. Load those weights, or prefill again"
        )
    if key.settings is not None and (differing := {name for name, _ in {*key.settings} ^ {*(ours.settings or ())}}):
        raise SpecacheError(
            f"the session in {root} was made with other settings of the model's modules: "
            f"{', '.join(sorted(differing))}. The active adapters or the version of transformers may differ. "
            "Restore the settings, or prefill again"
        )


def read_header(root: Path) -> dict[str, Any]:
    path = root / HEADER
    if not path.exists():
        raise SpecacheError(f"{root} has no saved session. Create one with specache_compile.save(cache, folder)")
    header = read(path)
    if not isinstance(header, dict) or "format" not in header:
        raise unreadable_session(path, NOT_WRITTEN)
    if header["format"] != FORMAT:
        raise unreadable_session(path, f"it is of format {header['format']}, and this version reads format {FORMAT}")
    return header


def layer_file(number: int) -> str:
    return f"{number:03d}.pt"


def read(path: Path) -> Any:
    """The contents of a file, whose tensors are mapped."""
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        raise unreadable_session(path, first_line(error)) from error
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise unreadable_session(path, NOT_WRITTEN) from error


def write(contents: Mapping[str, Any], path: Path) -> None:
    """Write a file in a folder that may be new, and force it to disk. SpecacheError if this fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(contents, path)
        sync(path)
    except (OSError, RuntimeError) as error:
        why = f"save: {path} cannot be written ({first_line(error)}). Free disk space, or pass another folder"
        raise SpecacheError(why) from error


def sync(path: Path) -> None:
    """Force a file to disk, so that it survives a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unreadable_session(path: Path, why: str) -> SpecacheError:
    return SpecacheError(f"{path} of a saved session cannot be read: {why}. Prefill and save again")

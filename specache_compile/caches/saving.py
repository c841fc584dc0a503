"""`save(cache, folder)` and `load(folder, model)`: a held cache on disk.

`session.json` has the session's description and the name of its folder of tensors, like `tensors-3f9c21d0`.
`layer-000.safetensors` has a layer's state tensors, or plain keys and values, and recurrent states.
`step.safetensors` has the speculative token and padding of the next step.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer

from specache_compile.compile.compiled_options import required_options
from specache_compile.errors import OptionError, SpecacheError, split_session
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.methods import every_method
from specache_compile.methods.field import LayerShape, LayerState
from specache_compile.model_key import PrefillKey, all_of, prefill_key
from specache_compile.options import MethodOptions, differences, own_options
from specache_compile.paging.pool import PagePool, pages_for
from specache_compile.passes.reading.sites import PARTS
from specache_compile.runtime.ranks import ranks_of
from specache_compile.runtime.session import Progress, Session, required_session
from specache_compile.runtime.state import MEASURE, adopt, empty, fields_of, paged_fields, pages_of_rows
from specache_compile.runtime.tiers import Tiers

from .holding import set_model
from .recurrent import STATES, marks_of, restore, states_of

FORMAT = 4
HEADER = "session.json"
HEADER_PARTS = {"capacity", "folder", "in_16_bits", "layers", "numbers", "options", "shapes"}
STEP = "step.safetensors"
# Options of the model, not of the cache: how its graphs run, and this machine's memory.
OF_THE_MODEL = ("lowering", "mode", "host_memory", "speculate")
# Layer classes without other contents than keys, values, a recurrent state and numbers.
KINDS = tuple(
    getattr(cache_utils, name)
    for name in (
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "DummyLayer",
    )
    if hasattr(cache_utils, name)
)
# Matches folders of tensors only.
TENSORS_FOLDER = "tensors-" + "[0-9a-f]" * 8
# Fields of a session's progress in the header.
NUMBERS = ("length", "lengths", "longest_calls", "ready", "joined", "padded")


def save(cache: DynamicCache, folder: str | os.PathLike[str]) -> None:
    """Write a held cache to a folder, for `load`.

    Every tier is written bit for bit. A session that the folder held before stays until the new one is complete.

    Args:
        cache: a held cache; it stays usable.
        folder: created if needed. Only one process at a time may save into it.

    Raises:
        SpecacheError: the cache is plain, is split over ranks, is no DynamicCache, or has a layer with other contents
            than keys, values and a recurrent state.

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
    layers = [described_layer(number, layer) for number, layer in enumerate(cache.layers)]
    session = required_session(cache)
    tiers, progress = session.tiers, session.progress
    if tiers.ranks is not None:
        raise split_session()
    session.drain()
    header = {
        "format": FORMAT,
        **described_keys(progress.keys),
        "options": {
            "requested": described_options(session.requested),
            "final": described_options(session.final_options),
        },
        "in_16_bits": tiers.pending is not None,
        "capacity": tiers.capacity,
        "numbers": {name: getattr(progress, name) for name in NUMBERS},
        "shapes": [described_shape(shape) for shape in session.layers],
        "layers": layers,
    }
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    tensors = root / f"tensors-{uuid.uuid4().hex[:8]}"
    tensors.mkdir()
    try:
        for number, layer in enumerate(tqdm(cache.layers, "saving", unit="layer", disable=None, leave=False)):
            site = layers[number]["site"]
            with tiers.lock:
                pairs = plain_pairs(layer) if site is None else whole(tiers, site, progress.lengths)
            write({**pairs, **states_of(layer)}, tensors / layer_file(number))
        starts_from = {"speculative": progress.speculative, "padding": progress.padding}
        write({name: tensor for name, tensor in starts_from.items() if tensor is not None}, tensors / STEP)
        header["folder"] = tensors.name
        sync(tensors)
        new = root / f"{HEADER}.new"
        new.write_text(json.dumps(header, indent=1) + "\n")
        sync(new)
        sync(root)
    except BaseException:
        shutil.rmtree(tensors, ignore_errors=True)
        raise
    # `session.json` is replaced in one move, so an interrupted save leaves the old session. The next save deletes the
    # rest.
    os.replace(new, root / HEADER)
    sync(root)
    for other in root.glob(TENSORS_FOLDER):
        if other != tensors:
            shutil.rmtree(other, ignore_errors=True)


def load(folder: str | os.PathLike[str], model: torch.nn.Module) -> DynamicCache:
    """Load a cache that `save` wrote.

    On a CPU the host tier is mapped from its file and read when steps need it. The counts of `stats` start at 0.

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
    return loaded(Path(folder), model, by_any_weights=False)


def loaded(root: Path, model: torch.nn.Module, by_any_weights: bool) -> DynamicCache:
    """Load a cache. by_any_weights: skip the check of the model's key, for a cache that was swapped out."""
    header = read_header(root)
    compiled_with = required_options(model, "load")
    requested, final = (restored_options(header["options"][name], compiled_with) for name in ("requested", "final"))
    if found := differences(requested, compiled_with):
        raise SpecacheError(
            f"the session in {root} was made with other options: {found}. Compile the model with those, or prefill "
            "again"
        )
    if ranks_of(list(model.parameters())) is not None:
        raise split_session()
    device = device_of(model)
    if not by_any_weights:
        check_key(root, header, model)
    shapes = [restored_shape(shape, device) for shape in header["shapes"]]
    numbers: dict[str, Any] = {}
    for name, value in header["numbers"].items():
        numbers[name] = tuple(value) if isinstance(value, list) else value
    batch = len(numbers["lengths"])
    session = Session(requested, shapes, batch, numbers["length"])
    session.progress = progress = Progress(keys=(restored_key(header),) * batch, **numbers)
    tiers = session.tiers
    tiers.options, tiers.pending = (final.in_16_bits, final) if header["in_16_bits"] else (final, None)
    tiers.check_host_memory(pages_of_rows(batch, progress.longest)[1], progress.longest)
    return filled(session, model, header, root / header["folder"])


@torch.inference_mode(False)
def filled(session: Session, model: torch.nn.Module, header: Mapping[str, Any], folder: Path) -> DynamicCache:
    """The cache of a session, filled from a folder. State is created outside of the caller's inference mode."""
    cache = empty_cache(model, [layer["kind"] for layer in header["layers"]])
    device, states = session.layers[0].device, list[tuple[LayerState, LayerState]]()
    layers: list[Any] = list(cache.layers)
    for number, described in enumerate(tqdm(header["layers"], "loading", unit="layer", disable=None, leave=False)):
        layer, path, site = layers[number], folder / layer_file(number), described["site"]
        own = {
            name: tensor.to(device, copy=True)
            for name, tensor in read(path).items()
            if site is None or name.startswith(STATES)
        }
        if site is not None:
            states.append(placed(session, site, path, header["capacity"]))
        pairs = [own.pop(part, None) if site is None else session.held(site, part) for part in PARTS]
        if pairs[0] is not None:
            layer.lazy_initialization(*pairs)
            layer.keys, layer.values = pairs
        restore(layer, own, described.get("marks", {}))
        for name, value in described["numbers"].items():
            setattr(layer, name, value)
    fill_tiers(session, states, header["capacity"])
    starts_from = {name: tensor.to(device, copy=True) for name, tensor in read(folder / STEP).items()}
    session.progress.speculative, session.progress.padding = starts_from.get("speculative"), starts_from.get("padding")
    set_model(session, model)
    session.update_memory()
    return cache


def described_layer(number: int, layer: Any) -> dict[str, Any]:
    """A layer's description: its class, its numbers, and its site (None if it is not held)."""
    if type(layer) not in KINDS or not getattr(layer, "is_initialized", True):
        raise SpecacheError(
            f"save: layer {number} of this cache, a {type(layer).__name__}, has other contents than keys, values and a "
            "recurrent state. Prefill again instead"
        )
    handle = getattr(getattr(layer, "keys", None), "handle", None)
    return {
        "kind": type(layer).__name__,
        "site": None if handle is None else handle.site,
        "numbers": {name: value for name, value in vars(layer).items() if type(value) in (int, bool)},
        "marks": marks_of(layer),
    }


def plain_pairs(layer: Any) -> dict[str, Tensor]:
    """A layer's plain keys and values; empty for a layer without attention."""
    return {part: getattr(layer, part) for part in PARTS if getattr(layer, part, None) is not None}


def empty_cache(model: Any, kinds: Sequence[str]) -> DynamicCache:
    """A cache with layers of these classes, by the model's configuration or with all layers alike."""
    for cache in (DynamicCache(config=model.config.get_text_config(decoder=True)), DynamicCache()):
        cache.layers = cache.layers or [DynamicLayer() for _ in kinds]
        if [type(layer).__name__ for layer in cache.layers] == list(kinds):
            return cache
    raise SpecacheError(
        f"with this version of transformers the model has no cache with the saved layers ({', '.join(kinds)}). Prefill "
        "again"
    )


def whole(tiers: Tiers, site: int, lengths: Sequence[int]) -> LayerState:
    """A layer's state tensors: the buffers of rows, and the pages of one row after the other.

    A page has zeros where it has no token: uninitialised memory must not be saved.
    """
    state = dict(tiers.state[site])
    pages = [page for row, length in zip(tiers.pages, lengths, strict=True) for page in row[: pages_for(length)]]
    for field in paged_fields(tiers.options, tiers.layers[site]):
        found = state[field.name] = state[field.name][torch.tensor(pages, dtype=torch.int64)]
        last, each = -1, PAGE // found.shape[2] if found.shape[2] else 1
        for length in lengths:
            last += pages_for(length)
            if length % PAGE:
                found[last, :, -(-(length % PAGE) // each) :] = 0
    return state


def placed(session: Session, site: int, path: Path, capacity: int) -> tuple[LayerState, LayerState]:
    """A layer's state tensors in pages and those of rows, on their devices. SpecacheError if a shape or dtype does not
    match the options."""
    shape, tiers, lengths = session.layers[site], session.tiers, session.progress.lengths
    found, paged, rows = read(path), LayerState(), LayerState()
    count, pages, places = sum(map(pages_for, lengths)), *sizes_of(session)
    for field in fields_of(session.options, shape):
        size = (count, PAGE) if field.by_page else (tiers.batch, capacity)
        expected, tensor = torch.Size(field.shape(session.options, shape, *size)), found.get(field.name)
        if tensor is None or tensor.shape != expected or tensor.dtype != field.dtype(session.options, shape):
            raise unreadable_session(path, f"its tensor {field.name!r} does not have the shape {tuple(expected)}")
        new = tensor
        if not field.on_host or shape.device.type != "cpu":
            more = (pages, PAGE, places) if field.by_page else size
            new = empty(field, session.options, shape, *more)
            if field.tier != MEASURE:
                new[: len(tensor)].copy_(tensor)
        (paged if field.by_page else rows)[field.name] = new
    adopt(rows, shape)
    return paged, rows


def sizes_of(session: Session) -> tuple[int, int]:
    """Pages of a loaded session, and those with host memory. A CPU has only the saved pages, mapped from their file."""
    pages, places = pages_of_rows(session.tiers.batch, session.progress.longest)
    mapped = any(field.on_host for layer in session.layers for field in fields_of(session.options, layer))
    if mapped and session.layers[0].device.type == "cpu":
        places = sum(map(pages_for, session.progress.lengths))
    return pages, places


def fill_tiers(session: Session, states: Sequence[tuple[LayerState, LayerState]], capacity: int) -> None:
    """Use the state tensors that were read: of each layer those in pages and those of rows."""
    pool = PagePool(session.options, session.layers, *sizes_of(session), state=[paged for paged, _ in states])
    pages = [pool.allocate(pages_for(length)) for length in session.progress.lengths]
    session.tiers.capacity = capacity
    session.use(session.tiers.in_pool(pool, pages, len(pages), [rows for _, rows in states]))


def described_shape(shape: LayerShape) -> dict[str, Any]:
    """A layer's shape without the device, which is that of the loading model."""
    found = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape) if field.name != "device"}
    return {**found, "dtype": str(shape.dtype).removeprefix("torch.")}


def restored_shape(described: Mapping[str, Any], device: torch.device) -> LayerShape:
    return LayerShape(**{**described, "dtype": getattr(torch, described["dtype"]), "device": device})


def described_options(options: MethodOptions) -> dict[str, Any]:
    """The options that determine a session's contents."""
    names = [name for name in own_options(type(options)) if name not in OF_THE_MODEL]
    return {"method": options.method, **{name: getattr(options, name) for name in names}}


def restored_options(described: Mapping[str, Any], given: MethodOptions) -> MethodOptions:
    """Options from their description, for a model compiled under `given`."""
    method = every_method().get(described["method"])
    if method is None:
        raise OptionError(
            f"the session was saved with method {described['method']!r}. Install its package, or prefill again"
        )
    kind = method.options
    known = own_options(kind)
    own = {name: getattr(given, name, known[name].default) for name in OF_THE_MODEL if name in known}
    return kind(**{**described, **own})


def described_keys(keys: Sequence[PrefillKey]) -> dict[str, Any]:
    """The keys of all rows: all their weights, and each different setting."""
    settings = {key.settings for key in keys if key.settings is not None}
    return {
        "weights": list(all_of(key.weights for key in set(keys))),
        "settings": [dict(each) for each in sorted(settings)],
    }


def restored_key(header: Mapping[str, Any]) -> PrefillKey:
    settings = header["settings"]
    return PrefillKey(tuple(header["weights"]), tuple(sorted(settings[0].items())) if settings else None)


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


def check_key(root: Path, header: Mapping[str, Any], model: torch.nn.Module) -> None:
    """SpecacheError if the rows were filled with other weights or settings than the model has."""
    key = prefill_key(model, model.parameters())
    missing = Counter(header["weights"]) - Counter(key.weights)
    if missing:
        raise SpecacheError(
            f"the session in {root} was made with another model: {missing.total()} of its {len(header['weights'])} "
            "weights differ from this model's in values, shape or dtype. Load those weights, or prefill again"
        )
    for settings in header["settings"]:
        if differing := {name for name, _ in {*settings.items()} ^ {*(key.settings or ())}}:
            raise SpecacheError(
                f"the session in {root} was made with other settings of the model's modules: "
                f"{', '.join(sorted(differing))}. The active adapters or the version of transformers may differ. "
                "Restore the settings, or prefill again"
            )


def read_header(root: Path) -> dict[str, Any]:
    path = root / HEADER
    try:
        header = json.loads(path.read_text())
    except FileNotFoundError:
        raise SpecacheError(
            f"{root} has no saved session. Create one with specache_compile.save(cache, folder)"
        ) from None
    except ValueError as error:
        raise unreadable_session(path, f"it is not JSON ({error})") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise unreadable_session(path, f"it is not of format {FORMAT}")
    if missing := HEADER_PARTS - header.keys():
        raise unreadable_session(path, f"it lacks {', '.join(sorted(missing))}")
    if not fnmatch.fnmatchcase(header["folder"], TENSORS_FOLDER):
        raise unreadable_session(path, f"its folder {header['folder']!r} was not created by save")
    return header


def layer_file(number: int) -> str:
    return f"layer-{number:03d}.safetensors"


def read(path: Path) -> LayerState:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise unreadable_session(path, str(error)) from error


def write(tensors: LayerState, path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    sync(path)


def sync(path: Path) -> None:
    """Force a file to disk, so that it survives a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unreadable_session(path: Path, why: str) -> SpecacheError:
    return SpecacheError(f"{path} of a saved session cannot be read: {why}. Prefill and save again")

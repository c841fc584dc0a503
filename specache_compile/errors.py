"""The errors and warnings that a person can meet, each saying what was given and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class SpecacheError(RuntimeError):
    """The backend cannot do what was asked, and says what to do instead."""


class OptionError(SpecacheError, ValueError):
    """An option's name or value is not accepted; the message lists what is."""


def no_lanes_for(collective: str) -> SpecacheError:
    return SpecacheError(
        f"{collective}, which the ranks of this model call together, is not known for two tokens at once: compile with "
        'options={"speculate": False}'
    )


def split_heads(heads: int, ranks: int) -> SpecacheError:
    return SpecacheError(
        f"{heads} KV heads do not divide by {ranks} ranks: each rank has whole heads. Take a number of ranks "
        f"that divides {heads}, or a DistributedConfig whose tp_plan leaves the attention whole"
    )


def ranks_differ(rank: int, differences: Mapping[str, tuple[Any, Any]]) -> SpecacheError:
    told = ", ".join(
        f"{name}: {first} on rank 0, {other} on rank {rank}" for name, (first, other) in differences.items()
    )
    return SpecacheError(
        f"the ranks of this model were not given the same ({told}), and would wait for each other for ever: compile "
        "with the same options and generate from the same prompt on every rank"
    )


def split_session() -> SpecacheError:
    return SpecacheError(
        "a cache that is split over ranks (tensor parallel) is neither saved, nor loaded, nor taken over: each rank "
        "has its own KV heads. Prefill again, or do it where the model is whole"
    )


def nothing_to_verify(method: str, exact: bool) -> OptionError:
    why = "is exact by itself" if exact else "keeps no exact copy of all pairs, so that there is nothing to verify with"
    return OptionError(f"option verify: method {method!r} {why}; leave it out, or take specache, kivi or kcache")


class HeldTensorError(SpecacheError):
    """Something outside the compiled model tried to read, or to use a stale view of, a held cache tensor."""


class SpecacheWarning(UserWarning):
    """Something was left as Hugging Face wrote it; it is right, but not compressed."""


def held_read(operation: str) -> HeldTensorError:
    return HeldTensorError(
        f"{operation} tried to read keys or values that the specache backend holds in its own tiers: this tensor has "
        "their shape alone. specache_compile.materialize(past_key_values) gives a plain copy of the cache to read."
    )


def held_saved() -> HeldTensorError:
    return HeldTensorError(
        "a cache that the specache backend holds in its own tiers cannot be pickled. specache_compile.save(cache, "
        "folder) and load(folder, model) take it to another process; materialize(cache) makes a plain copy, and "
        "copy.deepcopy one that is held."
    )


def plain_already() -> SpecacheError:
    return SpecacheError("this cache holds plain tensors already: the specache backend does not hold it")


def cannot_be_saved(number: int, kind: str) -> SpecacheError:
    return SpecacheError(
        f"layer {number} of this cache, a {kind}, is not keys and values alone: such a cache cannot be saved"
    )


def model_is_gone() -> SpecacheError:
    return SpecacheError(
        "the model that filled this cache is gone, and its weights are what a saved session is known by: save it while "
        "the model is there"
    )


def other_shapes(cache: str, model: str) -> SpecacheError:
    return SpecacheError(
        f"this cache is of another model: it has {cache}, and the model {model}. Give each model the cache that it "
        "filled itself"
    )


def other_center(held_with: bool) -> SpecacheError:
    told = ("with", "finds none") if held_with else ("without", "finds one")
    return SpecacheError(
        f"this cache was taken over {told[0]} a bias on its keys, and the compiled model {told[1]}: its names say "
        "something else than its graph. Compile with center='always' or 'never', and hold it again"
    )


def other_sizes(assumed: object) -> SpecacheError:
    return SpecacheError(
        f"a graph that was compiled while a generation ran is for calls with {assumed}, of Dynamo's symbolic sizes, "
        "and this is another. torch._dynamo.reset() has the next call compile for its own sizes"
    )


def unchecked_sizes(assumed: object) -> SpecacheError:
    return SpecacheError(
        f"a graph that this generation needs would hold only for {assumed}, which no call shows. "
        "torch._dynamo.reset() before a new generation may avoid it; please report it with the model's config"
    )


def not_to_be_held(why: str) -> SpecacheError:
    return SpecacheError(f"hold: this cache cannot be taken over: {why}. Let the compiled model read the prompt itself")


def held_already() -> SpecacheError:
    return SpecacheError("hold: the specache backend holds this cache already; copy.deepcopy makes a second one")


def not_compiled(what: str) -> SpecacheError:
    return SpecacheError(
        f"{what}: this model is not compiled by the backend, which alone can go on from a held cache: "
        "model.compile(backend='specache', options=...) first"
    )


def several_devices(devices: Sequence[str]) -> SpecacheError:
    return SpecacheError(
        f"load: this model is on several devices ({', '.join(devices)}), and a saved session goes to one: move the "
        "model to one device, or prefill again"
    )


def no_saved_session(folder: Path) -> SpecacheError:
    return SpecacheError(f"no session was saved in {folder}: specache_compile.save(cache, folder) makes one")


def unreadable_session(path: Path, why: str) -> SpecacheError:
    return SpecacheError(f"{path} of a saved session cannot be read: {why}. Prefill again, and save anew")


def other_model(folder: Path, different: int, weights: int) -> SpecacheError:
    return SpecacheError(
        f"the session in {folder} was made with another model: of its {weights} weights {different} are not this one's "
        "(values, shapes or dtype)"
    )


def other_layers(kinds: Sequence[str]) -> SpecacheError:
    return SpecacheError(
        f"this transformers gives the model no cache with the layers that were saved: {', '.join(kinds)}"
    )


def other_options(folder: Path, told: str) -> SpecacheError:
    return SpecacheError(
        f"the session in {folder} was made with other options: {told}. Compile the model with those, or prefill again"
    )


def no_assisted_decoding(missing: str) -> SpecacheError:
    return SpecacheError(
        f"option verify: there is no {missing}, which drafts need: install one of 5.17 to 5.23, or leave the option out"
    )


def unseen_options(version: str) -> str:
    return (
        f"torch {version} does not show a compiled function's options where the option verify looks for them: nothing "
        "is drafted. With the option every step is exact all the same, and streams the host tier"
    )


def not_drafted(reason: str) -> str:
    return (
        f"option verify: this generation is not drafted: {reason}. Its tokens are the full cache's all the same, and "
        "every step streams the host tier"
    )


def not_installed(extra: str, modules: Sequence[str]) -> SpecacheError:
    return SpecacheError(f"{', '.join(modules)}: not installed; pip install 'specache-compile[{extra}]'")


def cannot_listen(host: str, port: int, error: OSError) -> SpecacheError:
    return SpecacheError(f"cannot listen at --host {host} --port {port} ({error.strerror}): give others")


def folder_is_served(folder: Path) -> SpecacheError:
    return SpecacheError(f"another server keeps its sessions in {folder}: give this one a folder of its own")


def no_session_folder(folder: Path, error: OSError) -> SpecacheError:
    return SpecacheError(
        f"--session-folder {folder}: sessions cannot be kept there ({error.strerror}): give a folder that can be "
        "written to"
    )


def not_kept(error: Exception) -> str:
    return f"a session is not kept, and its conversation's next turn is read from its beginning: {error}"


def not_looked_up(reason: str) -> str:
    return f"option lookup: nothing is drafted in this generation: {reason}. It says one token a step"


RECOMPILE_LIMIT = (
    "Dynamo's recompile limit was reached (raise torch._dynamo.config.recompile_limit, or recompile_limit= of "
    "torch.compile where it has it; TORCH_LOGS=recompiles shows the cause)"
)


def went_uncompiled(size: int, tokens: int, batch: int) -> str:
    return (
        f"no compiled graph ran this call, so the cache became plain keys and values, {size / 2**20:,.2f} MiB on the "
        f"device for {tokens:,} tokens x batch {batch}: no pair is lost, and none compressed any more. Either "
        f"{RECOMPILE_LIMIT}, or the cache went to an uncompiled model"
    )


def went_exact(why: str, size: int, tokens: int, batch: int) -> str:
    return (
        f"a graph that uses this cache could not be rewritten ({why}), so the cache became plain keys and values, "
        f"{size / 2**20:,.2f} MiB on the device for {tokens:,} tokens x batch {batch}: no pair is lost, and none "
        "compressed any more"
    )


def one_lane(reason: str) -> str:
    return (
        f"this model's decode runs one token at a time, without the speculative one beside it: {reason}. Its cache is "
        "held and compressed all the same; pairs are fetched for the token before. speculate=False asks for that"
    )


def stale_cache() -> HeldTensorError:
    return HeldTensorError(
        "this cache has gone on since these keys and values were taken from it, and its tiers changed in place. "
        "To continue one prefix in two ways, copy.deepcopy(past_key_values) before the first continuation."
    )


def copy_failed(error: BaseException) -> SpecacheError:
    return SpecacheError(
        f"a copy between the host tier and the device failed ({error!r}); this cache can no longer be trusted. "
        "See to the cause (host memory, most often) and generate again with a new cache."
    )


def mixed_caches() -> SpecacheError:
    return SpecacheError(
        "the keys and values in this cache come from different caches, or from different moments of one; edit a cache "
        "only through its own methods (crop, reorder_cache, batch_repeat_interleave, batch_select_indices)"
    )


def parts_differ(differences: str) -> SpecacheError:
    return SpecacheError(
        "a graph break parts this model's prompt and not its steps, and the parts of its cache were made with unlike "
        f"options ({differences}): give bits in place of memory, or mend the break (TORCH_LOGS=graph_breaks shows it)"
    )


def unmatched_held(left_alone: Sequence[Any]) -> SpecacheError:
    reasons = "; ".join(sorted({item.reason for item in left_alone})) or "no attention was found in this graph"
    return SpecacheError(
        f"this cache is held by the specache backend, but the graph that now uses it could not be rewritten: "
        f"{reasons}. Go on the way the cache was filled, or give a plain copy: "
        "specache_compile.materialize(past_key_values)."
    )


def evicted(method: str) -> SpecacheError:
    return SpecacheError(
        f"method {method!r} keeps only the pairs that its policy chose, each head its own: there are no keys and "
        "values of all tokens to copy, or to go on with uncompiled. Use a method that keeps them: specache, kivi, "
        f"kcache, offload or full. In the middle of a generation, {RECOMPILE_LIMIT}."
    )


def no_host_tier(what: str) -> SpecacheError:
    """`what` needs pairs in 16 bits that a cache without a host tier has not."""
    return SpecacheError(
        f"option host_tier=False: {what} needs pairs in host memory, and this cache keeps none there. A prompt is read "
        "in one call, and behind it one token at a time; host_tier=True, the default, keeps what the rest needs."
    )


def evicted_half_way(method: str) -> SpecacheError:
    return SpecacheError(
        f"a step of this cache was interrupted or failed, and method {method!r} had begun to drop pairs for it: what "
        "is kept is no longer what it would keep. Generate again with a new cache, or copy.deepcopy it before a step "
        "that may fail."
    )


def too_little_memory(needed: int, allowed: int, tokens: int, batch: int) -> OptionError:
    return OptionError(
        f"option memory: {tokens:,} tokens x batch {batch} need {needed / 2**20:,.1f} MiB on the device at 1 bit, "
        f"and may have {allowed / 2**20:,.1f} MiB. Give more, or lower top_k, the batch or the context."
    )


def no_host_memory(needed: int, allowed: int, tokens: int, batch: int, asked: int | None, ranks: int) -> SpecacheError:
    limit = "half of what is free" if asked is None else "option host_memory"
    if ranks > 1:
        limit += f", shared by the {ranks} ranks of this machine"
    return SpecacheError(
        f"the host tier would need {needed / 2**30:.2f} GiB for {tokens:,} tokens x batch {batch}, and may have "
        f"{allowed / 2**30:.2f} GiB ({limit}). Nothing was lost: the cache holds what it held. Lower the batch or the "
        "context, free memory, or set host_memory (bytes) higher."
    )

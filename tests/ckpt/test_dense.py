"""Folders of dense models against the transformers library, and what is no such folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckpt.dense.source import open_dense
from ckpt.store.safetensors import INDEX, SINGLE, Folder
from core.config.architecture import GQA, Dense, RMSNorm, Rope
from core.errors import CheckpointError, RequestError
from core.state.box import Box, whole
from tests.ckpt.dense_models import FFN, KINDS, LAYERS, dense_model, logits_from, logits_of

QUERY = "model.layers.1.attention.query.weight"


def change_config(folder: Path, **fields: Any) -> None:
    """Other fields in a config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Other tensors in a folder of one file."""
    found = load_file(folder / SINGLE)
    change(found)
    save_file(found, folder / SINGLE, metadata={"format": "pt"})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    dense_model("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_dense_model_gives_the_logits_of_transformers(kind: str, tied: bool, tmp_path: Path) -> None:
    model = dense_model(kind, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    source = open_dense(tmp_path)
    assert ("model.head.weight" in source.forms) == (not tied)
    torch.testing.assert_close(logits_from(source), logits_of(model), atol=1e-5, rtol=0)


def test_the_config_says_what_the_model_is(llama: Path) -> None:
    described = open_dense(llama).describe()
    model, attention = described.model, GQA(heads=6, kv_heads=3, head_dim=4)
    assert (model.vocab, model.hidden, model.max_tokens, model.tied_embeddings) == (61, 36, 64, False)
    assert (model.norm, model.rope) == (RMSNorm(eps=1e-5), Rope(theta=1e4))
    assert [(layer.attention, layer.mlp) for layer in model.layers] == [(attention, Dense(ffn=FFN))] * LAYERS
    assert described.family is None
    assert described.published is not None and described.published["eos_token_id"] == 5


def test_a_folder_of_two_files_with_an_index_is_read(tmp_path: Path) -> None:
    model = dense_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / INDEX).is_file() and len(list(tmp_path.glob("*.safetensors"))) == 2
    torch.testing.assert_close(logits_from(open_dense(tmp_path)), logits_of(model), atol=1e-5, rtol=0)


def test_only_the_box_that_is_asked_for_is_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, asked = Folder.read, []

    def noting(self: Folder, name: str, box: Box | None = None) -> Tensor:
        asked.append((name, box))
        return read(self, name, box)

    monkeypatch.setattr(Folder, "read", noting)
    found = open_dense(llama).read("model.layers.3.mlp.gate_up", Box(offset=(1, 5, 2), shape=(1, 7, 30)))
    up = "model.layers.3.mlp.up_proj.weight"
    assert torch.equal(found, load_file(llama / SINGLE)[up][None, 5:12, 2:32])
    assert asked == [(up, Box(offset=(5, 2), shape=(7, 30)))]


def test_stored_types_are_kept_and_mixed_ones_widened(llama: Path) -> None:
    def mix(found: dict[str, Tensor]) -> None:
        found["model.layers.0.mlp.up_proj.weight"] = found["model.layers.0.mlp.up_proj.weight"].to(torch.bfloat16)
        found["model.layers.1.self_attn.q_proj.weight"] = found["model.layers.1.self_attn.q_proj.weight"].half()

    change_tensors(llama, mix)
    source, held = open_dense(llama), load_file(llama / SINGLE)
    assert source.forms["model.layers.0.mlp.gate_up"].dtype == "float32"
    assert source.forms[QUERY].dtype == "float16"
    pair = source.read("model.layers.0.mlp.gate_up", whole((2, FFN, 36)))
    assert torch.equal(pair[1], held["model.layers.0.mlp.up_proj.weight"].float())
    assert source.read(QUERY, whole((24, 36))).dtype == torch.float16


def test_a_box_without_elements_is_an_empty_tensor(llama: Path) -> None:
    empty = open_dense(llama).read(QUERY, Box(offset=(3, 0), shape=(0, 36)))
    assert empty.shape == (0, 36) and empty.dtype == torch.float32


def test_other_files_of_the_folder_come_along_without_weights(llama: Path) -> None:
    (llama / "tokenizer.json").write_text("{}")
    (llama / "pytorch_model.bin").write_text("weights")
    assets = open_dense(llama).describe().assets
    assert assets["tokenizer.json"] == b"{}"
    assert not {"pytorch_model.bin", "config.json", SINGLE} & set(assets)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "mixtral"}, 'model_type="mixtral": is not a dense model that the zoo reads. Works: llama'),
        ({"model_type": "helium"}, 'model_type="helium": is not a dense model'),
        ({"model_type": "qwen2"}, 'model_type="qwen2": adds biases to queries, keys and values'),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"hidden_act": "gelu"}, 'hidden_act="gelu"'),
        ({"residual_multiplier": 0.5}, "residual_multiplier=0.5: is not a field that this family knows"),
        ({"sliding_window": 32}, "sliding_window=32"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 'rope_parameters="llama3"'),
        ({"num_attention_heads": 5}, "declares no possible model"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused(llama: Path, fields: dict[str, Any], said: str) -> None:
    change_config(llama, **fields)
    with pytest.raises(RequestError, match=re.escape(said)) as error:
        open_dense(llama)
    assert str(llama) in str(error.value)


def test_a_window_that_is_switched_off_hides_nothing(tmp_path: Path) -> None:
    dense_model("qwen3").save_pretrained(tmp_path)
    change_config(tmp_path, sliding_window=8, use_sliding_window=False, max_window_layers=2, layer_types=None)
    open_dense(tmp_path)
    change_config(tmp_path, use_sliding_window=True)
    with pytest.raises(RequestError, match="sliding_window=8"):
        open_dense(tmp_path)


def test_every_wrong_tensor_is_named_at_once(llama: Path) -> None:
    def spoil(found: dict[str, Tensor]) -> None:
        found["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(24)
        del found["model.layers.2.mlp.up_proj.weight"]
        found["model.norm.weight"] = torch.ones(37)

    change_tensors(llama, spoil)
    with pytest.raises(CheckpointError) as error:
        open_dense(llama)
    said = str(error.value)
    assert "1 missing: model.layers.2.mlp.up_proj.weight" in said
    assert "1 unexpected: model.layers.0.self_attn.q_proj.bias" in said
    assert "1 of another shape: model.norm.weight [37] instead of [36]" in said


def test_a_value_that_is_no_number_is_found_when_it_is_read(llama: Path) -> None:
    def spoil(found: dict[str, Tensor]) -> None:
        found["model.layers.1.self_attn.q_proj.weight"][3, 2] = float("nan")

    change_tensors(llama, spoil)
    source = open_dense(llama)
    source.read(QUERY, Box(offset=(4, 0), shape=(2, 36)))
    with pytest.raises(CheckpointError, match=r"layers\.1\.attention\.query\.weight has values that are not numbers"):
        source.read(QUERY, whole((24, 36)))


def test_a_tied_head_that_differs_is_refused_when_it_is_read(tmp_path: Path) -> None:
    dense_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)

    def spoil(found: dict[str, Tensor]) -> None:
        head = found["model.embed_tokens.weight"].clone()
        head[60, 35] += 1
        found["lm_head.weight"] = head

    change_tensors(tmp_path, spoil)
    source = open_dense(tmp_path)
    source.read("model.embedding.weight", Box(offset=(0, 0), shape=(60, 36)))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight should be a copy"):
        source.read("model.embedding.weight", whole((61, 36)))


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="neither a model folder"):
        open_dense(tmp_path / "nothing")
    with pytest.raises(RequestError, match=r"holds no config\.json; give a folder"):
        open_dense(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(RequestError, match=r"GGUF files: model\.gguf"):
        open_dense(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(RequestError, match="holds a list"):
        open_dense(tmp_path)

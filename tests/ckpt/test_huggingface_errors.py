"""Folders that are not what they should be, and requests that cannot be: one message that names everything."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt.huggingface
from ckpt.huggingface import load_pretrained, save_pretrained
from ckpt.store.safetensors import INDEX, SINGLE
from core.config.architecture import GQA, Dense, Layer
from core.config.family import find_family
from core.config.mapping import ParallelConfig
from core.errors import CheckpointError, RequestError
from core.transformer.stage import build_model
from tests.ckpt.test_huggingface import settings_of
from tests.models import oracle


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good Mixtral folder of one file."""
    oracle.save("mixtral", settings_of("mixtral"), tmp_path / "source")
    return tmp_path / "source"


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, *, without: tuple[str, ...] = (), **new: torch.Tensor) -> None:
    found = {name: t for name, t in load_file(folder / SINGLE).items() if name not in without}
    save_file(found | {name.replace("__", "."): t for name, t in new.items()}, folder / SINGLE)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="nowhere is not a folder"):
        load_pretrained(tmp_path / "nowhere")


def test_a_folder_without_a_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(RequestError, match=r"source holds no config\.json"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("content", "says"), [(b"{", "cannot be read as JSON"), (b"\xff", "cannot be read"), (b"[]", "holds a list")]
)
def test_a_config_that_is_no_object_is_refused(folder: Path, content: bytes, says: str) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(RequestError, match=says):
        load_pretrained(folder)


@pytest.mark.parametrize("model_type", ["llama", None, 3, "qwen3"])
def test_another_model_type_is_refused_with_those_that_work(folder: Path, model_type: object) -> None:
    change_config(folder, model_type=model_type)
    with pytest.raises(RequestError, match="Works: deepseek_v3, mixtral, qwen3_moe"):
        load_pretrained(folder)


def test_every_field_that_cannot_be_had_is_listed_with_the_folder(folder: Path) -> None:
    change_config(folder, hidden_act="gelu", mystery=3, sliding_window=8)
    with pytest.raises(RequestError) as raised:
        load_pretrained(folder)
    for part in (str(folder), "hidden_act=", "mystery=", "sliding_window="):
        assert part in str(raised.value)


def test_sizes_that_make_no_model_are_refused(folder: Path) -> None:
    change_config(folder, num_key_value_heads=3, num_experts_per_tok=13)
    with pytest.raises(RequestError, match=r"(?s)kv_heads=3.*top_k=13"):
        load_pretrained(folder)


def test_missing_foreign_and_misshapen_tensors_are_named_before_any_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expert = "model.layers.1.block_sparse_moe.experts.10.w2.weight"
    change_tensors(folder, without=(expert,), foreign__weight=torch.zeros(3), model__norm__weight=torch.ones(3))
    monkeypatch.setattr(ckpt.huggingface, "import_state", None)
    with pytest.raises(CheckpointError) as raised:
        load_pretrained(folder)
    assert f"1 missing: {expert}" in str(raised.value)
    assert "1 unexpected: foreign.weight" in str(raised.value)
    assert "1 of another shape: model.norm.weight [3] instead of [16]" in str(raised.value)


def test_a_shard_of_the_index_that_is_missing_is_named(folder: Path) -> None:
    placed = dict.fromkeys(load_file(folder / SINGLE), SINGLE) | {"lm_head.weight": "model-00002-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        load_pretrained(folder)


@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_a_file_that_is_cut_short_is_named(folder: Path, kept: int) -> None:
    whole = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(whole[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or cut short"):
        load_pretrained(folder)


def test_weights_that_are_not_numbers_are_named(folder: Path) -> None:
    change_tensors(folder, model__norm__weight=torch.full((16,), float("nan")))
    with pytest.raises(CheckpointError, match=r"final_norm\.weight has values that are not numbers"):
        load_pretrained(folder)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, "float32"])
def test_a_dtype_that_no_model_has_is_refused(folder: Path, dtype: Any) -> None:
    with pytest.raises(RequestError, match=r"Works: torch\.float32, torch\.bfloat16"):
        load_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        (ParallelConfig(ep=5), r"parallel\.ep=5: must divide model\.moe\.experts=12"),
        (ParallelConfig(tp=2), r"--ranks=1: must be a multiple of parallel\.tp\*cp\*pp=2"),
    ],
)
def test_a_mapping_that_does_not_fit_is_refused(folder: Path, parallel: ParallelConfig, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        load_pretrained(folder, parallel=parallel)


def test_a_model_that_no_family_can_express_is_refused(tmp_path: Path) -> None:
    tiny = find_family("mixtral").size("tiny").model
    dense = Layer(attention=GQA(heads=2, kv_heads=1, head_dim=4), mlp=Dense(ffn=8))
    model = build_model(replace(tiny, layers=(dense,), vocab=300))
    with pytest.raises(RequestError, match="0 families of the zoo can express this model"):
        save_pretrained(model, tmp_path / "target")
    with pytest.raises(RequestError, match="cannot be written as a Mixtral folder"):
        save_pretrained(model, tmp_path / "target", family="mixtral")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_what_was_there_and_nothing_half_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = load_pretrained(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ckpt.store.tensorfile.TensorWriter.write", full)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be written.*No space left on device"):
        save_pretrained(ours, folder, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["source"]

"""From a published folder through every format of ours and another mapping back to a published folder: the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ckpt.cli import cli
from ckpt.files.local import LocalFiles
from ckpt.manifest import read_manifest
from ckpt.store.safetensors import SINGLE
from tests.ckpt.test_huggingface import files, rewrite, settings_of, tensors
from tests.models import oracle

# The mapping to which each model is resharded on its way: all axes that its sizes allow.
MAPPINGS = {
    "mixtral": ("tp=2", "pp=2", "ep=2", "etp=2"),
    "qwen3": ("tp=2", "cp=2", "pp=2", "ep=1"),
    "deepseek_v3": ("tp=2", "pp=2", "ep=4"),
}
KINDS: dict[str, dict[str, Any]] = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "vocabulary that nothing divides": {"vocab_size": 131},
}


def run(*arguments: str | Path) -> None:
    """A `ckpt` command, in this process, which must succeed."""
    cli.main(args=[*map(str, arguments), "--workers", "1"], standalone_mode=False)


def there_and_back(family: str, source: Path, place: Path, *last: str) -> Path:
    """The published folder at the end of the way: Zarr, other pieces, torch's format, and published again."""
    run("convert", source, place / "zarr", "--to", "zarr")
    settings = [part for axis in MAPPINGS[family] for part in ("--set", f"parallel.{axis}")]
    run("reshard", place / "zarr", place / "pieces", *settings, "--codec", "zstd")
    run("convert", place / "pieces", place / "torch", "--to", "torch_dist")
    run("export", place / "torch", place / "back", *last) if last else run(
        "convert", place / "torch", place / "back", "--to", "hf"
    )
    kinds = [read_manifest(LocalFiles(place / name)) for name in ("zarr", "pieces", "torch")]
    assert [(m.store, m.codec) for m in kinds] == [("zarr", "raw"), ("zarr", "zstd"), ("torch_dist", "raw")]
    ranks = {piece.rank for entry in kinds[1].entries for piece in entry.pieces}
    assert len(ranks) > 1  # the pieces are those of several ranks
    return place / "back"


@pytest.mark.parametrize("family", MAPPINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_published_folder_comes_back_byte_for_byte(family: str, kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    oracle.save(family, settings_of(family, **KINDS[kind]), source)
    (source / "tokenizer.json").write_text('{"any": "tokenizer"}')
    assert files(there_and_back(family, source, tmp_path)) == files(source)


@pytest.mark.parametrize("family", MAPPINGS)
def test_bfloat16_in_several_files_comes_back_byte_for_byte(family: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = oracle.transformers_model(family, settings_of(family)).to(torch.bfloat16)
    model.save_pretrained(source, max_shard_size="8KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    back = tensors(there_and_back(family, source, tmp_path))
    expected = tensors(source)
    assert back.keys() == expected.keys()
    for name, tensor in expected.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name


def in_float8(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of the layers in float8 with a scale per block of 128 x 128, as DeepSeek publishes its model (by numbers of our own)."""
    found = {}
    generator = torch.Generator().manual_seed(5)
    for name, tensor in weights.items():
        linear = name.endswith("_proj.weight") or "_a_proj" in name or "_b_proj" in name
        if not linear or tensor.dim() != 2:
            found[name] = tensor.to(torch.bfloat16) if "e_score" not in name else tensor
            continue
        blocks = [-(-size // 128) for size in tensor.shape]
        scales = torch.rand(blocks, generator=generator) * 1e-3 + 1e-4
        spread = scales.repeat_interleave(128, 0)[: tensor.shape[0]].repeat_interleave(128, 1)[:, : tensor.shape[1]]
        # Every block reaches the largest number, as a quantiser makes it.
        quantised = (tensor / tensor.abs().max() * 448.0).to(torch.float8_e4m3fn)
        for row in range(0, tensor.shape[0], 128):
            for column in range(0, tensor.shape[1], 128):
                quantised[row, column] = torch.tensor(448.0).to(torch.float8_e4m3fn)
        assert spread.shape == quantised.shape
        found[name], found[f"{name}_scale_inv"] = quantised, scales
    return found


def test_float8_blocks_come_back_byte_for_byte(tmp_path: Path) -> None:
    source = tmp_path / "source"
    wide = {"hidden_size": 160, "intermediate_size": 136, "moe_intermediate_size": 72, "vocab_size": 41}
    oracle.save("deepseek_v3", settings_of("deepseek_v3", **wide), source)
    quantisation = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    rewrite(source, in_float8(tensors(source)), quantization_config=quantisation)
    expected = tensors(source)
    assert sum(name.endswith("_scale_inv") for name in expected) > 20
    back = there_and_back("deepseek_v3", source, tmp_path, "--dtype", "float8_blocks")
    found = tensors(back)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert json.loads((back / "config.json").read_text())["quantization_config"] == quantisation
    assert SINGLE in {path.name for path in source.iterdir()}

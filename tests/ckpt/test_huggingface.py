"""Hugging Face folders read and written: the same bytes back, both formats of experts, dtypes, prediction modules."""

from __future__ import annotations

import json
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckpt.huggingface import load_pretrained, save_pretrained
from ckpt.store.safetensors import INDEX, SINGLE
from core.config.family import find_family
from core.errors import CheckpointError, RequestError
from core.parallel.groups import one_rank
from core.state.inventory import initialise, inventory
from core.transformer.stage import Stage, build_model
from tests.models import oracle

TINY = {
    "mixtral": {"num_local_experts": 12, "num_key_value_heads": 2, "num_attention_heads": 4},
    "qwen3": {
        "num_experts": 11,
        "num_key_value_heads": 2,
        "num_attention_heads": 4,
        "head_dim": 6,
        "moe_intermediate_size": 7,
    },
    "deepseek_v3": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_routed_experts": 12,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 7,
        "q_lora_rank": 6,
        "kv_lora_rank": 5,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 3,
        "num_nextn_predict_layers": 0,
    },
}
COMMON = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 9,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
TOKENS = torch.arange(23) * 5 % 37


def settings_of(family: str, **more: Any) -> dict[str, Any]:
    return COMMON | TINY[family] | more


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tensors(folder: Path) -> dict[str, Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two folders hold the same bytes under the same names."""
    kinds = {name: (t.dtype, t.shape) for name, t in left.items()} == {
        name: (t.dtype, t.shape) for name, t in right.items()
    }
    return kinds and all(torch.equal(t.view(torch.uint8), right[name].view(torch.uint8)) for name, t in left.items())


def rewrite(folder: Path, found: dict[str, Tensor], **config: Any) -> None:
    """Other tensors and other fields in a folder of one file."""
    save_file(found, folder / SINGLE, metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_loading_then_saving_gives_every_byte_of_a_transformers_folder_back(family: str) -> None:
    @settings(max_examples=6, database=None)
    @given(config=oracle.settings_of(family))
    def compare(config: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "source", Path(folder) / "target"
            oracle.save(family, config, source)
            save_pretrained(load_pretrained(source), target)
            assert files(source) == files(target)

    compare()


@pytest.mark.parametrize("family", oracle.FAMILIES)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_narrow_weights_come_back_as_they_were_stored(family: str, stored: torch.dtype, tmp_path: Path) -> None:
    model = oracle.transformers_model(family, settings_of(family)).to(stored)
    model.save_pretrained(tmp_path / "source", max_shard_size="4KB")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    assert (tmp_path / "source" / INDEX).is_file()
    ours = load_pretrained(tmp_path / "source")
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    save_pretrained(ours, tmp_path / "target")
    assert files(tmp_path / "source") == files(tmp_path / "target")


@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_transformers_reads_what_is_saved_without_a_folder_to_follow(family: str, tmp_path: Path) -> None:
    theirs = oracle.save(family, settings_of(family), tmp_path / "source")
    ours = load_pretrained(tmp_path / "source")
    ours.origin = None
    save_pretrained(ours, tmp_path / "target", shard_bytes=20_000)
    assert (tmp_path / "target" / INDEX).is_file()
    again = type(theirs).from_pretrained(tmp_path / "target", experts_implementation="eager")
    assert same(tensors(tmp_path / "source"), tensors(tmp_path / "target"))
    assert torch.equal(again(TOKENS[None]).logits, theirs(TOKENS[None]).logits)


@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_fused_experts_load_as_the_same_model_and_are_saved_as_published(family: str, tmp_path: Path) -> None:
    theirs = oracle.save(family, settings_of(family), tmp_path / "hub")
    oracle.save(family, settings_of(family), tmp_path / "fused")
    (tmp_path / "fused" / SINGLE).unlink()
    rewrite(tmp_path / "fused", {name: t.contiguous() for name, t in theirs.state_dict().items()})
    assert any(name.endswith("experts.gate_up_proj") for name in tensors(tmp_path / "fused"))
    hub, fused = load_pretrained(tmp_path / "hub"), load_pretrained(tmp_path / "fused")
    assert same(dict(hub.state_dict()), dict(fused.state_dict()))
    save_pretrained(fused, tmp_path / "target")
    assert same(tensors(tmp_path / "hub"), tensors(tmp_path / "target"))


def test_the_expert_bias_stays_float32_whatever_the_dtype(tmp_path: Path) -> None:
    theirs = oracle.transformers_model("deepseek_v3", settings_of("deepseek_v3", n_routed_experts=64))
    bias = 7 + 0.001 * torch.arange(64)
    theirs.model.layers[1].mlp.gate.e_score_correction_bias.copy_(bias)
    theirs.save_pretrained(tmp_path / "source")
    ours = load_pretrained(tmp_path / "source", dtype=torch.bfloat16)
    assert torch.equal(ours.get_buffer("layers.1.mlp.router.bias"), bias)
    for folder, how in (("as_is", {}), ("narrow", {"dtype": torch.bfloat16})):
        save_pretrained(ours, tmp_path / folder, **how)
        saved = tensors(tmp_path / folder)
        assert torch.equal(saved.pop("model.layers.1.mlp.gate.e_score_correction_bias"), bias)
        assert {t.dtype for t in saved.values()} == {torch.bfloat16}
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_model_in_a_narrower_dtype_than_its_folder_is_saved_as_it_is(tmp_path: Path) -> None:
    oracle.save("qwen3", settings_of("qwen3"), tmp_path / "source")
    save_pretrained(load_pretrained(tmp_path / "source", dtype=torch.bfloat16), tmp_path / "target")
    source, target = tensors(tmp_path / "source"), tensors(tmp_path / "target")
    assert same({name: t.bfloat16() for name, t in source.items()}, target)


def quantise(folder: Path) -> dict[str, Tensor]:
    """Give the folder's projections float8 blocks, as DeepSeek-V3 ships them; the values that they then stand for."""
    found, truth = tensors(folder), {}
    for name, tensor in list(found.items()):
        truth[name] = tensor
        if name.endswith("_proj.weight"):
            scale = torch.full(tuple(-(-s // 128) for s in tensor.shape), 0.37)
            found[name] = (tensor / 0.37).to(torch.float8_e4m3fn)
            found[f"{name}_scale_inv"] = scale
            truth[name] = found[name].float() * 0.37
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    rewrite(folder, found, quantization_config=quantization)
    return truth


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_float8_weights_load_and_are_saved_as_bfloat16(family: str, tmp_path: Path) -> None:
    oracle.save(family, settings_of(family, hidden_size=136), tmp_path / "source")
    truth = quantise(tmp_path / "source")
    ours = load_pretrained(tmp_path / "source")
    save_pretrained(ours, tmp_path / "target", dtype=torch.float32)
    assert same(truth, tensors(tmp_path / "target"))
    assert "quantization_config" not in json.loads((tmp_path / "target" / "config.json").read_text())
    save_pretrained(ours, tmp_path / "narrow")
    saved = tensors(tmp_path / "narrow")
    narrow = {n: t.bfloat16() if n.endswith("_proj.weight") else t for n, t in truth.items()}
    assert same(narrow, saved)


def predicting(tmp_path: Path, depth: int = 2) -> tuple[Path, Stage]:
    """A DeepSeek-V3 folder with prediction modules and all their copies, made from one of our models."""
    family = find_family("deepseek_v3")
    config = oracle.config_of("deepseek_v3", settings_of("deepseek_v3", num_nextn_predict_layers=depth)).to_dict()
    model = build_model(family.huggingface.read_config(config))
    initialise(model, seed=3)
    for name, buffer in model.named_buffers():
        buffer.copy_(7 + 0.001 * torch.arange(len(buffer)) + len(name))
    save_pretrained(model, tmp_path / "source")
    found = tensors(tmp_path / "source")
    for d in range(depth):
        found[f"model.layers.{2 + d}.embed_tokens.weight"] = found["model.embed_tokens.weight"].clone()
        found[f"model.layers.{2 + d}.shared_head.head.weight"] = found["lm_head.weight"].clone()
    rewrite(tmp_path / "source", found)
    return tmp_path / "source", model


def test_prediction_modules_and_their_copies_come_back(tmp_path: Path) -> None:
    source, model = predicting(tmp_path)
    ours = load_pretrained(source)
    assert same(dict(model.state_dict()), dict(ours.state_dict()))
    assert ours.config.predict_ahead is not None and ours.config.predict_ahead.depth == 2
    save_pretrained(ours, tmp_path / "target")
    assert files(source) == files(tmp_path / "target")
    names = set(tensors(tmp_path / "target"))
    for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "embed_tokens", "shared_head.head"):
        assert f"model.layers.3.{name}.weight" in names


def test_prediction_modules_that_are_dropped_are_gone_and_nothing_else(tmp_path: Path) -> None:
    source, _ = predicting(tmp_path)
    save_pretrained(load_pretrained(source, mtp="drop"), tmp_path / "target")
    source_tensors = {
        n: t for n, t in tensors(source).items() if not n.startswith(("model.layers.2.", "model.layers.3."))
    }
    assert same(source_tensors, tensors(tmp_path / "target"))
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "target"))
    assert after == before | {"num_nextn_predict_layers": 0}


def test_prediction_modules_that_the_folder_has_not_are_left_out_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # transformers counts one prediction layer in config.json by default, but has no weights for it.
    config = {name: v for name, v in settings_of("deepseek_v3").items() if name != "num_nextn_predict_layers"}
    oracle.save("deepseek_v3", config, tmp_path / "source")
    assert json.loads((tmp_path / "source" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    with caplog.at_level(logging.WARNING):
        ours = load_pretrained(tmp_path / "source")
    assert "holds no multi-token prediction modules" in caplog.text
    assert ours.config.predict_ahead is None
    save_pretrained(ours, tmp_path / "target")
    assert files(tmp_path / "source") == files(tmp_path / "target")
    with pytest.raises(CheckpointError, match=r'model\.layers\.2\..*\n.*mtp="drop"'):
        load_pretrained(tmp_path / "source", mtp="keep")


def test_half_of_a_prediction_module_is_an_error(tmp_path: Path) -> None:
    source, _ = predicting(tmp_path)
    found = tensors(source)
    del found["model.layers.3.eh_proj.weight"]
    rewrite(source, found)
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.3\.eh_proj\.weight"):
        load_pretrained(source)
    assert load_pretrained(source, mtp="drop").config.predict_ahead is None


def test_a_tied_head_is_read_once_and_its_copy_is_kept(tmp_path: Path) -> None:
    oracle.save("qwen3", settings_of("qwen3", tie_word_embeddings=True), tmp_path / "source")
    found = tensors(tmp_path / "source")
    assert "lm_head.weight" not in found
    found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()
    rewrite(tmp_path / "source", found)
    ours = load_pretrained(tmp_path / "source")
    assert ours.head is None
    save_pretrained(ours, tmp_path / "target")
    assert files(tmp_path / "source") == files(tmp_path / "target")
    found["lm_head.weight"][3, 3] += 1
    rewrite(tmp_path / "source", found)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight should be a copy"):
        load_pretrained(tmp_path / "source")


def test_old_rotary_frequencies_are_left_alone(tmp_path: Path) -> None:
    oracle.save("mixtral", settings_of("mixtral"), tmp_path / "source")
    found = tensors(tmp_path / "source")
    rewrite(tmp_path / "source", found | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    save_pretrained(load_pretrained(tmp_path / "source"), tmp_path / "target")
    assert same(found, tensors(tmp_path / "target"))


def test_a_trained_model_is_saved_with_its_new_weights(tmp_path: Path) -> None:
    oracle.save("mixtral", settings_of("mixtral"), tmp_path / "source")
    ours = load_pretrained(tmp_path / "source")
    with torch.no_grad():
        ours.get_parameter("layers.1.mlp.experts.down")[11] += 1.0
    save_pretrained(ours, tmp_path / "target")
    source, target = tensors(tmp_path / "source"), tensors(tmp_path / "target")
    changed = "model.layers.1.block_sparse_moe.experts.11.w2.weight"
    assert torch.equal(target.pop(changed), source.pop(changed) + 1.0)
    assert same(source, target)


@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_a_new_model_of_a_tiny_size_survives_a_folder_bit_by_bit(family: str, tmp_path: Path) -> None:
    model = build_model(replace(find_family(family).size("tiny").model, vocab=300))
    initialise(model, seed=1)
    save_pretrained(model, tmp_path / "model")
    again = load_pretrained(tmp_path / "model")
    assert again.config == model.config
    assert same(dict(model.state_dict()), dict(again.state_dict()))
    assert not any(t.data.isnan().any() for t in inventory(again, one_rank()).values())


def test_a_folder_in_use_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    oracle.save("mixtral", settings_of("mixtral"), tmp_path / "source")
    ours = load_pretrained(tmp_path / "source")
    before = files(tmp_path / "source")
    with pytest.raises(RequestError, match="is not empty"):
        save_pretrained(ours, tmp_path / "source")
    assert files(tmp_path / "source") == before
    (tmp_path / "empty").mkdir()
    save_pretrained(ours, tmp_path / "empty")
    save_pretrained(ours, tmp_path / "empty", overwrite=True)
    assert files(tmp_path / "empty") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "source"]

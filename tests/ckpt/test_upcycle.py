"""Dense models that became mixtures of experts: their logits against the transformers library, their weights against closed forms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from ckpt.dense.source import DenseSource, open_dense
from ckpt.huggingface import save_pretrained
from ckpt.source import Described, Form, Source
from ckpt.upcycle import Upcycled, summary, upcycled_source
from ckpt.upcycle_options import (
    SharedFromDense,
    UpcycleOptions,
    layers_named,
    upcycle_options_faults,
    upcycled_model,
)
from core.attention.packing import packing_of
from core.config.architecture import AuxLoss, Dense, ExpertBias, MoE, SharedExperts, SquaredReLU
from core.config.mapping import ParallelConfig
from core.errors import ConfigError
from core.moe.router import RouterInputs
from core.state.box import Box, whole
from core.state.seed import normal
from core.transformer.fake import FakeStages
from tests.ckpt.dense_models import FFN, LAYERS, built, dense_model, logits_from, logits_of, tokens

STYLES = ("mixtral", "qwen3", "deepseek_v3")
OPTIONS = UpcycleOptions(style="mixtral", experts=12, top_k=4, granularity=2, router_std=0.3, seed=11)
HIDDEN = 36
GATE_UP, DOWN = "model.layers.2.mlp.experts.gate_up", "model.layers.2.mlp.experts.down"
ROUTER = "model.layers.2.mlp.router.weight"


class Recording:
    """A source that notes what is read from it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.reads: list[tuple[str, Box]] = []

    @property
    def forms(self) -> Mapping[str, Form]:
        return self.source.forms

    def read(self, name: str, box: Box) -> Tensor:
        self.reads.append((name, box))
        return self.source.read(name, box)

    def describe(self) -> Described | None:
        return self.source.describe()


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    dense_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(llama_folder: Path) -> DenseSource:
    return open_dense(llama_folder)


@pytest.fixture(scope="module")
def llama_logits() -> Tensor:
    return logits_of(dense_model("llama"))


def all_of(source: Source, name: str) -> Tensor:
    return source.read(name, whole(source.forms[name].shape))


def double(source: Source, name: str) -> np.ndarray:
    return all_of(source, name).to(torch.float64).numpy()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("granularity", [1, 2, 4])
def test_the_first_logits_are_those_of_the_dense_model(
    llama: DenseSource, llama_logits: Tensor, style: str, granularity: int
) -> None:
    upcycled = Upcycled(llama, replace(OPTIONS, style=style, granularity=granularity))
    torch.testing.assert_close(logits_from(upcycled), llama_logits, atol=1e-5, rtol=0)
    # To the last bits of float64, so that no wrong factor hides in a tolerance.
    exact, dense = (logits_from(source, torch.float64) for source in (upcycled, llama))
    torch.testing.assert_close(exact, dense, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("kind", "style"), [("mistral", "mixtral"), ("qwen3", "qwen3")])
@pytest.mark.parametrize("tied", [False, True])
def test_the_upcycled_model_of_a_family_gives_the_dense_logits_in_transformers_too(
    kind: str, style: str, tied: bool, tmp_path: Path
) -> None:
    dense = dense_model(kind, tie_word_embeddings=tied)
    dense.save_pretrained(tmp_path / "dense")
    upcycled = upcycled_source(tmp_path / "dense", replace(OPTIONS, style=style))
    assert upcycled.describe().family == style
    save_pretrained(built(upcycled), tmp_path / "moe", family=style)
    moe = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe", attn_implementation="eager")
    assert moe.config.model_type != kind
    torch.testing.assert_close(logits_of(moe), logits_of(dense), atol=1e-5, rtol=0)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("count", "share"), [(1, 0.5), (2, 0.25), (4, 0.7)])
def test_a_shared_expert_and_the_routed_ones_add_up_to_the_dense_model(
    llama: DenseSource, llama_logits: Tensor, style: str, count: int, share: float
) -> None:
    shared = SharedFromDense(count=count, share=share)
    upcycled = Upcycled(llama, replace(OPTIONS, style=style, granularity=4, shared=shared))
    assert all_of(upcycled, "model.layers.0.mlp.shared.down").shape == (HIDDEN, count * FFN // 4)
    torch.testing.assert_close(logits_from(upcycled), llama_logits, atol=1e-5, rtol=0)
    exact, dense = (logits_from(source, torch.float64) for source in (upcycled, llama))
    torch.testing.assert_close(exact, dense, atol=1e-5, rtol=0)


def test_dense_and_upcycled_layers_may_alternate(llama: DenseSource, llama_logits: Tensor) -> None:
    options = replace(OPTIONS, experts=4, top_k=2, layers=layers_named("every 2", LAYERS))
    recording = Recording(llama)
    upcycled = Upcycled(recording, options)
    assert [isinstance(layer.mlp, MoE) for layer in upcycled.describe().model.layers] == [False, True, False, True]
    torch.testing.assert_close(logits_from(upcycled), llama_logits, atol=1e-5, rtol=0)
    untouched = [name for name in llama.forms if ".mlp." not in name or re.search(r"layers\.[02]\.", name)]
    assert len(untouched) == LAYERS * 6 + 3 + 4
    for name in untouched:
        assert torch.equal(all_of(upcycled, name), all_of(llama, name))


def test_experts_are_copies_of_the_pieces_in_numeric_order(llama: DenseSource) -> None:
    upcycled = Upcycled(llama, replace(OPTIONS, experts=24, granularity=4, top_k=8))
    gate_up, down = double(llama, "model.layers.2.mlp.gate_up"), double(llama, "model.layers.2.mlp.down")
    experts, downs = double(upcycled, GATE_UP), double(upcycled, DOWN)
    width = FFN // 4
    assert experts.shape == (24, 2, width, HIDDEN) and downs.shape == (24, HIDDEN, width)
    for expert in range(24):
        piece = slice(expert % 4 * width, (expert % 4 + 1) * width)
        assert np.array_equal(experts[expert], gate_up[:, piece])
        assert np.array_equal(downs[expert], 4 * down[:, piece])


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        # softmax over the chosen: s = g
        (OPTIONS, 2.0),
        (replace(OPTIONS, granularity=4), 4.0),
        # softmax over all experts: s = r * g^2 / K
        (replace(OPTIONS, style="qwen3", normalise=False), 6 * 2**2 / 4),
        (replace(OPTIONS, style="qwen3", granularity=1, normalise=False), 12 / 4),
        # normalised, it is a softmax over the chosen
        (replace(OPTIONS, style="qwen3", granularity=4), 4.0),
        # sigmoid with a factor of its own, which takes all of it; not normalised, each weight starts at 1 / 2
        (replace(OPTIONS, style="deepseek_v3"), 1.0),
        (replace(OPTIONS, style="deepseek_v3", normalise=False), 1 / (4 / 2)),
    ],
)
def test_the_cube_root_of_the_factor_is_on_each_of_the_three_matrices(
    llama: DenseSource, options: UpcycleOptions, factor: float
) -> None:
    upcycled = Upcycled(llama, replace(options, scaling="cube_root"))
    width = FFN // options.granularity
    gate_up, down = double(llama, "model.layers.2.mlp.gate_up"), double(llama, "model.layers.2.mlp.down")
    root = np.cbrt(factor)
    for expert in (0, 1, 11):
        start = expert % options.granularity * width
        pieces = gate_up[:, start : start + width], down[:, start : start + width]
        np.testing.assert_allclose(double(upcycled, GATE_UP)[expert], root * pieces[0], rtol=1e-6)
        np.testing.assert_allclose(double(upcycled, DOWN)[expert], root * pieces[1], rtol=1e-6)


def test_the_cube_root_is_near_the_dense_model_and_not_equal(llama: DenseSource, llama_logits: Tensor) -> None:
    far = (logits_from(Upcycled(llama, replace(OPTIONS, scaling="cube_root"))) - llama_logits).abs().max()
    assert 1e-3 < far < 3.0


@pytest.mark.parametrize(
    "changes",
    [{"router_std": 0.0}, {"experts": 4, "granularity": 1}, {"experts": 4, "granularity": 2}],
    ids=["zero router", "all experts", "all pieces"],
)
def test_weights_of_all_experts_that_are_not_normalised_are_exact_where_their_sum_is_known(
    llama: DenseSource, llama_logits: Tensor, changes: dict[str, Any]
) -> None:
    options = replace(OPTIONS, style="qwen3", normalise=False, **changes)
    torch.testing.assert_close(logits_from(Upcycled(llama, options)), llama_logits, atol=1e-5, rtol=0)


def test_weights_of_all_experts_that_are_not_normalised_are_refused_as_exact(llama: DenseSource) -> None:
    with pytest.raises(ConfigError, match="--scaling=exact: cannot be: without normalising"):
        Upcycled(llama, replace(OPTIONS, style="qwen3", normalise=False))


@torch.no_grad()
def test_no_factor_would_be_exact_where_the_sum_of_the_weights_differs(
    llama: DenseSource, llama_logits: Tensor
) -> None:
    source = Upcycled(llama, replace(OPTIONS, style="qwen3", normalise=False, router_std=0.0))
    model = built(source)
    for name, parameter in model.named_parameters():
        if "router" in name:
            parameter.copy_(all_of(Upcycled(llama, OPTIONS), f"model.{name}"))
    assert (model(tokens()) - llama_logits).abs().max() > 1e-2


def test_rows_of_the_router_are_the_random_ones_of_each_copy_repeated(llama: DenseSource) -> None:
    router = all_of(Upcycled(llama, OPTIONS), ROUTER)
    rows = normal(11, "layers.2.mlp.router.weight", whole((6, HIDDEN)), std=0.3)
    assert torch.equal(router, torch.stack([rows[expert // 2] for expert in range(12)]))
    assert len(torch.unique(router, dim=0)) == 6
    default = all_of(Upcycled(llama, replace(OPTIONS, router_std=None)), ROUTER)
    torch.testing.assert_close(default, router * (0.02 / 0.3))


@pytest.mark.parametrize("style", STYLES)
def test_a_token_uses_whole_copies_ties_included(llama: DenseSource, style: str) -> None:
    model = built(Upcycled(llama, replace(OPTIONS, style=style, granularity=2, top_k=6)))
    router = next(block.mlp.router for block in model.layers.values())
    hidden = torch.randn(301, HIDDEN, generator=torch.Generator().manual_seed(3))
    hidden[7] = 0.0  # every expert has the same score
    packing = packing_of(None, 301, torch.device("cpu"), model.place.groups)
    routing = router(hidden, RouterInputs(packing=packing))
    chosen = routing.experts_TK.sort(dim=-1).values.view(301, 3, 2)
    assert bool((chosen[..., 0] % 2 == 0).all()) and torch.equal(chosen[..., 1], chosen[..., 0] + 1)
    assert routing.experts_TK[7].tolist() == [0, 1, 2, 3, 4, 5]
    assert len(torch.unique(routing.experts_TK)) == 12


@pytest.mark.parametrize("vpp", [1, 2])
def test_pieces_of_every_rank_are_those_of_the_whole_under_any_mapping(llama: DenseSource, vpp: int) -> None:
    before = {name: all_of(llama, name) for name in llama.forms}
    options = replace(OPTIONS, granularity=4, top_k=4, noise_std=0.01, shared=SharedFromDense(count=3), layers=(1, 2))
    upcycled = Upcycled(llama, options)
    complete = {name: all_of(upcycled, name) for name in upcycled.forms}
    stages = FakeStages(upcycled.describe().model, ParallelConfig(tp=3, pp=2, vpp=vpp, ep=2, etp=3), 12)
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in complete.items()}
    for rank in range(12):
        for name, piece in stages.pieces(rank).items():
            slices = piece.box.slices
            assert torch.equal(upcycled.read(f"model.{name}", piece.box), complete[f"model.{name}"][slices])
            seen[f"model.{name}"][slices] = True
    assert all(bool(found.all()) for found in seen.values())
    assert all(torch.equal(all_of(llama, name), tensor) for name, tensor in before.items())


def test_only_what_a_box_is_made_of_is_read_from_the_dense_model_and_once(llama: DenseSource) -> None:
    recording = Recording(llama)
    upcycled = Upcycled(recording, replace(OPTIONS, granularity=4))
    # Experts 3 to 9, of six neurons each: two copies of piece 3 and 0, 1; one of 2.
    upcycled.read(GATE_UP, Box(offset=(3, 1, 2, 5), shape=(7, 1, 3, 11)))
    source = "model.layers.2.mlp.gate_up"
    assert recording.reads == [(source, Box(offset=(1, 6 * j + 2, 5), shape=(1, 3, 11))) for j in range(4)]
    recording.reads.clear()
    upcycled.read(DOWN, Box(offset=(10, 7, 1), shape=(1, 4, 5)))
    assert recording.reads == [("model.layers.2.mlp.down", Box(offset=(7, 13), shape=(4, 5)))]
    recording.reads.clear()
    upcycled.read(ROUTER, Box(offset=(3, 1), shape=(5, 2)))
    upcycled.read(GATE_UP, Box(offset=(3, 1, 2, 5), shape=(0, 1, 3, 11)))
    assert recording.reads == []


def test_noise_is_on_every_copy_but_the_first_and_the_same_whatever_the_boxes(llama: DenseSource) -> None:
    options = replace(OPTIONS, noise_std=0.05)
    clean, noisy = (Upcycled(llama, o) for o in (OPTIONS, options))
    noise = (all_of(noisy, GATE_UP) - all_of(clean, GATE_UP)).double()
    assert bool((noise[:2] == 0).all())
    assert abs(noise[2:].std() / 0.05 - 1) < 0.03 and abs(noise[2:].mean()) < 0.002
    assert len(torch.unique(noise[2:, 0, 0, 0])) == 10
    # On down it is multiplied with the weights, so that it is as large beside them.
    assert abs((all_of(noisy, DOWN) - all_of(clean, DOWN))[2:].std() / (2 * 0.05) - 1) < 0.05
    assert torch.equal(all_of(Upcycled(llama, options), GATE_UP), all_of(noisy, GATE_UP))
    box = Box(offset=(3, 0, 5, 7), shape=(6, 2, 3, 5))
    assert torch.equal(noisy.read(GATE_UP, box), all_of(noisy, GATE_UP)[box.slices])
    assert not torch.equal(all_of(Upcycled(llama, replace(options, seed=12)), GATE_UP), all_of(noisy, GATE_UP))
    other = all_of(noisy, GATE_UP.replace("2", "1")) - all_of(clean, GATE_UP.replace("2", "1"))
    assert not torch.allclose(other.double(), noise, atol=1e-3)


def test_bfloat16_stays_and_powers_of_two_lose_no_bit(tmp_path: Path) -> None:
    dense_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    dense = open_dense(tmp_path)
    upcycled = Upcycled(dense, replace(OPTIONS, style="deepseek_v3", scaling="exact"))
    assert {name: form.dtype for name, form in upcycled.forms.items() if form.dtype != "bfloat16"} == {
        f"model.layers.{i}.mlp.router.bias": "float32" for i in range(LAYERS)
    }
    assert torch.equal(all_of(upcycled, DOWN)[4], all_of(dense, "model.layers.2.mlp.down")[:, :12])
    doubled = Upcycled(dense, OPTIONS)
    assert torch.equal(all_of(doubled, DOWN)[4], 2 * all_of(dense, "model.layers.2.mlp.down")[:, :12])


def test_experts_have_the_activation_of_the_ffn_that_they_are_made_from(llama: DenseSource) -> None:
    dense = llama.describe().model
    ungated = tuple(replace(layer, mlp=replace(layer.mlp, activation=SquaredReLU())) for layer in dense.layers)
    model = upcycled_model(replace(dense, layers=ungated), OPTIONS)
    assert {layer.mlp.activation for layer in model.layers} == {SquaredReLU()}


def test_the_style_brings_its_router_and_balancing(llama: DenseSource) -> None:
    dense = llama.describe().model
    moe = upcycled_model(dense, replace(OPTIONS, style="deepseek_v3", shared=SharedFromDense(count=2))).layers[0].mlp
    assert isinstance(moe, MoE)
    assert (moe.experts, moe.top_k, moe.expert_ffn, moe.shared) == (12, 4, FFN // 2, SharedExperts(count=2))
    assert (moe.router.score, moe.router.normalise, moe.router.groups, moe.router.scale) == ("sigmoid", True, None, 2.0)
    assert any(isinstance(part, ExpertBias) for part in moe.router.balance)
    moe = upcycled_model(dense, OPTIONS).layers[0].mlp
    assert isinstance(moe, MoE) and (moe.router.score, moe.router.scale) == ("softmax_after_top_k", 1.0)
    assert AuxLoss(scope="microbatch", coefficient=0.02) in moe.router.balance


def test_what_describes_the_dense_model_is_passed_on(llama_folder: Path, tmp_path: Path) -> None:
    for name, text in {"tokenizer.json": "{}", "README.md": "dense"}.items():
        (llama_folder / name).write_text(text)
    described = upcycled_source(llama_folder, OPTIONS).describe()
    assert described.family == "mixtral" and described.assets["tokenizer.json"] == b"{}"
    assert "README.md" not in described.assets
    assert described.published is not None
    assert (described.published["model_type"], described.published["eos_token_id"]) == ("mixtral", 5)
    # What the family's config.json cannot say belongs to no family.
    for options in (
        replace(OPTIONS, layers=(1,)),
        replace(OPTIONS, style="qwen3"),
        replace(OPTIONS, style="deepseek_v3"),
    ):
        described = upcycled_source(llama_folder, options).describe()
        assert (described.family, described.published) == (None, None)


def test_every_option_that_cannot_be_is_named_at_once_with_what_works(llama: DenseSource) -> None:
    dense = llama.describe().model
    wrong = UpcycleOptions(style="mixtral", experts=13, top_k=7, granularity=5, shared=SharedFromDense(count=6))
    said = "\n".join(map(str, upcycle_options_faults(dense, wrong)))
    assert "--granularity=5: must divide the dense FFN's width 24. Works: 4 or 6." in said
    assert "--experts=13: must be a multiple of --granularity=5" in said and "Works: 10 or 15." in said
    assert "--top-k=7: must be a multiple of --granularity=5" in said and "Works: 5 or 10." in said
    assert "--shared=6: must be at most --granularity=5" in said
    wrong = UpcycleOptions(
        style="gpt",
        experts=0,
        top_k=-1,
        layers=(9,),
        noise_std=0.0,
        router_std=-1.0,
        shared=SharedFromDense(count=0, share=1.0),
    )
    settings = [fault.setting for fault in upcycle_options_faults(dense, wrong)]
    assert sorted(settings) == sorted(
        ["--experts", "--top-k", "--noise", "--router-std", "--shared", "--shared-share", "--layers", "--model"]
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top_k": 14}, "--top-k=14: must be at most --experts=12"),
        ({"layers": ()}, "--layers=none: must name a layer"),
        ({"scaling": "none"}, "--scaling=none: is not a scaling"),
        ({"normalise": True}, "--normalise=True: has no meaning with --model=mixtral"),
        ({"granularity": 0}, "--granularity=0: must be positive"),
    ],
)
def test_an_option_that_cannot_be_is_refused(llama: DenseSource, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        Upcycled(llama, replace(OPTIONS, **changes))


def test_layers_that_have_experts_already_are_refused(llama: DenseSource) -> None:
    once = upcycled_model(llama.describe().model, replace(OPTIONS, layers=(0, 2)))
    assert [str(fault) for fault in upcycle_options_faults(once, OPTIONS)] == [
        "--layers=0: has experts already. Works: 1, 3."
    ]
    twice = upcycled_model(once, replace(OPTIONS, layers=(1, 3)))
    assert not any(isinstance(layer.mlp, Dense) for layer in twice.layers)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("all", (0, 1, 2, 3, 4)),
        ("every 2", (1, 3)),
        ("every:1", (0, 1, 2, 3, 4)),
        ("every 5", (4,)),
        ("3", (3,)),
        ("3, 0-1,1", (0, 1, 3)),
    ],
)
def test_layers_are_named_in_words_or_numbers(text: str, layers: tuple[int, ...]) -> None:
    assert layers_named(text, 5) == layers


@pytest.mark.parametrize("text", ["", "every 0", "every 6", "5", "1-5", "-1", "a", "1,,2", "every two", "3-1"])
def test_names_of_no_layers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no layers of a model that has 5"):
        layers_named(text, 5)


def test_the_summary_counts_what_the_real_model_has(llama: DenseSource) -> None:
    upcycled = Upcycled(llama, OPTIONS)
    lines = "\n".join(summary(llama.describe().model, OPTIONS))
    total = sum(parameter.numel() for parameter in built(upcycled).parameters())
    assert f"{total:,} upcycled" in lines and "equal the dense model's" in lines
    assert "4 of 4 layers get experts: 12 of width 12 (6 copies of 2 pieces), of which a token uses 4" in lines
    assert "noise of 0.01" in "\n".join(summary(llama.describe().model, replace(OPTIONS, noise_std=0.01)))
    assert "cube-root" in "\n".join(summary(llama.describe().model, replace(OPTIONS, scaling="cube_root")))

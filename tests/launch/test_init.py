"""A run that begins with weights that are there has their model, their numbers and their tokenizer; what does not fit starts nothing."""

from __future__ import annotations

import json
import math
import shutil
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from moto.server import ThreadedMotoServer
from torch.nn.functional import cross_entropy

from ckpt.described import extra_of
from ckpt.huggingface import save_pretrained
from ckpt.opening import open_any
from ckpt.source import MODEL_PREFIX
from ckpt.stored import CheckpointSource
from ckpt.stream import Job, Streaming, held_whole, write_checkpoint
from ckpt.upcycle import upcycled_source
from ckpt.upcycle_options import UpcycleOptions
from core.check import check
from core.config.architecture import GQA, Layer, ModelConfig, MoE, RMSNorm, Rope, Router, repeat
from core.config.family import Family, all_families
from core.config.mapping import ParallelConfig
from core.data.corpus import documents
from core.data.loader import Loader
from core.data.tokens import open_tokens, prepare, train_tokenizer
from core.errors import CheckpointError, ConfigError, RequestError, ZooError
from core.parallel.groups import groups_for, one_rank
from core.state.box import whole
from core.state.inventory import initialise, inventory
from core.training.metrics import read_metrics
from core.transformer.stage import build_model
from launch.backends.protocol import Job as Launched
from launch.backends.protocol import Outcome
from launch.folder import Init, read_assets, read_run
from launch.initial import load_initial, open_initial
from launch.request import Request, new_run
from launch.start import Start, start
from launch.worker import StopFlag, sample, train
from tests.ckpt.dense_models import dense_model
from tests.launch.small import RunsHere, write_corpus
from tests.ranks import Ranks

VOCAB = 300
# Large weights, so that every part shows in the loss; no balancing loss, of which other libraries have another idea.
MODEL = ModelConfig(
    vocab=VOCAB,
    hidden=12,
    max_tokens=64,
    norm=RMSNorm(eps=1e-5),
    rope=Rope(theta=1e4),
    layers=repeat(
        2,
        Layer(
            attention=GQA(heads=4, kv_heads=2, head_dim=4),
            mlp=MoE(experts=6, top_k=2, expert_ffn=8, router=Router(score="softmax_after_top_k", normalise=False)),
        ),
    ),
    init_std=0.3,
)
SETTINGS = (
    "train.sequence_tokens=32",
    "train.global_batch=4",
    "train.eval_sequences=4",
    "train.sample_tokens=0",
    "train.schedule_steps=4",
    "optimizer.warmup_steps=1",
)


@dataclass(frozen=True, kw_only=True)
class OnRanks(RunsHere):
    """A back end that trains on the ranks of the test suite."""

    ranks: Ranks

    def start(self, job: Launched) -> Outcome:
        self.ranks.run(train_one_rank, job.ranks, job.out, timeout_seconds=120.0)
        return Outcome(ended="finished")


class NeverStarted(RunsHere):
    """A back end that must not be reached."""

    def start(self, job: Launched) -> Outcome:
        raise AssertionError(f"{job} was started")


def train_one_rank(rank: int, world: int, out: Path) -> None:
    train(out, StopFlag())


def filled_as(rank: int, world: int, init: Init, parallel: ParallelConfig) -> float:
    """The largest difference between this rank's pieces and what the weights have there."""
    groups = groups_for(parallel, embedding_stages=(0,)) if world > 1 else one_rank()
    source = open_any(init.address).source
    model = build_model(MODEL, groups=groups, parallel=parallel)
    pieces = inventory(model, groups)
    for piece in pieces.values():
        piece.data.fill_(float("nan"))
    load_initial(init, model, groups)
    worst = 0.0
    for name, piece in pieces.items():
        all_of_it = source.read(f"{MODEL_PREFIX}{name}", whole(piece.shape))
        inside = tuple(slice(o, o + s) for o, s in zip(piece.box.offset, piece.box.shape, strict=True))
        difference = (piece.data - all_of_it[inside]).abs().amax().item()
        assert math.isfinite(difference), f"{name} was not filled"
        worst = max(worst, difference)
    return worst


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, and a published folder `model` with the tokenizer made for it."""
    home = tmp_path_factory.mktemp("home")
    corpus = write_corpus(home / "corpus")
    model = build_model(MODEL)
    initialise(model, 3)
    save_pretrained(model, home / "model", family="mixtral")
    train_tokenizer(documents(str(corpus)), VOCAB).save(str(home / "model" / "tokenizer.json"))
    (home / "model" / "LICENSE").write_text("free")
    return home


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    yield


def asked(
    home: Path, out: Path, init: object, *settings: str, model: str = "mixtral", resume: bool = False, **options: object
) -> Start:
    plain = dict.fromkeys(("size", "hardware", "ranks", "steps", "seed", "data", "dtype"))
    given = {**plain, "ranks": 2, "steps": 1, "data": str(home / "corpus"), "settings": (*SETTINGS, *settings)}
    return Start(
        model=model,
        out=out,
        resume=resume,
        dry_run=False,
        options={**given, **options},
        init=None if init is None else str(init),
        yes=True,
    )


def as_checkpoint(folder: Path, out: Path | str, store: str, said: ModelConfig | None = None) -> str:
    """The published folder as a checkpoint of the zoo. said: the model that it claims to be of, where that is another one."""
    source = open_any(folder).source
    described = source.describe()
    assert described is not None
    job = Job(
        opener=lambda: source,
        identity="",
        target=out,
        held=held_whole(source),
        step=0,
        extra=extra_of(described if said is None else replace(described, model=said)),
        streaming=Streaming(store=store),
        assets=described.assets,
    )
    return write_checkpoint(job)


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out)]


def test_the_first_loss_is_that_of_the_transformers_library_and_the_run_says_where_its_weights_come_from(
    home: Path, tmp_path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    start(asked(home, out, home / "model"), OnRanks(ranks=ranks))
    file = read_run(out)
    assert file.init == Init(address=str(home / "model"), what="a published folder")
    assert f"from {home / 'model'}, a published folder" in capsys.readouterr().out
    assert f"{home / 'model'}, a published folder" in (out / "report.html").read_text()
    assert (file.run.model, file.run.size) == (open_initial(str(home / "model")).model, "custom")
    assert file.run.data.tokenizer == str(out / "assets" / "tokenizer.json")
    assert set(read_assets(out)) >= {"LICENSE", "tokenizer.json"}
    theirs = transformers.MixtralForCausalLM.from_pretrained(home / "model", attn_implementation="eager").eval()
    data = open_tokens(Path(file.prepared))
    assert data.tokenizer.read_bytes() == (home / "model" / "tokenizer.json").read_bytes()
    loader = Loader(data.train, sequence_tokens=32, global_batch=4, microbatch=1, seed=0, replica=0, replicas=1)
    total, count = 0.0, 0
    for microbatch in loader.batches(0):
        for first, last in pairwise(microbatch.cu_seqlens.tolist()):
            tokens, labels = (torch.from_numpy(x[first:last]) for x in (microbatch.tokens, microbatch.labels))
            with torch.no_grad():
                logits = theirs(tokens[None]).logits[0]
            total += float(cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
            count += int((labels != -100).sum())
    assert losses(out) == pytest.approx([total / count], rel=1e-5)


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"ep": 2}, {"pp": 2}, {"etp": 2}], ids=str)
@pytest.mark.parametrize("store", ["published", "torch_dist"])
def test_every_rank_takes_its_piece_of_the_weights(
    home: Path, tmp_path: Path, ranks: Ranks, store: str, parallel: dict[str, int]
) -> None:
    address = home / "model" if store == "published" else as_checkpoint(home / "model", tmp_path / "c", store)
    init = open_initial(str(address)).init
    assert ranks.run(filled_as, 2, init, ParallelConfig(**parallel)) == [0.0, 0.0]  # type: ignore[arg-type]


def test_weights_may_lie_in_an_object_store(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/zoo", method="PUT")).close()
        url = as_checkpoint(home / "model", f"s3://zoo/weights?endpoint=http://{host}:{port}", "zarr")
        init = open_initial(url).init
        assert init == Init(address=url, what="a checkpoint")
        assert filled_as(0, 1, init, ParallelConfig()) == 0.0
    finally:
        server.stop()


def test_a_run_goes_on_from_any_step_of_another_whatever_the_mapping_and_never_reads_it_again(
    home: Path, tmp_path: Path, ranks: Ranks
) -> None:
    first, backend = tmp_path / "first", OnRanks(ranks=ranks)
    start(asked(home, first, home / "model", "checkpoint.interval=1", steps=2), backend)
    early = str(first / "checkpoints" / "step_00000001")
    assert open_initial(str(first)).init.address == str(first / "checkpoints" / "step_00000002")
    assert open_initial(early).init == Init(address=early, what="a checkpoint of step 1")
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    start(asked(home, alone, early, steps=4), backend)
    start(asked(home, stopped, early, "parallel.ep=1", "parallel.tp=2", steps=2), backend)
    assert "LICENSE" in CheckpointSource(stopped / "checkpoints" / "step_00000002").describe().assets  # type: ignore[union-attr]
    shutil.rmtree(first)
    resumed = asked(home, stopped, None, resume=True, steps=4)
    start(replace(resumed, options={**resumed.options, "settings": ()}), backend)
    assert losses(stopped) == pytest.approx(losses(alone), rel=1e-4)
    assert read_run(stopped).init == read_run(alone).init
    assert [line["step"] for line in read_metrics(stopped)] == [1, 2, 3, 4]
    assert sample(stopped, "the ", 3, 0.8, 0).startswith("the ")


@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_the_optimizer_takes_its_masters_from_the_weights(
    home: Path, tmp_path: Path, ranks: Ranks, sharding: str
) -> None:
    """Masters of the random weights before would put these back with the first step."""
    out = tmp_path / "run"
    still = ("optimizer.learning_rate=1e-20", "optimizer.min_learning_rate=0", f"parallel.sharding={sharding}")
    start(asked(home, out, home / "model", *still, dtype="bfloat16"), OnRanks(ranks=ranks))
    before, after = open_any(home / "model").source, open_any(out).source
    for name, form in before.forms.items():
        expected = before.read(name, whole(form.shape)).bfloat16()
        assert torch.equal(after.read(name, whole(form.shape)).bfloat16(), expected), name
    moments = [name for name in after.forms if name.startswith("optimizer.")]
    assert moments and all(torch.isfinite(after.read(n, whole(after.forms[n].shape))).all() for n in moments)


def test_a_dense_model_and_one_upcycled_to_a_style_that_no_family_has_train_with_the_set_up_of_any(
    home: Path, tmp_path: Path, ranks: Ranks
) -> None:
    dense = tmp_path / "dense"
    dense_model("llama", vocab_size=VOCAB).save_pretrained(dense)
    shutil.copy(home / "model" / "tokenizer.json", dense)
    options = UpcycleOptions(style="deepseek_v3", experts=4, top_k=2, granularity=2)
    source = upcycled_source(dense, options)
    described = source.describe()
    assert described.family is None
    job = Job(
        opener=partial(upcycled_source, dense, options),
        identity="",
        target=tmp_path / "moe",
        held=held_whole(source),
        step=0,
        extra=extra_of(described),
        streaming=Streaming(),
        assets=described.assets,
    )
    write_checkpoint(job)
    backend = OnRanks(ranks=ranks)
    start(asked(home, tmp_path / "a", dense, "parallel.ep=1", model="qwen3"), backend)
    start(asked(home, tmp_path / "b", tmp_path / "moe", model="deepseek_v3"), backend)
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), rel=1e-5)


@pytest.mark.parametrize("family", all_families(), ids=lambda family: family.name)
def test_every_set_up_for_going_on_breaks_no_rule_and_learns_more_slowly_than_from_random_weights(
    home: Path, family: Family
) -> None:
    weights = open_initial(str(home / "model"))
    for preset in family.continued:
        initial = replace(weights, family=family.name, model=family.size("tiny").model)
        run = new_run(Request(hardware=preset.hardware), family, initial).run
        assert check(run) == () and preset.size is None
        assert run.optimizer == preset.optimizer
        fresh = [p.optimizer.learning_rate for p in family.presets if p.hardware == preset.hardware]
        assert run.optimizer.learning_rate < min(fresh) / 10
    assert {preset.hardware for preset in family.continued} == {"cpu", "gpu"}


def test_a_dry_run_shows_the_weights_and_which_settings_are_theirs_and_writes_nothing(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = asked(home, tmp_path / "run", home / "model", "model.rope.theta=5e4")
    start(replace(wanted, dry_run=True), NeverStarted())
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {words[0]: words[1:] for words in lines if words}
    assert rows["weights"][:2] == ["from", f"{home / 'model'},"]
    assert rows["model.hidden"] == ["12", "--init"] and rows["model.rope.theta"] == ["50000.0", "--set"]
    assert rows["data.tokenizer"] == [str(tmp_path / "run" / "assets" / "tokenizer.json"), "--init"]
    assert rows["optimizer.learning_rate"] == ["3e-05", "preset"]
    assert not (tmp_path / "run").exists()


def refused(asked: Start, kind: type[ZooError] = ConfigError) -> str:
    """What a request that must not start anything is told."""
    with pytest.raises(kind) as error:
        start(asked, NeverStarted())
    assert asked.out is not None and (asked.resume or not asked.out.exists())
    return str(error.value)


def test_settings_that_change_shapes_are_refused_field_by_field_and_others_are_not(home: Path, tmp_path: Path) -> None:
    settings = ("model.hidden=24", "model.moe.experts=12", "model.num_layers=1", "model.moe.top_k=3")
    text = refused(asked(home, tmp_path / "run", home / "model", *settings, "train.stepz=3"))
    assert text.startswith("4 settings cannot run:")
    for part in (
        "embedding.weight has shape [300, 12] there, not [300, 24]. Works: 12, as they have it.",
        "layers.0.mlp.router.weight has shape [6, 12] there, not [12, 12]. Works: 6, as they have it.",
        "would be left over. Works: 2, as they have it.",
        "did you mean train.steps",
    ):
        assert part in text


def test_another_family_and_a_size_are_refused_together(home: Path, tmp_path: Path) -> None:
    text = refused(asked(home, tmp_path / "run", home / "model", model="qwen3", size="tiny"))
    assert f"MODEL=qwen3: is not the family of the weights at --init={home / 'model'}. Works: mixtral." in text
    assert "--size=tiny: cannot be chosen with --init" in text


def test_weights_that_are_not_there_damaged_or_said_to_be_another_models_start_nothing(
    home: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert "nowhere: there is nothing" in refused(asked(home, out, tmp_path / "nowhere"), RequestError)
    whole_one = as_checkpoint(home / "model", tmp_path / "whole", "zarr")
    broken = shutil.copytree(whole_one, tmp_path / "broken")
    data = [path for path in broken.rglob("*") if path.is_file() and path.suffix != ".json"]
    max(data, key=lambda path: path.stat().st_size).unlink()
    assert "missing" in refused(asked(home, out, broken), CheckpointError)
    other = as_checkpoint(home / "model", tmp_path / "other", "zarr", said=replace(MODEL, hidden=16))
    assert "does not hold the weights" in refused(asked(home, out, other), CheckpointError)


def test_a_run_that_is_resumed_takes_no_other_weights(home: Path, tmp_path: Path) -> None:
    text = refused(asked(home, tmp_path, home / "model", resume=True))
    assert "--init=" in text and "Works: no --init, or no --resume." in text


def test_tokens_that_the_weights_do_not_know_are_refused_however_they_come(home: Path, tmp_path: Path) -> None:
    out, model = tmp_path / "run", home / "model"
    # The same number of ids, given to other tokens.
    other = train_tokenizer(documents(str(write_corpus(tmp_path / "corpus"))), VOCAB - 2)
    other.add_tokens(["zebra", "quagga"])
    other.save(str(tmp_path / "other.json"))
    text = refused(asked(home, out, model, f"data.tokenizer={tmp_path / 'other.json'}"))
    assert "data.tokenizer=" in text and "gives other ids to tokens" in text
    foreign = prepare(
        source=str(home / "corpus"),
        out=tmp_path / "foreign",
        vocab=VOCAB,
        tokenizer=str(tmp_path / "other.json"),
        validation_fraction=0.05,
    )
    text = refused(asked(home, out, model, data=str(foreign.folder)))
    assert f"--data={foreign.folder}: gives other ids to tokens" in text

    bare = shutil.copytree(model, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    text = refused(asked(home, out, bare))
    assert "data.tokenizer=None" in text and "came without one" in text
    planned = asked(home, out, bare, f"data.tokenizer={tmp_path / 'other.json'}")
    start(replace(planned, dry_run=True), NeverStarted())

    large = shutil.copytree(model, tmp_path / "large")
    other.add_tokens(["one", "too", "many"])
    other.save(str(large / "tokenizer.json"))
    assert f"has {VOCAB + 3} ids" in refused(asked(home, out, large))


def test_tokens_that_were_made_with_the_tokenizer_of_the_weights_are_taken_as_they_are(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = prepare(
        source=str(home / "corpus"),
        out=tmp_path / "tokens",
        vocab=VOCAB,
        tokenizer=str(home / "model" / "tokenizer.json"),
        validation_fraction=0.05,
    )
    start(replace(asked(home, tmp_path / "run", home / "model", data=str(tokens.folder)), dry_run=True), NeverStarted())
    rows = {words[0]: words[1:] for line in capsys.readouterr().out.splitlines() if (words := line.split())}
    assert rows["data.path"] == [str(tokens.folder), "--data"] and rows["data.tokenizer"] == ["none", "preset"]


def test_only_run_files_with_an_address_say_where_weights_come_from(home: Path, tmp_path: Path, ranks: Ranks) -> None:
    out = tmp_path / "run"
    start(asked(home, out, home / "model"), OnRanks(ranks=ranks))
    data = json.loads((out / "run.json").read_text())
    assert data["init"] == {"address": str(home / "model"), "what": "a published folder"}
    (out / "run.json").write_text(json.dumps({**data, "init": {"adress": "x"}}))
    with pytest.raises(RequestError, match="damaged"):
        read_run(out)
    del data["init"]
    (out / "run.json").write_text(json.dumps(data))
    assert read_run(out).init is None

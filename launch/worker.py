"""One rank of a run: groups, stage, optimizer, data, checkpoint and loop are joined here and nowhere else.

Started as `python -m launch.worker RUN` by a back end, which has written RUN/run.json and sets torchrun's variables.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from tokenizers import Tokenizer

from ckpt.asynchronous import AsynchronousSaver, SynchronousSaver
from ckpt.files.protocol import Address
from ckpt.load import load
from ckpt.memory import keep_freed_memory
from ckpt.save import Saving
from ckpt.shelf.address import latest
from ckpt.source import MODEL_PREFIX, OPTIMIZER_PREFIX
from core.config.architecture import MoE
from core.config.run import RunConfig
from core.config.serial import run_to_json
from core.data.loader import Loader
from core.data.storage import TokenFiles, TokenSplit, open_tokens
from core.data.tokenizer import load_tokenizer
from core.errors import CheckpointError, ZooError
from core.moe.dispatch.preflight import preflight
from core.optim.formats import formats_of
from core.optim.make import make_optimizer
from core.optim.protocol import Optimizer
from core.optim.scaler import LossScaler
from core.parallel.collectives import all_reduce_sum
from core.parallel.groups import Groups, groups_for, one_rank
from core.pipeline.layout import layout_of
from core.state.inventory import initialise, inventory
from core.state.sharded import ShardedTensor
from core.training.evaluate import generate
from core.training.loop import Hooks, Progress, Trainer
from core.training.metrics import MetricsWriter, SaveMetrics, StepMetrics
from core.training.peak import measure_matmul_rate
from core.transformer.stage import Stage, build_model
from launch.folder import (
    ENDS_FOLDER,
    ERRORS_FOLDER,
    SAMPLES_FILE,
    RunFile,
    read_assets,
    read_json,
    read_run,
    write_json,
)
from launch.initial import load_initial
from launch.profiles import find_profile
from launch.progress import ProgressLine

SAMPLE_PROMPT_TOKENS = 16
SCALER = "loss_scaler"  # in a checkpoint's extra
PR_SET_PDEATHSIG = 1


@dataclass(kw_only=True)
class StopFlag:
    """Set by SIGTERM, SIGINT or SIGUSR1; the loop looks at it between steps."""

    raised: bool = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.raised = True


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a checkpoint of a run fills."""

    model: Stage
    optimizer: Optimizer
    scaler: LossScaler | None


def main() -> None:
    """Run one rank; a failure is written to errors/rank{r}.json for the launcher to show, and ends with exit code 1 or 2."""
    out, rank = Path(sys.argv[1]), int(os.environ.get("RANK", "0"))
    flag = StopFlag()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, flag.note)
    _end_with_the_launcher()
    try:
        with _world(out):
            end = train(out, flag)
            _note_end(out, rank, end)
    except BaseException as caught:
        error = _explained(caught, out)
        _leave_word(out, rank, error)
        # Not a normal exit: other ranks may hang in a collective, and closing a broken group can hang this one.
        sys.stdout.flush()
        os._exit(error.exit_code if isinstance(error, ZooError) else 1)


def train(out: Path, flag: StopFlag) -> Progress:
    """Train the run in `out` on this rank of the initialised world, from its newest checkpoint if it has one; how far it came."""
    file = read_run(out)
    run, groups, device = file.run, _groups(file.run), _device(file.run)
    if device.type == "cpu":
        # Activations and gradients of a step are as large as those of the step before.
        keep_freed_memory()
    data = open_tokens(Path(file.prepared), vocab=run.model.vocab)
    model = _model(out, file, groups, device)
    _preflight(run, model)
    optimizer = _optimizer(run, model, groups)
    scaler = LossScaler(fixed=run.precision.loss_scale) if run.precision.compute == "float16" else None
    start = _restore(out, data, run, Trained(model=model, optimizer=optimizer, scaler=scaler), groups)
    trainer = Trainer(
        run,
        model,
        optimizer,
        groups,
        train=_loader(run, data.train, groups),
        validation=_loader(run, data.validation, groups),
        matmul_rate=_matmul_rate(run, groups, device),
        scaler=scaler,
    )
    first = groups.world.position == 0
    sampler = Sampler(out, run, data, model, first)
    if start.step == 0:
        sampler.take("before")

    with (
        Recorder(out, run, start) if first else contextlib.nullcontext() as recorder,
        _saver(out, run, data, groups) as saver,
    ):

        def keep(step: int, tokens: int) -> None:
            extra = {"step": step, "tokens": tokens, "data": data.identity, "run": run_to_json(run)}
            extra["updates"] = optimizer.steps
            if scaler is not None:
                extra[SCALER] = scaler.state()
            saver.save(step, training_state(model, optimizer, groups), extra)

        def record(metrics: StepMetrics) -> None:
            if recorder is not None:
                recorder.step(metrics, saver.finished())

        hooks = Hooks(
            save=keep,
            record=record,
            stop=lambda: flag.raised,
            before_update=saver.before_update,
            failed=lambda: saver.failed,
            finish=saver.wait,
        )
        saver.prepare(training_state(model, optimizer, groups))
        end = trainer.go(start, hooks)
        if recorder is not None:
            recorder.end(saver.finished())
    optimizer.wait_all()
    if end.step >= run.train.steps:
        sampler.take("after")
    return end


def sample(run: Path, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """The text with which the newest checkpoint of a run continues `prompt`, on one rank whatever mapping trained it."""
    file, groups = read_run(run), one_rank()
    address = checkpoints_of(run, file.run)
    folder = latest(address)
    if folder is None:
        raise CheckpointError(f"{address}: has no checkpoint yet. Train it first, or give another run.")
    model = build_model(file.run.model, groups=groups, dtype=_dtype(file.run))
    load(folder, model_state(model, groups), groups.world, skip=(OPTIMIZER_PREFIX,))
    data = open_tokens(Path(file.prepared), vocab=file.run.model.vocab)
    tokenizer = load_tokenizer(data.tokenizer)
    return prompt + _continuation(model, data, tokenizer, prompt, tokens=tokens, temperature=temperature, seed=seed)


def checkpoints_of(out: Path, run: RunConfig) -> Address:
    """Where the run in `out` keeps its checkpoints."""
    return run.checkpoint.address or out


def model_state(model: Stage, groups: Groups) -> list[ShardedTensor]:
    """The model's tensors under the names that a checkpoint has them: `model.…`; not of primary weights, which the optimizer has."""
    pieces = inventory(model, groups).values()
    return [replace(piece, name=f"{MODEL_PREFIX}{piece.name}") for piece in pieces]


def training_state(model: Stage, optimizer: Optimizer, groups: Groups) -> list[ShardedTensor]:
    """Everything that a run needs to go on as if it had not stopped, beside the step: order of data and random numbers are
    functions of the seed and the step. Waits for parameters that are still on their way."""
    optimizer.wait_all()
    return model_state(model, groups) + optimizer.state()


class Sampler:
    """Writes what the model makes of one prompt before and after training to samples.json."""

    def __init__(self, out: Path, run: RunConfig, data: TokenFiles, model: Stage, first: bool) -> None:
        self.out, self.run, self.data, self.model, self.first = out, run, data, model, first

    def take(self, when: str) -> None:
        """Generate on every rank, since the model is spread over them; the first rank writes."""
        if self.run.train.sample_tokens < 1:
            return
        tokenizer = load_tokenizer(self.data.tokenizer)
        prompt = tokenizer.decode([int(t) for t in self.data.validation.tokens[:SAMPLE_PROMPT_TOKENS]])
        count, seed = self.run.train.sample_tokens, self.run.train.seed
        text = _continuation(self.model, self.data, tokenizer, prompt, tokens=count, temperature=0.8, seed=seed)
        if self.first:
            path = self.out / SAMPLES_FILE
            known = read_json(path) if path.exists() else {}
            write_json(path, {**known, "prompt": prompt, when: text})


class Recorder:
    """What the first rank does with what was measured: the files, TensorBoard, and the line on the terminal. A context."""

    def __init__(self, out: Path, run: RunConfig, start: Progress) -> None:
        self._stack = contextlib.ExitStack()
        self._writer = self._stack.enter_context(MetricsWriter(out, resume_from_step=start.step))
        self._line = self._stack.enter_context(ProgressLine(start_step=start.step, steps=run.train.steps))

    def step(self, metrics: StepMetrics, saves: Sequence[SaveMetrics]) -> None:
        """Record a step, and the checkpoints that were completed since the last one."""
        self._writer.write(metrics)
        self._write(saves)
        self._line.show(metrics, saves)

    def end(self, saves: Sequence[SaveMetrics]) -> None:
        """Record the checkpoints that were completed after the last step."""
        self._write(saves)
        self._line.show_last(saves)

    def _write(self, saves: Sequence[SaveMetrics]) -> None:
        for save in saves:
            self._writer.write_save(save)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _continuation(
    model: Stage,
    data: TokenFiles,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """The text that follows the prompt."""
    given = tokenizer.encode(prompt, add_special_tokens=False).ids
    made = generate(model, given, tokens=tokens, end_of_text=data.end_of_text, temperature=temperature, seed=seed)
    return tokenizer.decode(made[len(given) :])


def _saver(out: Path, run: RunConfig, data: TokenFiles, groups: Groups) -> AsynchronousSaver | SynchronousSaver:
    """Saves checkpoints that hold what their weights need to be of use: the tokenizer, and what came with the first weights."""
    config = run.checkpoint
    assets = {"tokenizer.json": data.tokenizer.read_bytes(), **read_assets(out)}
    saving = Saving(store=config.store, codec=config.codec, keep=config.keep, assets=assets)
    saver = AsynchronousSaver if config.asynchronous else SynchronousSaver
    return saver(checkpoints_of(out, run), groups.checkpoint, saving)


def _dtype(run: RunConfig) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[run.precision.compute]


def _matmul_rate(run: RunConfig, groups: Groups, device: torch.device) -> float:
    """FLOP per second that all ranks together reach in products of the run's format."""
    mine = torch.tensor([measure_matmul_rate(_dtype(run), device)], dtype=torch.float64, device=device)
    return float(all_reduce_sum(mine, groups.world))


def _device(run: RunConfig) -> torch.device:
    if find_profile(run.hardware).device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _groups(run: RunConfig) -> Groups:
    """This rank's groups; which pipeline ranks share the embedding follows from the layout."""
    stages = layout_of(run.model, run.parallel).embedding_stages(run.model.tied_embeddings)
    return groups_for(run.parallel, embedding_stages=stages)


def _model(out: Path, file: RunFile, groups: Groups, device: torch.device) -> Stage:
    """The model with its first weights: random ones, or those that the run was told to begin with, unless it has a checkpoint since."""
    run = file.run
    model = build_model(
        run.model,
        groups=groups,
        parallel=run.parallel,
        memory=run.memory,
        dispatcher_sms=run.execution.dispatcher_sms,
        recipe=run.precision.recipe,
        seed=run.train.seed,
        dtype=_dtype(run),
        device=device,
    )
    # Before there is an optimizer: that keeps a copy in higher precision, or spreads the parameters.
    if file.init is not None and latest(checkpoints_of(out, run)) is None:
        load_initial(file.init, model, groups)
    else:
        initialise(model, run.train.seed)
    return model


def _optimizer(run: RunConfig, model: Stage, groups: Groups) -> Optimizer:
    formats = formats_of(run.precision, on_host=run.memory.optimizer_offload, seed=run.train.seed)
    return make_optimizer(model, run.optimizer, groups, run.parallel, formats)


def _preflight(run: RunConfig, model: Stage) -> None:
    """See that tokens reach their experts on all ranks. Raises ParallelError naming the ranks where they do not."""
    moe = next((layer.mlp for layer in run.model.layers if isinstance(layer.mlp, MoE)), None)
    if moe is not None:
        preflight(moe, moe.routed_width(run.model.hidden), model.place)


def _loader(run: RunConfig, split: TokenSplit, groups: Groups) -> Loader:
    config = run.train
    return Loader(
        split,
        sequence_tokens=config.sequence_tokens,
        global_batch=config.global_batch,
        microbatch=config.microbatch,
        seed=config.seed,
        replica=groups.dp.position,
        replicas=groups.dp.size,
    )


def _restore(out: Path, data: TokenFiles, run: RunConfig, trained: Trained, groups: Groups) -> Progress:
    """Load the newest whole checkpoint, under whatever mapping it was saved. Raises CheckpointError for other data."""
    folder = latest(checkpoints_of(out, run))
    if folder is None:
        return Progress(step=0, tokens=0)
    state = training_state(trained.model, trained.optimizer, groups)
    extra: Mapping[str, Any] = load(folder, state, groups.checkpoint)
    if extra["data"] != data.identity:
        raise CheckpointError(
            f"{folder}: was trained on other tokens than {data.folder} holds, so it cannot go on where it stopped. "
            "Give the --data of the first launch, or start anew with another --out."
        )
    trained.optimizer.restore(state)
    # Of fewer updates than steps where gradients of float16 overflowed.
    trained.optimizer.set_steps(int(extra.get("updates", extra["step"])))
    if trained.scaler is not None:
        trained.scaler.restore(extra.get(SCALER, {}))
    return Progress(step=int(extra["step"]), tokens=int(extra["tokens"]))


def _end_with_the_launcher() -> None:
    """Have the kernel send SIGTERM when the launcher dies, so that a launcher killed outright leaves no rank behind (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def _world(out: Path) -> Iterator[None]:
    """The process group of all ranks, with the collectives that the hardware has."""
    backend = find_profile(read_run(out).run.hardware).collectives
    dist.init_process_group(backend)
    yield
    dist.destroy_process_group()


def _note_end(out: Path, rank: int, end: Progress) -> None:
    """Tell this node's launcher how far the run came: it may have been stopped by what only another node was told."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        steps = read_run(out).run.train.steps
        write_json(out / ENDS_FOLDER / f"rank{rank}.json", {"step": end.step, "steps": steps})


def _explained(error: BaseException, out: Path) -> BaseException:
    """A disk that filled up as the user's error that it is; anything else as it came."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(out).free
        return CheckpointError(
            f"{error.filename or out}: the disk is full ({free:,} bytes are free). The last checkpoint is whole: make room, "
            f"then go on with --resume --out {out}."
        )
    return error


def _leave_word(out: Path, rank: int, error: BaseException) -> None:
    """Write what went wrong where the launcher looks; a user's mistake has no traceback."""
    expected = isinstance(error, ZooError)
    message = str(error) if expected else f"{type(error).__name__}: {error}"
    word = {
        "rank": rank,
        "time": time.time(),
        # A note is what failed besides: a checkpoint in the background.
        "message": "\n".join([message, *getattr(error, "__notes__", ())]),
        "traceback": None if expected else traceback.format_exc(),
        "exit_code": error.exit_code if isinstance(error, ZooError) else 1,
    }
    try:
        (out / ERRORS_FOLDER).mkdir(exist_ok=True)
        write_json(out / ERRORS_FOLDER / f"rank{rank}.json", word)
    except (OSError, ZooError):
        # A full disk takes no file and no log, but the first rank's standard output is the terminal.
        print(word["message"], flush=True)
    print(word["traceback"] or word["message"], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

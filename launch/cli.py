"""The `launch` command. Only click is imported up front: `launch --help` has to answer at once; work is imported when asked for."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from ckpt.command import run_command
from core.errors import RequestError

EPILOG = """\b
Exit codes: 0 done, 1 the job failed, 2 the request was wrong.
Ctrl-C (or SIGTERM) saves a checkpoint and ends; --resume goes on with the losses of an uninterrupted run.

\b
  launch mixtral                                  a small Mixtral on this machine's cores, on real text
  launch qwen3 --data my_texts/ --steps 500
  launch deepseek_v3 --set train.global_batch=32 --set model.moe.top_k=4 --dry-run
  launch plan deepseek_v3 --hw gb200              what a job on 256 GPUs would hold, send and take, from a laptop
  launch plan deepseek_v3 --hw h100 --gpus 1024 --search
"""


def setup_options() -> list[click.Parameter]:
    """The options that say which set-up is meant."""
    return [
        click.Option(["--size"], help="Size of the model (see `launch list`)."),
        click.Option(["--hw", "hardware"], metavar="H", help="Hardware, as cpu or gb200; without it, cpu."),
        click.Option(["--preset"], metavar="NAME", help="Set-up by name (see `launch list`); without it, the first."),
        click.Option(["--gpus"], type=int, metavar="N", help="Number of GPUs; the global batch follows it."),
        click.Option(["--ranks"], type=int, metavar="N", help="Number of worker processes; the batch stays."),
        click.Option(
            ["--set", "settings"],
            multiple=True,
            metavar="KEY=VALUE",
            help="Change one setting: model.…, parallel.…, train.…, optimizer.…, data.…, precision.…, memory.…, execution.…, checkpoint.….",
        ),
    ]


def train_options() -> list[click.Parameter]:
    """The options of `launch MODEL`."""
    return [
        *setup_options(),
        click.Option(["--steps"], type=int, metavar="N", help="The step at which this run stops."),
        click.Option(["--data"], metavar="PATH", help="Text, .jsonl(.gz/.zst), .parquet, or a folder of them."),
        click.Option(["--out"], metavar="DIR", help="Folder of the run; without it, one under runs/."),
        click.Option(
            ["--init"],
            metavar="ADDRESS",
            help="Begin with weights that are there: a checkpoint, a run, a Hugging Face folder, a GGUF file.",
        ),
        click.Option(["--resume"], is_flag=True, help="Continue the run in --out from its last checkpoint."),
        click.Option(["--seed"], type=int, metavar="N", help="Seed of the weights and of the data's order."),
        click.Option(["--dtype"], metavar="float32|bfloat16|float16", help="Format of parameters and activations."),
        *place_options(),
        click.Option(["--dry-run"], is_flag=True, help="Print the plan, every setting and the script; start nothing."),
    ]


def place_options() -> list[click.Parameter]:
    """The options that say where a run is started, and how."""
    return [
        click.Option(
            ["--backend"],
            default="local",
            metavar="local|slurm|kubernetes|print",
            help="Where the run is started; without it, here.",
        ),
        click.Option(
            ["--cluster"],
            multiple=True,
            metavar="KEY=VALUE",
            help="An option of the cluster: partition=gpu, time=4:00:00, image=….",
        ),
        click.Option(
            ["--restarts"],
            type=click.IntRange(min=0),
            default=0,
            metavar="N",
            help="Start the workers again after a failure, N times at most.",
        ),
        click.Option(["--yes"], is_flag=True, help="Resume with other settings without being asked."),
    ]


class ModelGroup(click.Group):
    """A group in which the name of a model is a command too."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or the training of the model of that name. Raises RequestError for neither."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            return command
        known = [*model_names(), *self.commands]
        if cmd_name not in model_names():
            close = difflib.get_close_matches(cmd_name, known, n=2)
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            raise RequestError(f"{cmd_name}: is neither a model nor a command.{hint} Works: {', '.join(known)}.")
        help_text = f"Train {cmd_name}: tokens, workers, checkpoints and a report, all in one folder."
        return click.Command(cmd_name, params=train_options(), callback=partial(train, cmd_name), help=help_text)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands, then the models, then what a model takes."""
        self.format_commands(ctx, formatter)
        with formatter.section("Models"):
            formatter.write_text(", ".join(model_names()))
        records = (option.get_help_record(ctx) for option in train_options())
        with formatter.section("Options of launch MODEL"):
            formatter.write_dl([record for record in records if record])


@click.group(cls=ModelGroup, epilog=EPILOG, subcommand_metavar="MODEL|COMMAND [OPTIONS]")
def cli() -> None:
    """Train a Mixture-of-Experts language model: `launch MODEL`."""


@cli.command("list")
def list_models() -> None:
    """Models, sizes and hardware, with total and active parameters."""
    from core.config.family import all_families
    from launch.describe import list_rows
    from launch.tables import print_table

    columns = ("model", "size", "hardware", "parameters", "active", "published as")
    print_table(columns, list(list_rows(all_families())))


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
def report(run: Path) -> None:
    """Draw the report of the run in folder RUN again."""
    from launch.report import write_report

    click.echo(write_report(run))


@cli.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN_A RUN_B [RUN…]")
@click.option(
    "--by", type=click.Choice(["step", "tokens"]), default="step", show_default=True, help="What losses are aligned by."
)
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="A page (.html) or picture to write.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--within",
    type=click.FloatRange(min=0),
    metavar="X",
    help="End with code 1 where a run's final loss, or last validation loss, is further than X from the first's.",
)
def compare(runs: tuple[Path, ...], **options: Any) -> None:
    """Lay the losses of runs over each other: how far they are apart, and what differs in their settings."""
    from launch.compare import show_comparison

    apart = show_comparison(runs, **options)
    if apart:
        click.echo("\n".join(apart), err=True)
        raise click.exceptions.Exit(1)


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--prompt", required=True, help="The text to go on from.")
@click.option("--tokens", type=click.IntRange(min=1), default=100, show_default=True, help="How many to generate.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True)
def sample(run: Path, prompt: str, tokens: int, temperature: float, seed: int) -> None:
    """Generate text with the last checkpoint of the run in folder RUN."""
    from launch.folder import read_run

    read_run(run)
    from launch.worker import sample as generate

    click.echo(generate(run, prompt, tokens, temperature, seed))


@cli.command()
@click.option(
    "--data", metavar="PATH", help="Text, .jsonl(.gz/.zst), .parquet, or a folder; without it, Python's library."
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The new folder of token files.")
@click.option("--vocab", type=click.IntRange(min=257), default=8192, show_default=True, help="Ids of a new tokenizer.")
@click.option("--tokenizer", metavar="FILE", help="A tokenizer.json to use instead of a new one.")
@click.option("--validation-fraction", type=float, default=0.05, show_default=True, help="Share of the documents.")
def prepare(data: str | None, out: Path, vocab: int, tokenizer: str | None, validation_fraction: float) -> None:
    """Tokenise a corpus into memory-mapped files, documents kept apart; give the folder to --data."""
    from core.data.tokens import prepare as prepare_tokens

    files = prepare_tokens(
        source=data, out=out, vocab=vocab, tokenizer=tokenizer, validation_fraction=validation_fraction
    )
    train, validation = len(files.train.tokens), len(files.validation.tokens)
    click.echo(f"{files.folder}: {train:,} tokens to train on, {validation:,} to validate on, {files.vocab} ids")


def with_setup(command: Callable[..., None]) -> Callable[..., None]:
    """A command's function with the options that say which set-up is meant; they reach it by the names of Request's fields."""
    for option in reversed(setup_options()):
        assert isinstance(option, click.Option)
        known: dict[str, Any] = {"help": option.help, "type": option.type, "metavar": option.metavar}
        command = click.option(*option.opts, str(option.name), multiple=option.multiple, **known)(command)
    return command


@cli.command()
@click.argument("model")
@with_setup
@click.option("--search", is_flag=True, help="Find the best mapping of so many GPUs, and say why the others lose.")
@click.option(
    "--explain", "key", metavar="KEY", help="What a setting means, where it comes from, what else it could be."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--startable", is_flag=True, help="Search only among what can start today.")
@click.option("--table3", is_flag=True, help="Memory as Table 3 of the report counts it.")
@click.option("--html", "page", type=click.Path(path_type=Path), metavar="FILE", help="Write a page to look at.")
def plan(model: str, key: str | None, **options: Any) -> None:
    """Say what MODEL would hold, send and take on some hardware; start nothing."""
    from launch.plan.show import Wanted, show_plan
    from launch.request import Request

    wanted = {name: options.pop(name) for name in ("search", "startable", "as_json", "table3", "page")}
    show_plan(model, Request(**options), Wanted(key=key, **wanted))


@cli.command()
@click.argument("model")
@with_setup
@click.option(
    "--microbatches", type=click.IntRange(min=1), metavar="N", help="Of a step; without it, those of the run."
)
@click.option(
    "--costs",
    default="",
    metavar="TEXT",
    help="equal (parts, instead of by their operations), forward=1, backward=2, input_gradient=1, weight_gradient=1, "
    "transfer=0, overlap=0 (share that combined actions save); comma-separated.",
)
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="A picture to draw: .png, .svg or .pdf.")
def schedule(model: str, microbatches: int | None, costs: str, out: Path | None, **request: Any) -> None:
    """Prove, time and draw the pipeline schedule of MODEL."""
    from launch.request import Request
    from launch.schedule import show_schedule

    show_schedule(model, Request(**request), microbatches, costs, out)


@cli.command()
@click.argument("model", required=False)
@with_setup
@click.option("--import", "imports", is_flag=True, help="Import torch and the packages too, which takes a while.")
def doctor(model: str | None, imports: bool, **request: Any) -> None:
    """Check this machine against what MODEL, or a kind of hardware, needs: devices, driver, packages, limits, folders.

    Ends with code 1 where something is missing, and says how to get it.
    """
    from launch.doctor import doctor as examine
    from launch.request import Request

    if not examine(model, Request(**request), imports=imports):
        raise click.exceptions.Exit(1)


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
def status(run: Path) -> None:
    """Say what the run in folder RUN is doing, wherever it was started."""
    from launch.jobs import status as status_of
    from launch.jobs import status_text

    click.echo(status_text(run, status_of(run)))


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--rank", type=int, metavar="N", help="Of this rank; without it, of rank 0 and what started it.")
@click.option("--follow", is_flag=True, help="Go on as it is written, until the run ends.")
def logs(run: Path, rank: int | None, follow: bool) -> None:
    """Print what a rank of the run in folder RUN has written."""
    from launch.jobs import logs as print_logs

    print_logs(run, rank, follow)


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
def stop(run: Path) -> None:
    """Have the run in folder RUN save a checkpoint and end, wherever it runs."""
    from launch.jobs import stop as stop_run

    click.echo(stop_run(run))


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--steps", type=int, metavar="N", help="The step at which the run stops.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change one setting, as in launch MODEL.")
@click.option(
    "--cluster", multiple=True, metavar="KEY=VALUE", help="Options of the cluster instead of those of before."
)
@click.option("--yes", is_flag=True, help="Resume with other settings without being asked.")
def resume(run: Path, steps: int | None, settings: tuple[str, ...], cluster: tuple[str, ...], yes: bool) -> None:
    """Start the run in folder RUN again from its last checkpoint, where it was started last."""
    from launch.start import resume as start_again

    start_again(run, {"steps": steps, "settings": settings}, cluster=cluster, yes=yes)


def train(model: str, **options: Any) -> None:
    """Plan the run, and start it unless it is a dry run."""
    from launch.start import Start, start

    out, init = options.pop("out"), options.pop("init")
    resume, dry_run = options.pop("resume"), options.pop("dry_run")
    folder = Path(out) if out else None
    place = {name: options.pop(name) for name in ("backend", "cluster", "restarts", "yes")}
    start(Start(model=model, out=folder, resume=resume, dry_run=dry_run, options=options, init=init, **place))


def model_names() -> tuple[str, ...]:
    """The packages in `models/`, found without importing any."""
    import models

    return tuple(sorted(module.name for module in pkgutil.iter_modules(models.__path__) if module.ispkg))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and end the process: a user's mistake is a message and exit code 2, never a traceback."""
    run_command(cli, "launch", arguments, interrupted="interrupted")


if __name__ == "__main__":
    main()

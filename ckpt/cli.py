"""The `ckpt` command. Only click is imported up front: `ckpt --help` has to answer at once; work is imported when asked for."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from ckpt.command import run_command
from ckpt.files.url import is_remote
from ckpt.memory import keep_freed_memory, workers_that_fit
from core.errors import RequestError

EPILOG = """\b
An address is a folder or the URL of an object store (s3://bucket/…); that of a run means its latest checkpoint.
Exit codes: 0 done (diff: equal), 1 damaged, failed (diff: different), 2 the request was wrong.
What is killed can be run again: it goes on where it stopped.

\b
  ckpt inspect runs/a                             what is in the latest checkpoint of a run
  ckpt diff runs/a runs/b --model-only
  ckpt reshard runs/a ready/ --set parallel.tp=4 --set parallel.ep=8
  ckpt convert hf_folder/ start/ --to zarr --memory 1GiB
  ckpt export runs/a hf_folder/ --dtype bfloat16
"""
UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
MOST_WORKERS = 4
DTYPES = ("float32", "bfloat16", "float16")


class Size(click.ParamType):
    """A number of bytes: 2GiB, 512 MiB, 1.5GB, 1000000."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The bytes."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", value, re.IGNORECASE)
        if not found or found[2].lower() not in UNITS:
            self.fail(f"{value!r} is no number of bytes. Works: 2GiB, 512MiB, 1.5GB, 2000000000.", param, ctx)
        return int(float(found[1]) * UNITS[found[2].lower()])


def memory_options(command: Callable[..., None]) -> Callable[..., None]:
    """--memory and --workers, of every command that reads all of a checkpoint piece by piece."""
    workers = click.option(
        "--workers",
        type=click.IntRange(min=1),
        metavar="N",
        help=f"Processes that work at once; without it, as many as cores and memory allow, {MOST_WORKERS} at most.",
    )
    memory = click.option(
        "--memory", type=Size(), default="2GiB", show_default=True, help="What all processes together may take."
    )
    return memory(workers(command))


def writing_options(command: Callable[..., None]) -> Callable[..., None]:
    """What every command that writes takes."""
    overwrite = click.option("--overwrite", is_flag=True, help="Replace what is there, once the new one is whole.")
    dry_run = click.option(
        "--dry-run", is_flag=True, help="Print the files to be written and their bytes; write nothing."
    )
    return memory_options(overwrite(dry_run(command)))


def store_options(command: Callable[..., None]) -> Callable[..., None]:
    """How a checkpoint of the zoo is laid out."""
    codec = click.option(
        "--codec", type=click.Choice(["raw", "zstd"]), help="Compress with zstd (zarr only), or not (raw)."
    )
    return codec(command)


mtp_option = click.option(
    "--mtp",
    type=click.Choice(["as_stored", "keep", "drop"]),
    default="as_stored",
    show_default=True,
    help="Multi-token prediction modules of a Hugging Face folder: if it has them, in any case, or never.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")


@click.group(epilog=EPILOG)
def cli() -> None:
    """Look at checkpoints, check, compare, reshard, convert and export them, and make experts of a dense model."""


@cli.command()
@click.argument("checkpoint")
@json_option
@click.option("--all", "everything", is_flag=True, help="A line per tensor, instead of what is alike in one.")
def inspect(checkpoint: str, as_json: bool, everything: bool) -> None:
    """Show what is in CHECKPOINT: a checkpoint, a run, a Hugging Face folder, a GGUF file, a torch checkpoint."""
    from ckpt import tree

    content = tree.content_of(checkpoint)
    if as_json:
        click.echo(tree.as_json(content))
        return
    for line in tree.as_text(content, everything=everything):
        click.echo(line)


@cli.command()
@click.argument("checkpoint")
def verify(checkpoint: str) -> None:
    """Read CHECKPOINT against its checksums and name every damage, one a line; exit code 1 if there is any."""
    from ckpt.bar import bar, size
    from ckpt.recognise import recognise
    from ckpt.verify import bytes_to_verify
    from ckpt.verify import verify as find_damage

    found = recognise(checkpoint)
    if found.kind != "checkpoint":
        raise RequestError(f"{checkpoint}: has no checksums; only a checkpoint of the zoo can be verified.")
    total, done = bytes_to_verify(found.address), 0
    with bar("verifying") as progress:

        def read(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total)

        damages = find_damage(found.address, read)
    for damage in damages:
        click.echo(str(damage))
    if damages:
        click.echo(f"{found.address}: {len(damages)} damaged", err=True)
        sys.exit(1)
    click.echo(f"{found.address}: nothing is damaged ({size(total)})")


@cli.command()
@click.argument("a")
@click.argument("b")
@json_option
@click.option("--all", "everything", is_flag=True, help="A line for tensors too that do not differ.")
@click.option("--model-only", is_flag=True, help="Leave optimizer states out.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    metavar="X",
    help="The largest absolute difference that counts as none; with it, values alone count, not element types.",
)
@memory_options
def diff(
    a: str,
    b: str,
    as_json: bool,
    everything: bool,
    model_only: bool,
    tolerance: float | None,
    memory: int,
    workers: int | None,
) -> None:
    """Compare A with B tensor by tensor, whatever formats and mappings they have; exit code 1 if they differ."""
    from ckpt import differ

    asked = differ.Asked(
        model_only=model_only, tolerance=tolerance, memory_bytes=memory, workers=workers_for(memory, workers)
    )
    found = differ.compare_addresses(a, b, asked)
    if as_json:
        click.echo(differ.as_json(a, b, found))
    else:
        for line in differ.as_text(found, everything=everything):
            click.echo(line)
    if not differ.all_same(found):
        sys.exit(1)


@cli.command()
@click.argument("src")
@click.argument("dst")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change one setting of the mapping that it was saved with: parallel.tp=4, parallel.ep=8, ….",
)
@click.option("--store", type=click.Choice(["zarr", "torch_dist"]), help="Without it, that of SRC.")
@store_options
@mtp_option
@writing_options
def reshard(
    src: str, dst: str, settings: tuple[str, ...], store: str | None, codec: str | None, mtp: Any, **work: Any
) -> None:
    """Write SRC to DST in the pieces that the ranks of another mapping read, each from files of its own."""
    from ckpt import offline
    from ckpt.described import mapping_text
    from ckpt.opening import open_any

    opened = open_any(src, mtp)
    streaming = offline.streaming_for(opened, store, codec, **_effort(work, dst))
    job, parallel = offline.reshard_job(opened, dst, streaming, settings)
    click.echo(f"for ranks of {mapping_text(parallel)}")
    offline.carry_out(job, click.echo, dry_run=work["dry_run"])


@cli.command()
@click.argument("src")
@click.argument("dst")
@click.option("--to", required=True, type=click.Choice(["zarr", "torch_dist", "hf"]), help="The format of DST.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of all parameters; without it, as they are.")
@store_options
@mtp_option
@writing_options
def convert(src: str, dst: str, to: str, dtype: str | None, codec: str | None, mtp: Any, **work: Any) -> None:
    """Write SRC, whatever format it has, to DST in another."""
    from ckpt import offline
    from ckpt.opening import open_any

    opened = open_any(src, mtp)
    if to == "hf":
        offline.publish(
            opened, dst, dtype=dtype, family=None, say=click.echo, **_effort(work, dst), dry_run=work["dry_run"]
        )
        return
    streaming = offline.streaming_for(opened, to, codec, **_effort(work, dst))
    offline.carry_out(offline.convert_job(opened, dst, streaming, dtype), click.echo, dry_run=work["dry_run"])


@cli.command()
@click.argument("src")
@click.argument("out")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32", "float8_blocks"]),
    help="Of the weights; float8_blocks: in scaled blocks of 128 x 128. Without it, as they are.",
)
@click.option("--family", metavar="MODEL", help="Whose format it gets, where several could express the model.")
@mtp_option
@writing_options
def export(src: str, out: str, dtype: str | None, family: str | None, mtp: Any, **work: Any) -> None:
    """Write SRC to OUT as a Hugging Face folder: config, tokenizer, safetensors and their index."""
    from ckpt import offline
    from ckpt.opening import open_any

    opened = open_any(src, mtp)
    offline.publish(
        opened, out, dtype=dtype, family=family, say=click.echo, **_effort(work, out), dry_run=work["dry_run"]
    )


@cli.command()
@click.argument("dense")
@click.argument("out")
@click.option("--model", required=True, metavar="MODEL", help="The model of the zoo whose router and format it gets.")
@click.option(
    "--experts", required=True, type=int, metavar="E", help="Routed experts of a layer: copies x granularity."
)
@click.option("--top-k", required=True, type=int, metavar="K", help="Experts that a token uses.")
@click.option("--granularity", type=int, default=1, show_default=True, help="Pieces into which the dense FFN is cut.")
@click.option(
    "--scaling",
    type=click.Choice(["exact", "cube_root"]),
    default="exact",
    show_default=True,
    help="Where the factor goes that makes the outputs those of the dense model: on one matrix, or on all three.",
)
@click.option(
    "--normalise/--no-normalise", default=None, help="Divide router weights by their sum; without it, as MODEL."
)
@click.option("--noise", type=float, metavar="STD", help="Noise on all copies but the first.")
@click.option("--shared", type=int, metavar="N", help="A shared expert from the first N pieces of the dense FFN.")
@click.option("--shared-share", type=float, default=0.5, show_default=True, help="Its part of their output.")
@click.option(
    "--layers", default="all", show_default=True, help='Layers that get experts: "all", "every 2" or 0,3,5-7.'
)
@click.option(
    "--router-std", type=float, metavar="STD", help="Of the router's random rows; without it, as other matrices."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of router and noise.")
@click.option(
    "--to", type=click.Choice(["zarr", "torch_dist"]), default="zarr", show_default=True, help="The store of OUT."
)
@store_options
@writing_options
def upcycle(dense: str, out: str, to: str, codec: str | None, **asked: Any) -> None:
    """Make a mixture of experts of DENSE, a dense Hugging Face folder or GGUF file, that gives the same outputs at first."""
    from ckpt import offline

    work = {name: asked.pop(name) for name in ("memory", "workers", "overwrite", "dry_run")}
    streaming = offline.streaming_for(None, to, codec, **_effort(work, out))
    offline.upcycle(dense, out, streaming, say=click.echo, dry_run=work["dry_run"], **asked)


def _effort(work: dict[str, Any], target: str) -> dict[str, Any]:
    """Memory, workers and whether to overwrite, as the work takes them."""
    memory, workers = work["memory"], workers_for(work["memory"], work["workers"], uploads=is_remote(target))
    return {"memory_bytes": memory, "workers": workers, "overwrite": work["overwrite"]}


def workers_for(memory_bytes: int, asked: int | None, *, uploads: bool = False) -> int:
    """The processes to use where the user does not say: one per core, as far as memory goes."""
    return asked or min(MOST_WORKERS, os.cpu_count() or 1, workers_that_fit(memory_bytes, uploads))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and end the process: a user's mistake is a message and exit code 2, never a traceback."""
    keep_freed_memory()
    run_command(cli, "ckpt", arguments, interrupted="interrupted; the same command goes on where this one stopped")


if __name__ == "__main__":
    main()

"""`--backend NAME --cluster KEY=VALUE …` as a back end."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import click

from core.errors import ConfigError, Fault, RequestError
from launch.backends.kubernetes import KubernetesBackend, KubernetesOptions
from launch.backends.local import LocalBackend
from launch.backends.options import parse_options, wrong
from launch.backends.protocol import Backend, Job, Outcome, Script, State
from launch.backends.slurm import SlurmBackend, SlurmOptions

LOCAL, SLURM, KUBERNETES, PRINT = BACKENDS = ("local", "slurm", "kubernetes", "print")
SCHEDULER = "scheduler"


class PrintBackend:
    """Prepares a run and prints the script that would start it, to the byte what the cluster's own back end submits."""

    def __init__(self, cluster: Backend) -> None:
        self._cluster = cluster

    def refuse(self, job: Job) -> None:
        """Raises ConfigError where the options do not fit the job."""
        self.script(job)

    def script(self, job: Job) -> Script | None:
        """The cluster's script."""
        return self._cluster.script(job)

    def start(self, job: Job) -> Outcome:
        """Print the script, and nothing else."""
        script = self.script(job)
        assert script is not None, "only what submits a script can be printed"
        click.echo(script.text, nl=False)
        return Outcome(ended="printed")

    def state(self, job: str) -> State:
        """Nobody knows where a script went that was only printed."""
        return State(where="gone", words="only printed; what became of it is known to whoever submitted it")

    def stop(self, job: str) -> None:
        """Raises RequestError: there is nothing to stop."""
        raise RequestError("The script of this run was only printed. Stop the job where you submitted it.")


def choose_backend(name: str, cluster: Sequence[str]) -> Backend:
    """The back end called `name` with the options `cluster`, as typed. Raises ConfigError with every fault."""
    if name not in BACKENDS:
        close = difflib.get_close_matches(name, BACKENDS, n=1)
        rule = "is not a place to run" + (f" (did you mean {close[0]}?)" if close else "")
        fault = Fault(code="backend.known", setting="--backend", value=name, rule=rule, works=", ".join(BACKENDS))
        raise ConfigError([fault])
    if name == SLURM:
        return SlurmBackend(parse_options(SlurmOptions(), cluster))
    if name == KUBERNETES:
        return KubernetesBackend(parse_options(KubernetesOptions(), cluster))
    if name == PRINT:
        return _printed(cluster)
    if cluster:
        rule = "is for a cluster, and --backend is local"
        value = ", ".join(cluster)
        fault = Fault(code="cluster.local", setting="--cluster", value=value, rule=rule, works="--backend slurm")
        raise ConfigError([fault])
    return LocalBackend()


def _printed(cluster: Sequence[str]) -> PrintBackend:
    """The printer of what `--cluster scheduler=slurm|kubernetes` (slurm, where it is not said) would submit."""
    prefix = f"{SCHEDULER}="
    named = [text.removeprefix(prefix) for text in cluster if text.startswith(prefix)] or [SLURM]
    if named[-1] not in (SLURM, KUBERNETES):
        raise wrong(SCHEDULER, named[-1], "is not a scheduler", f"{SLURM}, {KUBERNETES}", SCHEDULER)
    return PrintBackend(choose_backend(named[-1], [text for text in cluster if not text.startswith(prefix)]))

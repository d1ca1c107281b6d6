"""A Slurm of the tests' own: munge, controller and one node, all on the loopback interface, in a folder that goes away again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PACKAGES = ("slurm-wlm", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
# Debian builds Slurm for one node a machine. Its name has to be one that is found: agents meet there.
NODE = "localhost"
WAIT_SECONDS = 30.0

CONFIGURATION = """\
ClusterName=zoo
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
MailProg=/bin/true
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN
PartitionName=patient Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""


class OwnSlurm:
    """Starts it in `folder` on construction; `close` ends it. Raises RuntimeError with what its daemons said where it does not come up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        for name in ("state", "munge", "spool"):
            (folder / name).mkdir(parents=True, mode=0o700)
        controller, port = _free_ports(2)
        self.user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        names = {"folder": folder, "user": self.user, "host": socket.gethostname(), "node": NODE}
        text = CONFIGURATION.format(controller=controller, port=port, **names)
        (folder / "slurm.conf").write_text(text)
        if _version() >= (23,):
            (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        munge = self.folder / "munge"
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o600)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={munge / name}" for option, name in files.items()]
        self._daemon("munged", "--foreground", "--force", *options)
        self._wait((munge / "socket").exists, "munged")
        self._daemon("slurmctld", "-D")
        self._daemon("slurmd", "-D", "-N", NODE)
        self._wait(lambda: self.call("sinfo", "-h", "-p", "patient", "-t", "idle", "-o", "%D") == "1", "the node")

    def call(self, *command: str) -> str:
        """What one of Slurm's commands says, without the line's end; nothing where it fails."""
        made = subprocess.run(command, capture_output=True, text=True, check=False, env=self.environment, timeout=30)
        return made.stdout.strip() if made.returncode == 0 else ""

    def close(self) -> None:
        """End every job and every daemon."""
        if len(self._daemons) > 1:
            self.call("scancel", "--full", "--signal=KILL", "--user", self.user)
            self.call("scancel", "--user", self.user)
            end = time.monotonic() + WAIT_SECONDS
            # else its processes would outlive the daemon that ends them
            while self.call("squeue", "--noheader") and time.monotonic() < end:
                time.sleep(0.1)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def logs(self) -> str:
        """The ends of all logs."""
        files = (*sorted(self.folder.glob("*.log")), *sorted(self.folder.glob("*.out")), self.folder / "munge" / "log")
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in files if path.exists())

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{command[0]}-{len(self._daemons)}.out").open("wb") as output:
            started = [_program(command[0]), *command[1:]]
            self._daemons.append(subprocess.Popen(started, stdout=output, stderr=output, env=self.environment))

    def _wait(self, ready: Callable[[], object], what: str) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not ready():
            if time.monotonic() > end or any(daemon.poll() is not None for daemon in self._daemons):
                raise RuntimeError(f"{what} did not come up\n{self.logs()}")
            time.sleep(0.1)


def missing() -> str:
    """Why there can be no Slurm here; empty where its programs are there, installed now if need be and if that is possible."""
    if not _absent():
        return ""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"{_absent()} not installed, and only root may install {', '.join(PACKAGES)} with apt-get"
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=60", "install", "-y", "--no-install-recommends", *PACKAGES]
    for before in (None, ["apt-get", "-q", "update"]):
        if before is not None:
            subprocess.run(before, capture_output=True, check=False, env=quiet, timeout=120)
        made = subprocess.run(command, capture_output=True, text=True, check=False, env=quiet, timeout=180)
        if made.returncode == 0 and not _absent():
            return ""
    return f"apt-get cannot install {', '.join(PACKAGES)}: {made.stderr.strip()[-300:]}"


def _absent() -> str:
    return ", ".join(name for name in PROGRAMS if not _program(name))


def _program(name: str) -> str:
    """Its path, also where daemons are not on the user's own; empty where it is not there."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""


def _version() -> tuple[int, ...]:
    said = subprocess.run([_program("slurmd"), "-V"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, re.findall(r"\d+", said)[:2]))


def _free_ports(count: int) -> list[int]:
    holders = [socket.socket() for _ in range(count)]
    for holder in holders:
        holder.bind(("127.0.0.1", 0))
    ports = [holder.getsockname()[1] for holder in holders]
    for holder in holders:
        holder.close()
    return ports

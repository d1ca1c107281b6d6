"""Kubernetes: one pod a node, in an indexed Job (batch/v1) or a JobSet (jobset.x-k8s.io/v1alpha2), rendered as YAML.

Pods find the first of them by its name in a headless Service, where their agents meet. A pod that is taken away gets SIGTERM and
`grace` seconds, in which all workers save; every agent then ends with exit code 75, on which the pods are made again without being
counted as failures. A Job makes single pods again, and what a lost node breaks on the others fails it, unless `--restarts` has
them wait for its return; a JobSet makes all pods again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launch.backends.options import Nodes, divide, wrong
from launch.backends.protocol import STARTED_AGAIN_CODE, Job, Outcome, Script, State
from launch.backends.tools import answer, need
from launch.folder import SUBMISSION_FILE

SCRIPT_FILE = "job.yaml"
CONTAINER = "agent"
PORT = 29_400
INDEX = "JOB_COMPLETION_INDEX"
# Names are labels of DNS, at most 63 long, to which a JobSet adds that of its part, two numbers and five letters.
LONGEST_NAME = 40
# What needs no quotes as a key, but for the words that YAML takes for truth values and nothing.
PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z0-9./-]*")
WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null"])


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """What a Kubernetes cluster is told beside the job.

    image: of a container with the zoo and its packages. mounts: CLAIM:/PATH, several by commas: volumes under the same paths as here,
    which hold the run's folder and the tokens. kind: a Job, which every cluster has, or a JobSet. grace: seconds in which workers save
    when a pod is taken away. queue: of Kueue. selector: LABEL=VALUE of the nodes, several by commas. memory, cpus: of every pod.
    resources: further ones, NAME=NUMBER, several by commas.
    """

    image: str | None = None
    mounts: str | None = None
    kind: Literal["job", "jobset"] = "job"
    namespace: str | None = None
    grace: int = 300
    nodes: int | None = None
    queue: str | None = None
    priority: str | None = None
    selector: str = ""
    memory: str | None = None
    cpus: int | None = None
    resources: str = ""
    python: str = "python3"


class KubernetesBackend:
    """Submits jobs with kubectl."""

    def __init__(self, options: KubernetesOptions) -> None:
        self._options = options

    def refuse(self, job: Job) -> None:
        """Raises RequestError where there is no kubectl here, ConfigError where the options do not fit the job."""
        self.script(job)
        need("kubectl", "kubernetes", "Run this where the cluster can be reached")

    def script(self, job: Job) -> Script:
        """The manifest. Raises ConfigError where the options do not fit the job."""
        options, nodes = self._options, divide(job, self._options.nodes)
        mounts = _mounts(options, job)
        make = _job_set if options.kind == "jobset" else _service_and_job
        documents = make(options, job, nodes, mounts)
        return Script(name=SCRIPT_FILE, text="---\n".join(yaml_text(document) for document in documents))

    def start(self, job: Job) -> Outcome:
        """Apply the manifest in the run's folder; what an earlier start of this run left there is removed first, since it cannot change.

        Raises RequestError with kubectl's own words.
        """
        script = str(job.out / SCRIPT_FILE)
        if (job.out / SUBMISSION_FILE).exists():
            answer(["kubectl", "delete", "--ignore-not-found", "--wait", "-f", script])
        answer(["kubectl", "apply", "-f", script])
        return Outcome(ended="submitted", job=job_name(job))

    def state(self, job: str) -> State:
        """What the cluster says. Raises RequestError where it does not answer."""
        said = answer(
            ["kubectl", "get", self._options.kind, job, *self._namespace(), "--ignore-not-found", "-o", "json"]
        )
        if not said.strip():
            return State(where="gone", words="not on the cluster any more")
        status = json.loads(said).get("status", {})
        ended = {c["type"] for c in status.get("conditions", []) if c.get("status") == "True"} & {
            "Complete",
            "Completed",
            "Failed",
        }
        if ended:
            return State(where="gone", words=min(ended).lower())
        parts = status.get("replicatedJobsStatus", [status])
        running = any(part.get("ready") for part in parts)
        return State(where="running" if running else "waiting", words="running" if running else "waiting for its pods")

    def stop(self, job: str) -> None:
        """Remove the job; its pods get SIGTERM and the time to save."""
        answer(["kubectl", "delete", self._options.kind, job, *self._namespace(), "--ignore-not-found", "--wait=false"])

    def _namespace(self) -> list[str]:
        return ["--namespace", self._options.namespace] if self._options.namespace else []


def job_name(job: Job) -> str:
    """A name for the run's objects: of its folder, and unlike that of any other folder of the same name."""
    path = str(job.out.absolute())
    stem = re.sub(r"[^a-z0-9]+", "-", job.out.name.lower()).strip("-")
    mark = hashlib.sha256(path.encode()).hexdigest()[:6]
    # a name begins with a letter
    return f"run-{stem}"[: LONGEST_NAME - 7].strip("-") + f"-{mark}"


def yaml_text(value: Any, indent: int = 0) -> str:
    """Mappings, sequences, text, numbers and truth values as YAML: a line a value, text in the quotes of JSON, which are YAML's too."""
    return "".join(f"{' ' * indent}{line}\n" for line in _lines(value))


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            plain = PLAIN_KEY.fullmatch(key) and key.lower() not in WORDS
            name = key if plain else json.dumps(key, ensure_ascii=False)
            yield from _below(f"{name}:", item)
    elif isinstance(value, list) and value:
        for item in value:
            first, *rest = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        # of what JSON leaves as it is, YAML takes these for line breaks
        text = json.dumps(value, ensure_ascii=False)
        for character in "\x7f\x85\u2028\u2029\ufeff":
            text = text.replace(character, f"\\u{ord(character):04x}")
        yield text


def _below(name: str, value: Any) -> Iterator[str]:
    """A value behind its name, or on the lines below it."""
    if isinstance(value, (Mapping, list)) and value:
        yield name
        yield from (f"  {line}" for line in _lines(value))
    else:
        yield f"{name} {next(_lines(value))}"


def _service_and_job(
    options: KubernetesOptions, job: Job, nodes: Nodes, mounts: Sequence[tuple[str, str]]
) -> list[Any]:
    name = job_name(job)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(options, name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
        },
    }
    pod = _pod(options, job, nodes, mounts, f"{name}-0.{name}:{PORT}")
    spec = _job_spec(nodes, {**pod, "subdomain": name}, "Ignore")
    metadata = _metadata(options, name)
    if options.queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = options.queue
    return [service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}]


def _job_set(options: KubernetesOptions, job: Job, nodes: Nodes, mounts: Sequence[tuple[str, str]]) -> list[Any]:
    """A JobSet makes the Service itself, and calls its pods NAME-nodes-0-NUMBER."""
    name, part = job_name(job), "nodes"
    pod = _pod(options, job, nodes, mounts, f"{name}-{part}-0-0.{name}:{PORT}")
    metadata = _metadata(options, name)
    if options.queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = options.queue
    rule = {
        "name": "saved",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": job.restarts, "rules": [rule]},
        "replicatedJobs": [{"name": part, "replicas": 1, "template": {"spec": _job_spec(nodes, pod, "FailJob")}}],
    }
    return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}]


def _job_spec(nodes: Nodes, pod: Mapping[str, Any], saved: str) -> dict[str, Any]:
    """`saved`: what a Job does when a pod was taken away, or ended with everything saved; any other failure ends it."""
    again = {"containerName": CONTAINER, "operator": "In", "values": [STARTED_AGAIN_CODE]}
    rules = [
        {"action": saved, "onExitCodes": again},
        {"action": saved, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "completionMode": "Indexed",
        "completions": nodes.count,
        "parallelism": nodes.count,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": pod},
    }


def _pod(
    options: KubernetesOptions, job: Job, nodes: Nodes, mounts: Sequence[tuple[str, str]], meeting: str
) -> dict[str, Any]:
    restarts = ["--restarts", str(job.restarts)] if job.restarts else []
    command = [options.python, "-P", "-m", "launch.agent", str(job.out.absolute()), "--nodes", str(nodes.count)]
    command += ["--node-variable", INDEX, "--meeting", meeting, "--job", job_name(job), *restarts]
    variables = [(name, value) for name, value, _ in job.environment]
    if _visible(job.code, mounts):
        variables.append(("PYTHONPATH", str(job.code)))
    limits: dict[str, Any] = {"nvidia.com/gpu": nodes.ranks} if job.cuda else {}
    limits |= {"memory": options.memory} if options.memory else {}
    limits |= {"cpu": options.cpus} if options.cpus else {}
    limits |= _pairs("resources", options.resources)
    container = {
        "name": CONTAINER,
        "image": options.image,
        # Kubernetes replaces $(NAME), and takes $$ for one $
        "command": [word.replace("$", "$$") for word in command],
        "env": [{"name": name, "value": value.replace("$", "$$")} for name, value in variables],
        "resources": {"limits": limits},
        "volumeMounts": [
            {"name": "memory", "mountPath": "/dev/shm"},
            *({"name": f"claim{number}", "mountPath": path} for number, (_, path) in enumerate(mounts)),
        ],
    }
    volumes: list[Any] = [{"name": "memory", "emptyDir": {"medium": "Memory"}}]
    for number, (claim, _) in enumerate(mounts):
        volumes.append({"name": f"claim{number}", "persistentVolumeClaim": {"claimName": claim}})
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace,
        "containers": [container],
        "volumes": volumes,
    }
    if options.priority:
        pod["priorityClassName"] = options.priority
    if options.selector:
        pod["nodeSelector"] = _pairs("selector", options.selector)
    return pod


def _metadata(options: KubernetesOptions, name: str) -> dict[str, Any]:
    space = {"namespace": options.namespace} if options.namespace else {}
    return {"name": name, **space, "labels": {"app.kubernetes.io/part-of": "moe-zoo"}}


def _mounts(options: KubernetesOptions, job: Job) -> list[tuple[str, str]]:
    """(claim, path). Raises ConfigError where there is no image, or where pods would not see the run's folder or its tokens."""
    if options.image is None:
        raise wrong("image", "none", "has to name a container with the zoo", "image=registry/name:tag", "image")
    if options.grace < 1:
        raise wrong("grace", options.grace, "must leave the workers some seconds to save", "300", "grace")
    found = []
    for text in (options.mounts or "").split(","):
        claim, _, path = text.partition(":")
        if text and not (claim and path.startswith("/")):
            raise wrong("mounts", text, "is not of the form CLAIM:/PATH", "mounts=data:/data", "mounts")
        if text:
            found.append((claim, path))
    for needed in (job.out.absolute(), *job.reads):
        if not _visible(needed, found):
            rule = f"has no volume in which pods see {needed}"
            works = f"mounts=CLAIM:{needed.parent}, or a place that is on a volume"
            raise wrong("mounts", options.mounts or "none", rule, works, "mounts")
    return found


def _visible(path: Path, mounts: Sequence[tuple[str, str]]) -> bool:
    return any(path.is_relative_to(mount) for _, mount in mounts)


def _pairs(key: str, text: str) -> dict[str, Any]:
    """`NAME=VALUE,…`. Raises ConfigError where a part has no value."""
    found = {}
    for pair in filter(None, text.split(",")):
        name, sign, value = pair.partition("=")
        if not (name and sign and value):
            raise wrong(key, pair, "is not of the form NAME=VALUE", f"{key}=name=value", "pairs")
        found[name] = value
    return found

"""Manifests for Kubernetes: read by a YAML parser of others, and held against the fields that the two APIs have."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError, RequestError
from launch.backends.choose import choose_backend
from launch.backends.kubernetes import job_name, yaml_text
from launch.backends.protocol import Job
from tests.launch.test_backends import fake_tools

# comes with transformers
yaml = pytest.importorskip("yaml")

JOB = Job(
    ranks=16, out=Path("/data/runs/My Run_1"), cuda=True, gpus_per_node=8, domain=8, expert_ranks=16, code=Path("/zoo")
)
PLACE = ("image=zoo:1", "mounts=shared:/data")

# Of the objects that are made, every field with the type of its value, as in the references of batch/v1, core/v1 and of
# jobset.x-k8s.io/v1alpha2 (github.com/kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go). A tuple is a choice.
POD = {
    "restartPolicy": ("Never", "OnFailure"),
    "terminationGracePeriodSeconds": int,
    "subdomain": str,
    "priorityClassName": str,
    "nodeSelector": {str: str},
    "containers": [
        {
            "name": str,
            "image": str,
            "command": [str],
            "env": [{"name": str, "value": str}],
            "resources": {"limits": {str: (int, str)}},
            "volumeMounts": [{"name": str, "mountPath": str}],
        }
    ],
    "volumes": [{"name": str, "emptyDir": {"medium": str}, "persistentVolumeClaim": {"claimName": str}}],
}
METADATA = {"name": str, "namespace": str, "labels": {str: str}}
JOB_SPEC = {
    "completionMode": ("Indexed", "NonIndexed"),
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "podFailurePolicy": {
        "rules": [
            {
                "action": ("Ignore", "FailJob", "Count", "FailIndex"),
                "onExitCodes": {"containerName": str, "operator": ("In", "NotIn"), "values": [int]},
                "onPodConditions": [{"type": str, "status": str}],
            }
        ]
    },
    "template": {"spec": POD},
}
FIELDS: dict[str, Any] = {
    "Service": {
        "apiVersion": ("v1",),
        "kind": ("Service",),
        "metadata": METADATA,
        "spec": {"clusterIP": str, "publishNotReadyAddresses": bool, "selector": {str: str}},
    },
    "Job": {"apiVersion": ("batch/v1",), "kind": ("Job",), "metadata": METADATA, "spec": JOB_SPEC},
    "JobSet": {
        "apiVersion": ("jobset.x-k8s.io/v1alpha2",),
        "kind": ("JobSet",),
        "metadata": METADATA,
        "spec": {
            "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool},
            "failurePolicy": {
                "maxRestarts": int,
                "rules": [
                    {
                        "name": str,
                        "action": ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
                        "onJobFailureReasons": [str],
                    }
                ],
            },
            "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB_SPEC}}],
        },
    },
}


def misfits(value: Any, fields: Any, path: str = "") -> list[str]:
    """Where a value is not what its fields say."""
    if isinstance(fields, tuple):
        return [] if value in fields or type(value) in fields else [f"{path}: {value!r}"]
    if isinstance(fields, list):
        if not isinstance(value, list):
            return [f"{path}: no list"]
        return [line for number, item in enumerate(value) for line in misfits(item, fields[0], f"{path}[{number}]")]
    if isinstance(fields, dict):
        if not isinstance(value, dict):
            return [f"{path}: no mapping"]
        known = {name: fields.get(name, fields.get(str)) for name in value}
        return [
            line
            for name, item in value.items()
            for line in (
                [f"{path}.{name}: unknown"] if known[name] is None else misfits(item, known[name], f"{path}.{name}")
            )
        ]
    return [] if type(value) is fields else [f"{path}: {value!r} is no {fields.__name__}"]


def documents(job: Job, *options: str) -> list[Any]:
    script = choose_backend("kubernetes", (*PLACE, *options)).script(job)
    assert script is not None
    found = list(yaml.safe_load_all(script.text))
    for document in found:
        assert misfits(document, FIELDS[document["kind"]]) == []
    return found


def test_the_check_of_fields_finds_what_is_wrong() -> None:
    assert misfits(
        {"kind": "Job", "spec": {"completions": "2", "retries": 1}}, {"kind": ("Job",), "spec": JOB_SPEC}
    ) == [
        ".spec.completions: '2' is no int",
        ".spec.retries: unknown",
    ]


def test_a_job_has_a_pod_for_every_node_that_meet_at_the_first_by_its_name_in_a_headless_service() -> None:
    service, job = documents(
        JOB, "namespace=ml", "queue=fast", "priority=high", "selector=gpu=h100,zone=a", "resources=rdma/ib=8"
    )
    name = job_name(JOB)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 40
    assert service["spec"]["clusterIP"] == "None" and service["metadata"]["name"] == name
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert job["metadata"]["namespace"] == "ml" and job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "fast"
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    pod = spec["template"]["spec"]
    assert (pod["subdomain"], pod["priorityClassName"]) == (name, "high")
    assert pod["nodeSelector"] == {"gpu": "h100", "zone": "a"}
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/ib": "8"}
    assert container["command"] == [
        *("python3", "-P", "-m", "launch.agent", "/data/runs/My Run_1", "--nodes", "2"),
        *("--node-variable", "JOB_COMPLETION_INDEX", "--meeting", f"{name}-0.{name}:29400", "--job", name),
    ]
    assert {"name": "memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert {"name": "claim0", "persistentVolumeClaim": {"claimName": "shared"}} in pod["volumes"]


def test_pods_that_saved_or_were_taken_away_are_made_again_uncounted_and_other_failures_end_the_job() -> None:
    for kind, action in (("job", "Ignore"), ("jobset", "FailJob")):
        found = documents(replace(JOB, restarts=3), f"kind={kind}", "grace=77")[-1]
        spec = found["spec"] if kind == "job" else found["spec"]["replicatedJobs"][0]["template"]["spec"]
        saved, gone = spec["podFailurePolicy"]["rules"]
        assert saved["action"] == gone["action"] == action
        assert saved["onExitCodes"] == {"containerName": "agent", "operator": "In", "values": [75]}
        assert gone["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        assert spec["backoffLimit"] == 0
        pod = spec["template"]["spec"]
        assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] == 77
        assert pod["containers"][0]["command"][-2:] == ["--restarts", "3"]
    (rule,) = found["spec"]["failurePolicy"]["rules"]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"] and rule["action"].endswith("IgnoreMaxRestarts")
    assert found["spec"]["failurePolicy"]["maxRestarts"] == 3
    assert f"{job_name(JOB)}-nodes-0-0.{job_name(JOB)}:29400" in pod["containers"][0]["command"]
    assert "subdomain" not in pod  # the JobSet puts it there


def test_values_arrive_as_they_are_whatever_they_hold() -> None:
    odd = 'it\'s "$(HOME)" $5: {a}, - #x é \\n 漢 😀 \u2028 no'
    job = replace(JOB, out=Path(f"/data/{odd}"), environment=(("A", odd, "why"), ("B", "on", ""), ("C", "1", "")))
    (container,) = documents(job, "python=yes")[-1]["spec"]["template"]["spec"]["containers"]
    shown = [word.replace("$$", "$") for word in container["command"]]
    assert shown[0] == "yes" and shown[4] == f"/data/{odd}"
    assert "$(" not in container["command"][4].replace("$$", "")
    values = {entry["name"]: entry["value"].replace("$$", "$") for entry in container["env"]}
    assert values == {"A": odd, "B": "on", "C": "1"}


@pytest.mark.parametrize(
    "value",
    [
        {
            "a": [],
            "b": {},
            "c": [[1, 2], []],
            "d": [{"x": [{"y": None}], "z": True}],
            "e": 1.5,
            "null": "~",
            "0": "0x1",
        },
        [{"a": {"b": {"c": [1]}}}, "- x", "a: b", "", " ", "\t", "\x7f\x85\ufeff"],
        {"yes": "no", "on": False, "é": "x", "a b": 1, "kueue.x-k8s.io/queue-name": "q"},
    ],
)
def test_the_renderer_writes_what_a_parser_reads_back(value: Any) -> None:
    assert yaml.safe_load(yaml_text(value)) == value
    assert yaml.safe_load(yaml_text({"below": [value, [value]]})) == {"below": [value, [value]]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "cluster.image=none: has to name a container"),
        (("image=x",), "has no volume in which pods see /data/runs/My Run_1. Works: mounts=CLAIM:/data/runs"),
        (("image=x", "mounts=shared:/else"), "cluster.mounts=shared:/else: has no volume"),
        (("image=x", "mounts=/data"), "is not of the form CLAIM:/PATH"),
        ((*PLACE, "kind=pod"), "cluster.kind=pod: is not one of the choices"),
        ((*PLACE, "selector=gpu"), "is not of the form NAME=VALUE"),
        ((*PLACE, "grace=0"), "cluster.grace=0"),
        ((*PLACE, "img=x"), "did you mean cluster.image"),
    ],
)
def test_what_the_cluster_could_not_run_is_refused(options: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_backend("kubernetes", options).script(JOB)
    assert words in str(caught.value)


def test_tokens_that_pods_would_not_see_are_refused() -> None:
    with pytest.raises(ConfigError, match="in which pods see /elsewhere/cache"):
        documents(replace(JOB, reads=(Path("/data/tokens"), Path("/elsewhere/cache"))))


def test_two_folders_of_one_name_are_two_jobs() -> None:
    names = {
        job_name(replace(JOB, out=Path(path)))
        for path in ("/data/a/run", "/data/b/run", "/data/" + "x" * 90, "/9", "/é")
    }
    assert len(names) == 5 and all(re.fullmatch(r"[a-z][-a-z0-9]{0,38}[a-z0-9]", name) for name in names)


def test_kubectl_gets_the_file_and_its_answers_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = fake_tools(tmp_path, kubectl='echo "$@" >> "$TOOLS/got"; if [ "$1" = get ]; then cat "$TOOLS/answer"; fi')
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("TOOLS", str(tools))
    backend = choose_backend("kubernetes", ("image=x", f"mounts=c:{tmp_path}", "namespace=ml"))
    job = replace(JOB, out=tmp_path)
    backend.refuse(job)
    assert backend.start(job).job == job_name(job)
    (tmp_path / "submission.json").touch()
    backend.start(job)
    script = tmp_path / "job.yaml"
    assert (tools / "got").read_text().splitlines() == [
        f"apply -f {script}",
        f"delete --ignore-not-found --wait -f {script}",
        f"apply -f {script}",
    ]
    for answer, where in (
        ({"status": {"ready": 2}}, "running"),
        ({"status": {}}, "waiting"),
        ({"status": {"conditions": [{"type": "Complete", "status": "True"}]}}, "gone"),
        ({"status": {"conditions": [{"type": "Failed", "status": "False"}], "ready": 1}}, "running"),
        ({"status": {"replicatedJobsStatus": [{"name": "nodes", "ready": 1}]}}, "running"),
        (None, "gone"),
    ):
        (tools / "answer").write_text(json.dumps(answer) if answer else "")
        assert backend.state("run-x").where == where, answer
    backend.stop("run-x")
    assert (tools / "got").read_text().splitlines()[
        -1
    ] == "delete job run-x --namespace ml --ignore-not-found --wait=false"

    (tools / "kubectl").write_text("#!/bin/bash\necho 'no matches for kind' >&2\nexit 1\n")
    with pytest.raises(RequestError, match=r"`kubectl apply` failed: no matches for kind"):
        backend.start(replace(job, out=tmp_path / "new"))

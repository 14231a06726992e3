"""The workers of a study as a job of Slurm, Kubernetes or Ray: one on each machine, or one on each of its GPUs.

All that a cluster does is to start `fettle worker` as often as asked; who measures what is settled in the storage.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fettle.errors import UsageError
from fettle.storage import hidden
from fettle.studies.orders import check_name

_USER = 10001
"""Not root, and nobody in particular."""


@dataclass(frozen=True)
class Job:
    """What is to be started."""

    study: str
    storage: str
    targets: tuple[str, ...] = ()
    machines: int = 4
    gpus: int = 0
    """GPUs of each machine; a worker for each. 0: one worker for the whole machine."""
    image: str = ""
    pythons: tuple[str, ...] = ()
    """Where the environments that the study compares lie on the machines, ``NAME=PATH``."""

    @property
    def words(self) -> list[str]:
        """The worker's command, without its folder."""
        environments = [f"--python={text}" for text in self.pythons]
        return ["worker", *self.targets, "--storage", self.storage, "--study", self.study, *environments]


@dataclass(frozen=True)
class Made:
    """A job as a file."""

    file: str
    """Its usual name."""
    text: str
    starter: str

    def start(self, path: Path) -> str:
        """The command that starts it from this path."""
        return f"{self.starter} {shlex.quote(str(path))}"


def write(kind: str, job: Job) -> Made:
    """The job for a kind of cluster. Raises `UsageError` for what cannot run there."""
    if kind not in _KINDS:
        raise UsageError(f"{kind!r} is not a cluster that jobs can be written for: {', '.join(_KINDS)}")
    check_name(job.study)
    scheme, separator, _ = job.storage.partition("://")
    if not separator or scheme.startswith("sqlite"):
        raise UsageError("`storage`: machines cannot share a file, name a server, postgresql://USER@HOST/DATABASE")
    if hidden(job.storage) != job.storage:
        raise UsageError("`storage`: its password would stand in the job: leave it to ~/.pgpass or PGPASSWORD")
    if (kind == "kubernetes") != bool(job.image):
        raise UsageError("`image` names the image of a Kubernetes job, which needs one" if job.image else
                         "`image`: name the container image that has fettle and the targets in it")  # fmt: skip
    return _KINDS[kind](job)


def _slurm(job: Job) -> Made:
    each = max(1, job.gpus)
    gpus = f"#SBATCH --gpus-per-node={job.gpus}\n" if job.gpus else ""
    device = "CUDA_VISIBLE_DEVICES=$SLURM_LOCALID " if job.gpus else ""
    run = f"exec {'env ' + device if device else ''}fettle {shlex.join(job.words)} -o fettle-{job.study}-$SLURM_PROCID"
    text = f"""#!/bin/bash
# Workers of the study {job.study}, by fettle export slurm. Start it in the folder that holds the targets.
# The storage's password stands in ~/.pgpass (host:port:database:user:password, for nobody else to read).
# What your site asks for besides goes to sbatch: --time, --partition, --account.
#SBATCH --job-name=fettle-{job.study}
#SBATCH --nodes={job.machines}
#SBATCH --ntasks-per-node={each}
{gpus}# Nobody else's work beside what is measured, and all of a node's memory, which exclusive alone does not give.
#SBATCH --exclusive
#SBATCH --mem=0
# A node that fails ends its own workers only, and others take over; a job that is preempted goes on where it was.
#SBATCH --no-kill
#SBATCH --requeue
# Workers that are warned in time give back what they had claimed.
#SBATCH --signal=TERM@120

# Each worker has all cores of its node, not one for each task.
srun --no-kill --kill-on-bad-exit=0 --cpu-bind=none bash -c {shlex.quote(run)}
"""
    return Made(f"{job.study}.sbatch", text, "sbatch")


def _kubernetes(job: Job) -> Made:
    name = re.sub(r"[^a-z0-9]+", "-", f"fettle-{job.study}".lower()).strip("-")[:52].strip("-")
    count = job.machines * max(1, job.gpus)
    # A pod with a GPU has that device for itself, and others may run on its node; one without has its node.
    apart = "" if job.gpus else f"""
      affinity:
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            - topologyKey: kubernetes.io/hostname
              labelSelector:
                matchLabels:
                  app: {name}"""  # fmt: skip
    resources = """
          resources:
            limits:
              nvidia.com/gpu: 1""" if job.gpus else ""  # fmt: skip
    words = ", ".join(json.dumps(word) for word in [*job.words, "--output", f"/results/{job.study}"])
    text = f"""# Workers of the study {job.study}, by fettle export kubernetes.
# The storage's password is a secret: kubectl create secret generic {name} --from-literal=password=...
# What is measured is kept in the storage. A worker's own pages are lost with its pod: the same are drawn, anywhere, by
# fettle study --storage {job.storage} --study {job.study}
# Without a limit on its cores a worker uses all of its node's: keep other work off them while it measures. With one,
# the kubelet needs the static CPU manager policy, or the worker is throttled in the middle of what it measures.
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {count}
  parallelism: {count}
  backoffLimit: {3 * count}
  podFailurePolicy:
    rules:
      # Wrong usage, or a model that is not the study's: no other try would end otherwise.
      - action: FailJob
        onExitCodes:
          containerName: worker
          operator: In
          values: [2]
      # A node that was taken away is nobody's fault.
      - action: Ignore
        onPodConditions:
          - type: DisruptionTarget
  template:
    metadata:
      labels:
        app: {name}
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 120{apart}
      securityContext:
        runAsNonRoot: true
        runAsUser: {_USER}
        fsGroup: {_USER}
        seccompProfile:
          type: RuntimeDefault
      containers:
        - name: worker
          image: {json.dumps(job.image)}
          command: ["fettle", {words}]{resources}
          securityContext:
            allowPrivilegeEscalation: false
            capabilities:
              drop: [ALL]
          env:
            - name: HOME
              value: /results
            - name: PGPASSWORD
              valueFrom:
                secretKeyRef:
                  name: {name}
                  key: password
          volumeMounts:
            - name: results
              mountPath: /results
            - name: shared
              mountPath: /dev/shm
      volumes:
        - name: results
          emptyDir: {{}}
        - name: shared
          emptyDir:
            medium: Memory
"""
    return Made(f"{job.study}.yaml", text, "kubectl apply -f")


def _ray(job: Job) -> Made:
    text = f'''"""Workers of the study {job.study}, by fettle export ray.

The storage's password stands in ~/.pgpass on each machine.
"""

import os
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

MACHINES, GPUS = {job.machines}, {job.gpus}
COMMAND = {json.dumps(job.words)}
FOLDER = {json.dumps(f"fettle-{job.study}")}


@ray.remote(max_retries=3)  # of a machine that was lost, not of a worker that failed
def work(place: int) -> int:
    # Ray gives a task one thread; a worker has its machine to itself.
    own = {{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}}
    return subprocess.call([sys.executable, "-m", "fettle", *COMMAND, "--output", f"{{FOLDER}}-{{place}}"], env=own)


def main() -> int:
    ray.init()
    each = max(1, GPUS)
    bundle = {{"CPU": each, **({{"GPU": GPUS}} if GPUS else {{}})}}
    machines = placement_group([bundle] * MACHINES, strategy="STRICT_SPREAD")  # no two on one machine
    ray.get(machines.ready())
    running = {{}}
    for place in range(MACHINES * each):
        where = PlacementGroupSchedulingStrategy(machines, placement_group_bundle_index=place // each)
        task = work.options(num_cpus=1, num_gpus=1 if GPUS else 0, scheduling_strategy=where)
        running[task.remote(place)] = place
    codes = []
    while running:
        (done,), _ = ray.wait(list(running), num_returns=1)
        place = running.pop(done)
        try:
            codes.append(ray.get(done))
        except ray.exceptions.RayError as error:
            codes.append(1)
            print(f"worker {{place}}: {{str(error).splitlines()[0]}}", file=sys.stderr)
    return 0 if 0 in codes else max(codes)  # whoever ends with 0 has seen the whole study


if __name__ == "__main__":
    sys.exit(main())
'''
    return Made(f"{job.study}-ray.py", text, "ray job submit --working-dir . -- python")


_KINDS: dict[str, Callable[[Job], Made]] = {"slurm": _slurm, "kubernetes": _kubernetes, "ray": _ray}

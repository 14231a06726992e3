"""What workers of a study are told through its storage, what they refuse, and the jobs that start them."""

import ast
import json
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import msgspec
import optuna
import pytest
import yaml

from fettle.errors import UsageError
from fettle.recipe import Recipe
from fettle.result import Limits
from fettle.studies import Settings, settings_of, stored
from fettle.studies.jobs import Job, write
from fettle.studies.orders import agree, announce
from fettle.study import Study
from tests.conftest import Run

SERVER = "postgresql://fettle@db/studies"


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A folder with a study that was begun for workers, as whoever began it had it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("from os import system\n\ndef workload():\n    ...\n")
    settings = Settings(
        design="pairs", techniques={"precision": ["fp32", "bf16"]}, arguments={"batch": ["1", "4"]}, rounds=5,
        start=Recipe.parse("grad=no_grad"), storage="s.db", name="night", output=tmp_path, max_metric_drop=0.01,
    )  # fmt: skip
    announce(agree(["net.py"], settings), settings)
    return settings


def test_a_worker_is_told_the_whole_design_by_its_name(begun: Settings) -> None:
    targets, settings = settings_of(Settings(storage="s.db", name="night", output=begun.output))
    assert targets == ["net.py"]
    assert (settings.design, settings.rounds, str(settings.start)) == ("pairs", 5, "grad=no_grad")
    assert settings.limits == Limits(max_error=None, max_metric_drop=0.01)
    assert agree(targets, settings) == agree(["net.py"], begun)
    assert agree([f"{Path.cwd() / 'net.py'}"], begun).targets == ("net.py",)


def test_a_second_study_of_that_name_must_be_the_same(begun: Settings) -> None:
    with pytest.raises(UsageError, match="was begun with another `factor`"):
        agree(["net.py"], replace(begun, arguments={"batch": ["1", "8"]}))
    with pytest.raises(UsageError, match="`design=ladder`: its steps follow from one another"):
        agree(["net.py"], replace(begun, design="ladder", name="other"))
    with pytest.raises(UsageError, match="`cells` is the same for all"):
        agree(["net.py"], replace(begun, budget_s=60.0))


def test_a_study_of_an_earlier_version_goes_on(begun: Settings) -> None:
    mine = replace(begun, name="old", max_metric_drop=None)
    orders = agree(["net.py"], mine)
    assert orders.max_error is None
    announce(msgspec.structs.replace(orders, max_error=0.02), replace(mine, max_error=0.02))
    assert agree(["net.py"], mine) == orders
    with pytest.raises(UsageError, match="was begun with another `max_error`"):
        agree(["net.py"], replace(mine, max_error=0.1))


def test_names_that_belong_to_something_else_are_refused(begun: Settings) -> None:
    url = f"sqlite:///{begun.output / 's.db'}"
    Study.open("mine", url, "weights", "here")
    with pytest.raises(UsageError, match="was not begun for workers"):
        agree(["net.py"], replace(begun, name="mine"))
    with pytest.raises(UsageError, match="holds workers' orders"):
        Study.open("night", url, "weights", "here")
    with pytest.raises(UsageError, match=r"no study 'nigth' .* there are: 'night'"):
        settings_of(replace(begun, name="nigth"))
    with pytest.raises(UsageError, match="letters, digits"):
        settings_of(replace(begun, name="a b"))
    with pytest.raises(UsageError, match="no such storage"):
        settings_of(replace(begun, storage=str(begun.output / "typo.db")))
    assert not (begun.output / "typo.db").exists()


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("os:system", "not a file in this folder: to run it, name it: fettle worker os:system"),
        ("../net.py", "not a file in this folder"),
        ("/etc/net.py:workload", "not a file in this folder"),
        ("net.py:system", "net.py defines no system"),
        ("gone.py", "there is no such file here"),
        ("~nobody-of-that-name/net.py:workload", "there is no such file here"),
        ("a\0.py:workload", r"the study is of 'a\\x00.py': .*null byte"),
    ],
)
def test_a_storage_does_not_choose_what_a_worker_runs(begun: Settings, target: str, says: str) -> None:
    study = optuna.load_study(study_name="night", storage="sqlite:///s.db")
    (told,) = study.user_attrs.values()
    study.set_user_attr("fettle:orders", {**told, "targets": [target]})
    with pytest.raises(UsageError, match=says):
        settings_of(begun)
    assert settings_of(begun, ["net.py"])[0] == ["net.py"]  # whoever starts it may


def test_what_the_study_needs_of_a_machine_is_said(begun: Settings) -> None:
    with pytest.raises(UsageError, match="'night' is of net: name those targets"):
        settings_of(begun, ["net.py:system"])
    study = optuna.load_study(study_name="night", storage="sqlite:///s.db")
    (told,) = study.user_attrs.values()
    study.set_user_attr("fettle:orders", {**told, "environments": ["old"]})
    with pytest.raises(UsageError, match="name here old, `python='NAME=PATH'`"):
        settings_of(begun)
    study.set_user_attr("fettle:orders", {"targets": 3})
    with pytest.raises(UsageError, match="cannot be read"):
        settings_of(begun)


def test_a_study_of_more_workloads_than_anybody_measures_is_one_line(begun: Settings) -> None:
    study = optuna.load_study(study_name="night", storage="sqlite:///s.db")
    (told,) = study.user_attrs.values()
    many = {f"x{number}": ["1", "2"] for number in range(64)}
    study.set_user_attr("fettle:orders", {**told, "arguments": many})
    with pytest.raises(UsageError, match="make more than 10,000 workloads"):
        stored(begun)


def test_two_targets_of_one_name_are_told_apart_by_their_order(begun: Settings) -> None:
    targets = ["resnet/model.py", "unet/model.py"]
    for text in targets:
        Path(text).parent.mkdir()
        Path(text).write_text("def workload():\n    ...\n")
    both = replace(begun, name="both")
    announce(agree(targets, both), both)
    assert settings_of(both, targets)[0] == targets


# -- jobs --------------------------------------------------------------------------------------------------------------


def _worker(words: list[str]) -> list[str]:
    """What a job starts, from the worker's command on."""
    return words[words.index("worker") :]


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_slurm_job_is_a_script_that_starts_a_worker_for_each_device(gpus: int, tmp_path: Path) -> None:
    made = write("slurm", Job("night", SERVER, ("my net.py",), machines=3, gpus=gpus, pythons=("old=/opt/my venv",)))
    subprocess.run(["bash", "-n"], input=made.text, text=True, check=True)
    assert made.text.startswith("#!/bin/bash\n")
    asked = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in made.text.splitlines()
                 if line.startswith("#SBATCH"))  # fmt: skip
    assert (asked["nodes"], asked["ntasks-per-node"]) == ("3", str(max(1, gpus)))
    assert asked.get("gpus-per-node") == (str(gpus) if gpus else None)
    # As Slurm would run it, with stand-ins for what is not here: what reaches the worker, word by word.
    for name, text in {"srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
                       "fettle": 'printf "%s\\n" "$@" "${CUDA_VISIBLE_DEVICES-none}"'}.items():  # fmt: skip
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    found = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
    said = subprocess.run(["bash"], input=made.text, text=True, check=True, stdout=subprocess.PIPE, env=found).stdout
    assert said.splitlines() == ["worker", "my net.py", "--storage", SERVER, "--study", "night",
                                 "--python=old=/opt/my venv", "-o", "fettle-night-5",
                                 "1" if gpus else "none"]  # fmt: skip


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_kubernetes_job_has_a_pod_for_each_device_and_no_second_one_on_a_node_without(gpus: int) -> None:
    made = write("kubernetes", Job("Night_1", SERVER, machines=3, gpus=gpus, image="registry.example/net: 1"))
    job = yaml.safe_load(made.text)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["kind"], job["metadata"]["name"], container["image"]) == (
        "Job", "fettle-night-1", "registry.example/net: 1",
    )  # fmt: skip
    assert spec["completions"] == spec["parallelism"] == 3 * max(1, gpus)
    assert _worker(container["command"]) == ["worker", "--storage", SERVER, "--study", "Night_1", "--output",
                                             "/results/Night_1"]  # fmt: skip
    assert ("affinity" in pod, "resources" in container) == (not gpus, bool(gpus))
    (only,) = [rule for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    assert only["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2]}
    assert pod["restartPolicy"] == "Never"  # which such a policy needs
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_ray_job_is_a_program(gpus: int) -> None:
    made = write("ray", Job("night", SERVER, ("net.py",), machines=3, gpus=gpus))
    tree = ast.parse(made.text)
    compile(tree, made.file, "exec")
    assert len([line for line in made.text.splitlines() if len(line) > 120]) == 0
    values = {target.id: ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)
              for target in node.targets if isinstance(target, ast.Name)}  # fmt: skip
    assert values["COMMAND"] == ["worker", "net.py", "--storage", SERVER, "--study", "night"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cloud"], "'cloud' is not a cluster"),
        (["slurm", "--study=../x"], "letters, digits"),
        (["slurm", "--storage=study.db"], "cannot share a file, name a server"),
        (["ray", "--storage=postgresql://fettle:secret@db/studies"], "its password would stand in the job"),
        (["kubernetes"], "name the container image"),
        (["slurm", "--image=x"], "names the image of a Kubernetes job"),
    ],
)
def test_what_no_cluster_could_run_is_one_line(
    words: list[str], says: str, run_fettle: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = run_fettle("export", f"--storage={SERVER}", "--study=night", *words)
    assert (said.code, said.out) == (2, "")
    assert says in " ".join(said.err.split())
    assert "secret" not in said.err
    assert not list(tmp_path.iterdir())


def test_a_job_is_written_where_it_is_asked_for_and_says_how_it_is_started(run_fettle: Run, tmp_path: Path) -> None:
    path = tmp_path / "jobs" / "a b.sbatch"
    said = run_fettle("export", "slurm", "net.py", f"--storage={SERVER}", "--study=night", "--gpus=2", "-o", path,
                      "--python=old=/opt/old", "--json")  # fmt: skip
    assert json.loads(said.out) == {"path": str(path), "start": f"sbatch {shlex.quote(str(path))}", "workers": 8}
    assert path.read_text() == write("slurm", Job("night", SERVER, ("net.py",), gpus=2, pythons=("old=/opt/old",))).text
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", path], check=True)

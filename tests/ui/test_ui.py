"""A folder in a browser: what is found, who may see it, and that it changes while a study runs."""

import contextlib
import gzip
import http.client
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

from fettle.cli import main, ui
from fettle.errors import UsageError
from fettle.page import shell
from fettle.ui import Site, address_of, inventory, listing, serve

HOSTILE = "<script>alert(1)</script>"
PORT = 4321
HERE = [f"127.0.0.1:{PORT}"]


LOAD = {"mode": "open", "throughput": 81.5, "goodput": 81.0, "within_limit": 1.0, "limit_ms": 100.0,
        "latency_ms": {"p50": 10.0, "p99": 93.25}}  # fmt: skip
SLO = {"limit_ms": 100.0, "met": True, "best": 1, "name": "digits", "points": [
    {"setting": "one row", "measured": None},
    {"setting": "8 rows, 2 workers", "measured": 94.4, "tests": [{"run": LOAD}]}]}  # fmt: skip


def begin_study(folder: Path, name: str = "digits") -> optuna.Study:
    """A storage with two trials that were judged, and one that is being measured."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(storage=f"sqlite:///{folder / 'study.db'}", study_name=name)
    for status in ("valid", "rejected"):
        study.add_trial(optuna.trial.create_trial(value=1.0, user_attrs={"status": status}))
    study.ask()
    return study


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each kind, things that are none of ours, and traps."""
    root = tmp_path_factory.mktemp("ui") / "inside"
    begin_study(root / "out")
    (root / "out" / "recipe.toml").write_text("format = 1\n")
    title = f"2x as fast {HOSTILE}"
    (root / "out" / "report.html").write_text(
        shell.render("fettle.parallel", "plan.html.j2", title, made={}, drawn={"drawings": {}})
    )
    (root / "other.html").write_text("<title>somebody's page</title>")
    with gzip.open(root / "run.json.gz", "wt") as file:
        json.dump({"schemaVersion": 1, "traceEvents": []}, file)
    (root / "a b#?%2e.json").write_text('{"traceEvents": []}')
    (root / "bad.json.gz").write_bytes(b"\x1f\x8b not gzip")
    (root / "broken.db").write_bytes(b"SQLite format 3\0 and then nothing")
    (root / "load.json").write_text(json.dumps([LOAD, {**LOAD, "throughput": 90.0, "within_limit": 0.5}]))
    (root / "compared.json").write_text(json.dumps({"runs": [LOAD], "changes": []}))
    (root / "load.csv").write_text("Benchmark,TS failed requests,TS throughput\nAB,0,1\n")
    (root / "other.csv").write_text("a,b\n")
    (root / "slo-digits").mkdir()
    (root / "slo-digits" / "result.json").write_text(json.dumps(SLO))
    (root / "memory.pickle").write_bytes(b"\x80\x04\x95segments device_traces")
    (root / "data.pickle").write_bytes(b"\x80\x04\x95anything")
    (root / "digits-1").mkdir()
    for name in ("manifest.json", "samples.safetensors"):  # weights are other files where OpenVINO wrote them
        (root / "digits-1" / name).write_text("{}")
    (root / ".hidden").mkdir()
    (root / ".hidden" / "secret.txt").write_text("secret")
    (root.parent / "secret.txt").write_text("secret")
    (root / "link.txt").symlink_to(root.parent / "secret.txt")
    (root / "linked").symlink_to(root.parent)
    os.mkfifo(root / "pipe.txt")
    return root


@pytest.fixture(scope="module")
def site(folder: Path) -> Site:
    return Site(folder, token="right")


def test_the_inventory_knows_each_kind_and_nothing_else(folder: Path) -> None:
    found = inventory(folder)
    assert {item.path: item.kind for item in found.items} == {
        "out/study.db": "study",
        "out/report.html": "report",
        "load.json": "load",
        "compared.json": "load",
        "load.csv": "load",
        "slo-digits/result.json": "load",
        "run.json.gz": "trace",
        "a b#?%2e.json": "trace",
        "memory.pickle": "snapshot",
        "digits-1/manifest.json": "package",
        "out/recipe.toml": "results",
    }
    study = found.items[0]
    assert study.says == "digits: 3 trials (1 rejected, 1 valid, 1 being measured)"
    assert study.running
    assert not {"link.txt", "linked/secret.txt", ".hidden/secret.txt", "pipe.txt"} & set(found.files)


def test_load_and_limits_say_what_was_found(folder: Path, tmp_path: Path) -> None:
    says = {item.path: item.says for item in inventory(folder).items}
    assert says["load.json"] == "2 load tests: at most 90 answers/s, p99 93.25 ms; 1 not within the limit"
    assert says["compared.json"] == "1 load test: at most 81.5 answers/s, p99 93.25 ms"
    assert says["slo-digits/result.json"] == "digits: 94.4 requests/s with p99 within 100 ms: 8 rows, 2 workers"
    path = tmp_path / "result.json"
    for changed, said in (
        ({"best": None}, "digits: no setting was shown to keep p99 within 100 ms"),
        ({"best": -1}, "digits: no setting was shown to keep p99 within 100 ms"),
        ({"met": False}, "digits: 94.4 requests/s with p99 within 100 ms: 8 rows, 2 workers; not met"),
        ({"limit_ms": 0, "ttft_limit_ms": 500.0, "itl_limit_ms": 50.0},
         "digits: 94.4 requests/s with first token within 500 ms, tokens apart within 50 ms: 8 rows, 2 workers"),
    ):  # fmt: skip
        path.write_text(json.dumps({**SLO, **changed}))
        assert listing._look(path) == ("load", said)
    of_texts = {**LOAD, "limit_ms": 0.0, "within_limit": 0.9, "texts": {"ttft_limit_ms": 300.0, "itl_limit_ms": 0.0}}
    void = {**LOAD, "throughput": 99.0, "within_limit": 0.0, "void": "nothing was answered"}
    path.write_text(json.dumps([of_texts, void, {**LOAD, "throughput": 85.0, "stable": False}]))
    assert listing._look(path)[1] == (
        "3 load tests: at most 85 answers/s, p99 93.25 ms; 1 void; 1 with more than the server can do; "
        "1 not within the limit"
    )
    deep = '{"limit_ms": 1, "met": true, "more": ' + "[" * 100_000
    for broken in ('{"limit_ms": 1, "met": 7}', '[{"latency_ms": {}, "goodput": "x"}]', '{"limit_ms", "met"', deep):
        path.write_text(broken)
        assert inventory(tmp_path).items == []
    (tmp_path / "empty.json").write_text('{"latency_ms": 0, "goodput": 0, "runs": []}')
    assert inventory(tmp_path).items == []


def test_a_study_runs_until_its_result_is_newer_or_it_was_silent(tmp_path: Path) -> None:
    begin_study(tmp_path)
    path = tmp_path / "study.db"
    (tmp_path / "result.json").write_text("{}")
    os.utime(tmp_path / "result.json", (time.time() + 5,) * 2)
    assert not inventory(tmp_path).items[0].running
    (tmp_path / "result.json").unlink()
    assert inventory(tmp_path).items[0].running
    os.utime(path, (time.time() - listing.RUNNING_S - 5,) * 2)
    assert not inventory(tmp_path).items[0].running


def test_a_study_is_shown_with_what_its_result_says(tmp_path: Path) -> None:
    begin_study(tmp_path)
    won = {"recipe": {"precision": "bf16"}, "speedup": {"estimate": 2.0, "low": 1.9, "high": None}}
    for text, said in (
        (json.dumps({"winner": won, "trials": []}).encode(), "; too few rounds with precision=bf16"),
        (json.dumps({"winner": None}).encode(), ""),
        (json.dumps({"winner": 7}).encode(), ""),
        (b"{" * 100, ""),
        (b'{"winner": {"recipe": {"precision": "\xff"}}}', ""),
        (b'{"more": ' + b"[" * 100_000, ""),
    ):
        (tmp_path / "result.json").write_bytes(text)
        assert inventory(tmp_path).items[0].says.partition(")")[2] == said


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE trial_user_attributes SET value_json = '[1]'",
        "UPDATE trial_user_attributes SET value_json = NULL",
        "UPDATE trial_user_attributes SET value_json = '" + "[" * 50_000 + "'",
        "DROP TABLE trials; CREATE VIEW trials AS WITH RECURSIVE n(state) AS (SELECT 1 UNION ALL SELECT state FROM n) "
        "SELECT state FROM n",
    ],
)
def test_a_hostile_storage_takes_nothing_else_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    monkeypatch.setattr(listing, "_MOST_SQL_S", 0.05)
    begin_study(tmp_path / "bad")
    with contextlib.closing(sqlite3.connect(tmp_path / "bad" / "study.db")) as base:
        base.executescript(f"PRAGMA ignore_check_constraints = 1; {statement}")
        base.commit()
    (tmp_path / "recipe.toml").write_text("")
    assert "recipe.toml" in {item.path for item in inventory(tmp_path).items}


def test_a_storage_whose_names_are_gigabytes_is_not_read(tmp_path: Path) -> None:
    begin_study(tmp_path)
    long = "SELECT 1 AS study_id, printf('%.20000000c', 'a') AS study_name"
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as base:
        base.executescript(f"DROP TABLE studies; CREATE VIEW studies AS {long}")
    assert all(len(item.says) < 1000 for item in inventory(tmp_path).items)


def test_a_folder_with_too_many_files_is_shown_in_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MOST_FILES", 3)
    assert inventory(folder).cut


def test_the_page_links_reports_and_escapes_what_it_shows(site: Site) -> None:
    answer = site.respond("GET", "/right/", HERE, PORT)
    text = answer.body.decode()
    assert answer.status == 200
    assert HOSTILE not in text
    assert 'href="/right/file/out/report.html"' in text
    assert 'href="/right/file/a%20b%23%3F%252e.json"' in text
    assert "1 study running" in text
    assert "fettle trace report " in text


@pytest.mark.parametrize(
    "place",
    ["../secret.txt", "..%2fsecret.txt", "%2e%2e/secret.txt", "out/../../secret.txt", "link.txt", "linked/secret.txt",
     "linked/inside/out/report.html", ".hidden/secret.txt", "/etc/passwd", "%2fetc%2fpasswd", "pipe.txt", "out", "out/",
     "memory.pickle", "out/study.db", "out/report.html%00", "out%5creport.html", "%ff%fe", "", "..\\secret.txt"],
)  # fmt: skip
def test_no_path_leads_anywhere_but_to_what_was_found(site: Site, place: str) -> None:
    assert site.respond("GET", f"/right/file/{place}", HERE, PORT).status == 404


def test_a_folder_whose_name_is_no_text_is_shown_like_others(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    begin_study(tmp_path / "plain")
    (tmp_path / "plain").rename(folder)
    (folder / "recipe.toml").write_text("format = 1\n")
    site = Site(tmp_path, token="right")
    text = site.respond("GET", "/right/", HERE, PORT).body.decode()
    assert "digits: 3 trials" in text
    assert 'href="/right/file/caf%E9/recipe.toml"' in text
    assert site.respond("GET", "/right/file/caf%E9/recipe.toml", HERE, PORT).file == folder / "recipe.toml"


def test_who_has_no_token_or_comes_by_another_name_is_refused(site: Site) -> None:
    for target in (
        "/",
        "",
        "/wrong/",
        "/right2/",
        "/righ/",
        "/wrong/file/out/report.html",
        "//right/",
        "/r\u00e9/",
        "*",
    ):
        assert site.respond("GET", target, HERE, PORT).status == 403, target
    for hosts in ([], ["evil.example"], [f"evil.example:{PORT}"], ["127.0.0.1"], [f"127.0.0.1:{PORT + 1}"],
                  [*HERE, "evil.example"], [f"127.0.0.1:{PORT}.evil.example"], [f"0.0.0.0:{PORT}"]):  # fmt: skip
        assert site.respond("GET", "/right/", hosts, PORT).status == 403, hosts
    assert site.respond("GET", "/right/", [f"LOCALHOST:{PORT}"], PORT).status == 200
    assert site.respond("POST", "/right/", HERE, PORT).status == 405
    assert len(Site(site.folder).token) >= 32
    assert Site(site.folder).token != Site(site.folder).token


@pytest.fixture
def served(site: Site) -> Iterator[tuple[int, str]]:
    with serve(site) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.server_port, address_of(server)
        finally:
            server.shutdown()
            thread.join()


def test_over_a_socket_a_report_comes_in_a_sandbox_and_what_became_a_link_does_not(
    served: tuple[int, str], folder: Path
) -> None:
    port, _ = served
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(method: str, target: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection.request(method, target)
        answer = connection.getresponse()
        return answer, answer.read()

    report, body = ask("GET", "/right/file/out/report.html")
    assert body == (folder / "out" / "report.html").read_bytes()
    assert report.headers["Content-Security-Policy"].startswith("sandbox allow-scripts")
    assert report.headers["Referrer-Policy"] == "no-referrer"
    assert ask("GET", "/right/file/out/recipe.toml")[0].headers["Content-Type"].startswith("text/plain")
    head, body = ask("HEAD", "/right/file/out/report.html")
    assert (head.status, body) == (200, b"")
    assert ask("GET", "/wrong/")[0].status == 403
    assert ask("POST", "/right/")[0].status == 405
    connection.close()


def test_a_file_or_folder_that_became_a_link_since_it_was_found_is_not_opened(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "outside"
    (inside / "sub").mkdir(parents=True)
    outside.mkdir()
    for place in (inside / "a.txt", inside / "sub" / "b.txt", outside / "b.txt"):
        place.write_text("secret" if place.parent == outside else "mine")
    site = Site(inside, token="t")
    found = site.contents()
    site.contents = lambda: found  # type: ignore[method-assign] # as if no time went by
    (inside / "a.txt").unlink()
    (inside / "a.txt").symlink_to(outside / "b.txt")
    shutil.rmtree(inside / "sub")
    (inside / "sub").symlink_to(outside)
    with serve(site) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        for place in ("a.txt", "sub/b.txt"):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
            connection.request("GET", f"/t/file/{place}")
            answer = connection.getresponse()
            assert (answer.status, b"secret" in answer.read()) == (404, False)
            connection.close()
        server.shutdown()
        thread.join()


def test_bad_input_is_one_line_and_json_is_the_inventory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fettle", "ui", *words])
        with pytest.raises(SystemExit) as leaving:
            main()
        said = capsys.readouterr()
        return int(leaving.value.code or 0), said.out, said.err

    code, out, err = run(str(folder / "nowhere"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "there is no folder" in err
    assert run(str(folder / "other.html"))[0] == 2
    code, out, _ = run(str(folder), "--json")
    assert code == 0
    assert {item["kind"] for item in json.loads(out)["items"]} == {
        "study", "report", "load", "trace", "snapshot", "package", "results",
    }  # fmt: skip
    with (
        serve(Site(folder)) as server,
        pytest.raises(UsageError, match="cannot listen"),
        serve(Site(folder), server.server_port),
    ):
        pass


def test_a_browser_is_opened_without_the_token_among_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def take(url: str) -> None:
        page = Path(url.removeprefix("file://"))
        assert page.parent.stat().st_mode & 0o077 == 0
        opened.append((url, page.read_text()))

    monkeypatch.setattr("webbrowser.open", take)
    with ui._opened("http://127.0.0.1:1/secret/"):
        pass
    ((url, text),) = opened
    assert "secret" not in url
    assert "url=http://127.0.0.1:1/secret/" in text
    for variables, terminal, wanted in (
        ({}, True, False),
        ({"DISPLAY": ":0"}, True, True),
        ({"DISPLAY": ":0"}, False, False),
    ):
        monkeypatch.delenv("DISPLAY", raising=False)
        monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal, raising=False)
        monkeypatch.setattr("sys.platform", "linux")
        assert ui._has_desktop() is wanted


@pytest.mark.slow
def test_in_a_browser_the_page_changes_while_a_study_runs(tmp_path: Path) -> None:
    browser = next((found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no Chromium")
    begin_study(tmp_path / "out", "before")
    with serve(Site(tmp_path)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        ticks = iter(range(1))
        respond = server.site.respond

        def watched(*given: object) -> object:
            answer = respond(*given)  # type: ignore[arg-type]
            if next(ticks, None) is not None:  # the browser has the first page: the study goes on
                study = optuna.load_study(study_name="before", storage=f"sqlite:///{tmp_path / 'out' / 'study.db'}")
                study.add_trial(optuna.trial.create_trial(value=1.0, user_attrs={"status": "failed"}))
            return answer

        server.site.respond = watched  # type: ignore[method-assign, assignment]
        done = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
             "--timeout=15000", "--virtual-time-budget=8000", "--dump-dom", address_of(server)],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        server.shutdown()
        thread.join()
    assert "before: 4 trials (1 failed, 1 rejected, 1 valid, 1 being measured)" in done.stdout, done.stderr


def test_a_command_can_be_copied_whatever_the_path() -> None:
    assert listing._command("trace", Path("/a b/t.json")) == "fettle trace report '/a b/t.json'"
    assert listing._command("package", Path("/p/manifest.json")) == "fettle serve /p"
    assert listing._command("report", Path("/r.html")) == ""

"""Histograms and counters of our own say what Prometheus' would."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from fettle.serve.engine import metrics as room
from fettle.serve.engine.metrics import Metrics


@given(st.lists(st.floats(0.0, 100.0)), st.sets(st.floats(0.001, 50.0), max_size=3))
def test_a_tally_is_exposed_as_prometheus_own_histogram(values, limits):
    ours, theirs = Metrics(limits), CollectorRegistry()
    text = "From the request's arrival at the batcher to its answer"
    histogram = Histogram("fettle_request_seconds", text, ("model", "version"), buckets=ours.seconds, registry=theirs)
    for value in values:
        histogram.labels("m", "1").observe(value)
        ours.of("m", "1").requests.observe(value)
    assert exposed(ours.registry, "fettle_request_seconds") == exposed(theirs, "")


def test_answers_are_exposed_as_prometheus_own_counter():
    ours, theirs = Metrics(), CollectorRegistry()
    counter = Counter("fettle_responses", "Answers by HTTP status", ("model", "version", "code"), registry=theirs)
    for model, code in (("a", 200), ("b", 200), ("a", 503), ("a", 200)):
        counter.labels(model, "1", str(code)).inc()
        ours.of(model, "1").response(code)
    assert sorted(exposed(ours.registry, "fettle_responses")) == sorted(exposed(theirs, ""))


def exposed(registry, name):
    """Its lines of this metric."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if name in line and "_created" not in line]


def test_answers_are_counted_by_status():
    metrics = Metrics()
    model = metrics.of("m", "1")
    for code in (200, 200, 429):
        model.response(code)
    assert model.failed == 1
    seen = generate_latest(metrics.registry).decode()
    assert 'fettle_responses_total{code="200",model="m",version="1"} 2.0' in seen
    assert 'fettle_responses_total{code="429",model="m",version="1"} 1.0' in seen


def test_the_stages_of_a_request_each_have_a_histogram():
    metrics = Metrics([0.1])
    model = metrics.of("m", "1")
    model.request(0.2, 0.01, 0.1)
    model.batch(3, 4, 0.001, 0.05)
    model.steps(0.002, 0.003)
    seen = generate_latest(metrics.registry).decode()
    for name, total in (
        ("request_seconds", 0.2), ("queue_wait_seconds", 0.01), ("batch_join_seconds", 0.001), ("model_seconds", 0.05),
        ("batch_rows", 3.0), ("preprocess_seconds", 0.002), ("postprocess_seconds", 0.003),
    ):  # fmt: skip
        assert f'fettle_{name}_sum{{model="m",version="1"}} {total}' in seen
    assert 'fettle_limit_violations_total{model="m",version="1"} 1.0' in seen
    assert 'fettle_padding_rows_total{model="m",version="1"} 1.0' in seen
    assert 'le="0.1"' in seen


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the second does not tell how busy it is."""

    def rates(device: int) -> SimpleNamespace:
        if device:
            raise RuntimeError("Not Supported")
        return SimpleNamespace(gpu=25)

    held = SimpleNamespace(used=1 << 30, total=4 << 30)
    nvml = SimpleNamespace(nvmlDeviceGetMemoryInfo=lambda _: held, nvmlDeviceGetUtilizationRates=rates)
    monkeypatch.setattr(room, "gpus", lambda: (nvml, [0, 1]))


def test_the_host_is_told_when_it_is_asked_for(two_gpus: None) -> None:
    registry = Metrics().registry
    told = [generate_latest(registry).decode() for _ in range(2)][1]
    values = dict(re.findall(r'^(fettle_(?:host|gpu)_\w+(?:\{gpu="\d"\})?) (\S+)$', told, re.M))
    assert float(values["fettle_host_cpu_seconds_total"]) > 0
    assert float(values["fettle_host_cores"]) >= 1
    assert 0 < float(values["fettle_host_memory_available_bytes"]) < float(values["fettle_host_memory_bytes"])
    assert float(values['fettle_gpu_memory_used_bytes{gpu="1"}']) == 1 << 30
    assert float(values['fettle_gpu_busy_share{gpu="0"}']) == 0.25
    assert 'fettle_gpu_busy_share{gpu="1"}' not in values


def test_the_dashboard_asks_for_what_there_is(two_gpus: None):
    """Every metric and label of docs/grafana-serve.json; no metric of the server is left out but a handler's own."""
    metrics = Metrics([0.1])
    model = metrics.of("m", "1")
    model.request(0.1, 0.1, 0.1)
    model.response(200)
    model.shed("full")
    model.restart("died")
    metrics.worker_bytes.labels("m", "1", "0").set(1)
    metrics.queue_rows.labels("m", "1").set(1)
    metrics.inflight.labels("m", "1").set(1)
    model.handler([("counter", "generated_tokens", 1.0)])
    exposed = generate_latest(metrics.registry).decode()
    there = set(re.findall(r"^(fettle_\w+)[{ ]", exposed, re.M))
    labels = set(re.findall(r'(\w+)="', exposed))

    board = json.loads((Path(__file__).parents[3] / "docs" / "grafana-serve.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [one["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"fettle_\w+", query)}
    assert asked - there == set()
    used = {label for query in queries for label in re.findall(r"(\w+)=~?\"", query)}
    for some in re.findall(r"by \(([\w, ]+)\)", " ".join(queries)):
        used |= set(some.split(", "))
    assert used - labels == set()
    base = re.compile(r"_(total|bucket|sum|count|created)$")
    left_out = {base.sub("", name) for name in there} - {base.sub("", name) for name in asked}
    assert left_out <= {"fettle_handler_seconds", "fettle_handler_value"}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])

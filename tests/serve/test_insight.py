"""What is seen of a served model from outside: a handler's own metrics, spans, and explanations."""

import json

import numpy as np
import pytest
import torch

from fettle.errors import UsageError
from fettle.package.export import write_package
from fettle.package.handler import HandlerMetrics, find_handler
from fettle.package.manifest import open_package
from fettle.package.model_runner import ModelRunner
from fettle.package.settings import ServeSettings
from fettle.recipe import Recipe
from fettle.serve.engine.explain import Explainer
from fettle.serve.engine.registry import Options
from fettle.serve.engine.spans import Spans
from fettle.workload import Workload
from tests.package.test_handlers import Sums, text_batches, tokenizer
from tests.serve.test_server import ask, values
from tests.serving import net, running

SETTINGS = ServeSettings(max_rows=4, threads=1)
COUNTING = """
class Handler:
    def initialize(self, context):
        self.metrics = context.metrics
    def preprocess(self, requests):
        self.metrics.add_counter("texts", len(requests))
        self.metrics.add_time("thinking", 250)
        self.metrics.add_size("memory", 2, unit="kB")
        self.metrics.add_percent("full", 12.5)
        if requests[0]["body"] == b"many":
            for i in range(1000):
                self.metrics.add_counter(f"n{i}")
        return requests
    def inference(self, data):
        return data
    def postprocess(self, answers):
        return [answer["body"] for answer in answers]
"""


def test_a_handlers_own_metrics_are_seen(tmp_path):
    (tmp_path / "handler.py").write_text(COUNTING)
    package = write_package(Workload(net(), [torch.rand(2, 4)]), Recipe(), tmp_path / "m", name="m",
                            settings=SETTINGS, handler=tmp_path / "handler.py")  # fmt: skip
    with running([package], Options(trust=(package.handler_digest,))) as server:
        for _ in range(3):
            assert ask(server.url + "/predictions/m", b"a")[0] == 200
        seen = ask(server.url + "/metrics")[1].decode()
        for line in (
            'fettle_handler_events_total{model="m",name="texts",version="1"} 3.0',
            'fettle_handler_seconds_sum{model="m",name="thinking",version="1"} 0.75',
            'fettle_handler_value{model="m",name="memory",version="1"} 2000.0',
            'fettle_handler_value{model="m",name="full",version="1"} 12.5',
            'fettle_preprocess_seconds_count{model="m",version="1"} 3.0',
            'fettle_model_seconds_count{model="m",version="1"} 3.0',
            'fettle_postprocess_seconds_count{model="m",version="1"} 3.0',
        ):
            assert line in seen
        ask(server.url + "/predictions/m", b"many")  # a series for each request would fill any monitoring
        assert ask(server.url + "/metrics")[1].decode().count("fettle_handler_events_total{") <= 100


@pytest.mark.parametrize("call", [("add_counter", "a b"), ("add_counter", "ok", -1), ("add_time", "ok", float("nan"))])
def test_what_is_no_metric_raises_in_the_handler(call):
    metrics = HandlerMetrics()
    with pytest.raises(ValueError, match="not a metric"):
        getattr(metrics, call[0])(*call[1:])
    assert metrics.take() == []


def test_an_inference_is_a_span_of_its_callers_trace_with_queue_and_batch_inside(store):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    trace = "0af7651916cd43dd8448eb211c80319c"
    tensor = {"name": "input", "shape": [2, 4], "datatype": "FP32", "data": [1] * 8}
    with running([open_package(store / "net-1")], spans=Spans(exporter)) as server:
        url = server.url + "/v2/models/net/infer"
        headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
        assert ask(url, {"inputs": [tensor]}, headers=headers)[0] == 200
        assert ask(url, {"inputs": []}, headers={"traceparent": "nonsense"})[0] == 400
        assert ask(server.url + "/v2")[0] == 200  # no inference, no span
        server.address.spans._provider.force_flush()
        spans = {
            (span.name, span.attributes.get("http.response.status_code")): span
            for span in exporter.get_finished_spans()
        }
    assert set(spans) == {("infer net", 200), ("infer net", 400), ("queue", None), ("batch", None)}
    whole, queue, batch = spans["infer net", 200], spans["queue", None], spans["batch", None]
    assert format(whole.context.trace_id, "032x") == trace
    assert queue.parent.span_id == batch.parent.span_id == whole.context.span_id
    assert whole.start_time <= queue.start_time <= queue.end_time <= batch.start_time < batch.end_time <= whole.end_time
    assert batch.attributes["fettle.batch_rows"] == 2
    assert format(spans["infer net", 400].context.trace_id, "032x") != trace


def test_a_library_that_is_missing_is_one_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry", None)
    with pytest.raises(UsageError, match=r"spans need OpenTelemetry: pip install .*\[otel\]"):
        Spans()


def explain(server, rows, path="/v2/models/net/explain", **parameters):
    x = np.asarray(rows, np.float32)
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "data": x.ravel().tolist()}
    return ask(server.url + path, {"inputs": [tensor], "parameters": parameters})


def test_attributions_add_up_to_what_the_input_changes(store):
    pytest.importorskip("captum")

    model = net()
    x = torch.rand(3, 4)
    with running([open_package(store / "net-1")], Options(explain=True)) as server:
        status, answer, _ = explain(server, x.tolist(), target=1)
        assert (status, answer["outputs"][0]["name"], answer["outputs"][0]["shape"]) == (200, "input", [3, 4])
        with torch.no_grad():
            change = (model(x) - model(torch.zeros(3, 4)))[:, 1]
        np.testing.assert_allclose(values(answer).sum(1), change, atol=2e-3)
        best = values(explain(server, x.tolist())[1]).sum(1)
        with torch.no_grad():
            largest = model(x).argmax(1)
            change = (model(x) - model(torch.zeros(3, 4))).gather(1, largest[:, None])[:, 0]
        np.testing.assert_allclose(best, change, atol=2e-3)
        status, rows, _ = ask(server.url + "/explanations/net", x.tolist())
        assert status == 200
        np.testing.assert_allclose(np.sum(rows, 1), change, atol=2e-3)
        for target in (3, -2, "a", True):
            assert explain(server, x.tolist(), target=target)[0] == 400
        executions = ask(server.url + "/v2/models/net/stats")[1]["model_stats"][0]["execution_count"]
        assert executions == 0  # an explanation is no inference


def test_a_model_given_in_bfloat16_is_explained(tmp_path):
    pytest.importorskip("captum")
    model = torch.nn.Linear(4, 3).bfloat16().eval()
    x = torch.rand(2, 4, dtype=torch.bfloat16)
    package = write_package(Workload(model, [x]), Recipe(), tmp_path / "m", name="m", settings=SETTINGS)
    (attributions,) = Explainer(package).attribute([x.float().numpy()], 1)
    np.testing.assert_allclose(attributions, x.float() * model.weight[1].detach().float(), atol=0.02)


def test_the_tokens_that_moved_a_texts_answer(tmp_path):
    pytest.importorskip("captum")

    class Loud(torch.nn.Module):
        """The first class is how often token 2 stands in the text."""

        def forward(self, input_ids, attention_mask):
            found = ((input_ids == 2) * attention_mask).sum(1, keepdim=True).float()
            return torch.cat([found, 0 * found - 1], 1)

    package = write_package(Workload(Loud().eval(), text_batches()), Recipe(), tmp_path / "m", name="m",
                            settings=SETTINGS, handler="text", files={"tokenizer.json": tokenizer()})  # fmt: skip
    steps = find_handler(package, ModelRunner(package), "")
    ((body, _),) = steps.handle([b"one two one"], ["text/plain"], Explainer(package))
    rows = json.loads(body)
    assert rows == [{"token": "one", "score": 0.0}, {"token": "two", "score": 1.0}, {"token": "one", "score": 0.0}]


def test_a_handler_of_ones_own_explains_only_where_it_has_the_step(store):
    echo = open_package(store / "echo")
    steps = find_handler(echo, None, echo.handler_digest)
    with pytest.raises(UsageError, match="no step explain"):
        steps.handle([b"a"], [""], object())


def test_a_text_of_too_many_tokens_is_not_explained(tmp_path):
    """Every token is a call of the model: that many would hold the worker for minutes."""
    pytest.importorskip("captum")
    package = write_package(Workload(Sums(), text_batches()), Recipe(), tmp_path / "m", name="m", settings=SETTINGS)
    ones = np.ones((1, 2000), np.int64)
    with pytest.raises(UsageError, match="1024 elements"):
        Explainer(package).attribute([ones, ones])

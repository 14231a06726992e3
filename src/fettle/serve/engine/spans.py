"""OpenTelemetry: a span for each inference, with its wait in the queue and its batch inside. Off unless asked for."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from fettle.errors import needing
from fettle.serve.engine.request import Answer


class Spans:
    """Records spans after the answer is known, so that an inference waits for nothing.

    Where they go is said by the environment as OpenTelemetry defines it: ``OTEL_EXPORTER_OTLP_ENDPOINT``,
    ``OTEL_SERVICE_NAME`` and so on. A client's ``traceparent`` becomes the parent.
    """

    def __init__(self, exporter: Any = None) -> None:
        with needing("otel", "spans need OpenTelemetry"):
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter()
        # `create` reads OTEL_SERVICE_NAME, which stands above what is given here only where it is set.
        own = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "fettle"}
        self._provider = TracerProvider(resource=Resource.create(own))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("fettle.serve")
        self._trace, self._propagator = trace, TraceContextTextMapPropagator()

    def record(
        self, headers: Mapping[bytes, bytes], model: str, version: str, status: int, began_s: float,
        answer: Answer | None,
    ) -> None:  # fmt: skip
        """One inference that began at `began_s` of `time.perf_counter` and is answered now."""
        offset_ns = time.time_ns() - time.perf_counter_ns()

        def wall_ns(seconds: float) -> int:
            return int(seconds * 1e9) + offset_ns

        parent = self._propagator.extract(
            {name: headers[name.encode()].decode("latin-1") for name in ("traceparent", "tracestate")
             if name.encode() in headers}
        )  # fmt: skip
        whole = self._tracer.start_span(
            f"infer {model}", parent, kind=self._trace.SpanKind.SERVER, start_time=wall_ns(began_s),
            attributes={"fettle.model": model, "fettle.version": version, "http.response.status_code": status},
        )  # fmt: skip
        if answer is not None and answer.done_s:
            inside = self._trace.set_span_in_context(whole)
            sent = answer.arrival_s + answer.queue_s
            queue = self._tracer.start_span("queue", inside, start_time=wall_ns(answer.arrival_s))
            queue.end(wall_ns(sent))
            batch = self._tracer.start_span(
                "batch", inside, start_time=wall_ns(sent),
                attributes={"fettle.batch_rows": answer.batch_rows, "fettle.join_ms": answer.join_s * 1e3,
                            "fettle.model_ms": answer.model_s * 1e3},
            )  # fmt: skip
            batch.end(wall_ns(answer.done_s))
        if status >= 500:
            whole.set_status(self._trace.StatusCode.ERROR)
        whole.end()

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

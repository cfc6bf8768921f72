"""A collector: takes OTLP over HTTP and decodes the protobuf, as the specification has it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Receiver:
    """spans: all that came; set `arrived` for each delivery."""

    url: str
    spans: list[Span] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    raw: bytes = b""

    def named(self, name: str) -> Span:
        (span,) = (span for span in self.spans if span.name == name)
        return span


def notes(span: Span) -> dict[str, object]:
    return {pair.key: _value(pair.value) for pair in span.attributes}


def _value(value: AnyValue) -> object:
    return getattr(value, value.WhichOneof("value") or "string_value")


@contextmanager
def running_receiver() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            request = ExportTraceServiceRequest.FromString(body)
            receiver.raw += body
            receiver.paths.add(self.path)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    receiver.spans.extend(scope.spans)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""Decodes what an OTLP collector was posted, with OpenTelemetry's own messages. Prints one JSON object per span.

usage: otlp_decode.py FILE...     each is the body of one POST /v1/traces
"""

import json
import sys

from google.protobuf.unknown_fields import UnknownFieldSet
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


def known_alone(message):
    """No message may have a field that its definition lacks."""
    if len(UnknownFieldSet(message)):
        sys.exit(f"{message.DESCRIPTOR.full_name} has fields that OpenTelemetry does not know")
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                known_alone(inner)


def attributes(pairs):
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


for path in sys.argv[1:]:
    with open(path, "rb") as file:
        request = ExportTraceServiceRequest.FromString(file.read())
    known_alone(request)
    for resource in request.resource_spans:
        service = attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                print(json.dumps({
                    "service": service["service.name"],
                    "trace": span.trace_id.hex(),
                    "span": span.span_id.hex(),
                    "parent": span.parent_span_id.hex(),
                    "name": span.name,
                    "kind": span.kind,
                    "took": span.end_time_unix_nano - span.start_time_unix_nano,
                    "failed": span.status.code == span.status.STATUS_CODE_ERROR,
                    "attributes": attributes(span.attributes),
                }))

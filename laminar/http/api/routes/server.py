"""Rows of the table of routes about the node that answers: version, probes, metrics, trace, pages, whoami."""

from __future__ import annotations

from typing import Final

from laminar.http.api.append_body import JSON_TYPE
from laminar.http.api.documents import access, server
from laminar.http.api.documents.find import trace
from laminar.http.api.parameters import IF_NONE_MATCH, METRICS_DETAIL, READY_REPLICAS, TRACE
from laminar.http.api.roles import ANY, METRICS, PUBLIC
from laminar.http.api.routes.route import UNCHANGED, Reply, Route, bytes_reply, json_reply

ROUTES: Final = (
    Route(
        "GET",
        "/v1/whoami",
        "whoami",
        ANY,
        "Tell who asks, what that principal may do, and its limits",
        replies=(json_reply(access.WhoAmI),),
    ),
    Route(
        "GET",
        "/v1/trace",
        "trace",
        ANY,
        "Tell what happened to records and who did it, a step at a time",
        TRACE,
        replies=(json_reply(trace.TraceFound),),
    ),
    Route(
        "GET",
        "/v1/datagram-key",
        "datagram_key",
        ANY,
        "Tell the key with which the credential that asks appends by datagram",
        replies=(json_reply(access.DatagramKey),),
    ),
    Route(
        "GET",
        "/v1/version",
        "version",
        PUBLIC,
        "Tell the server's version",
        replies=(json_reply(server.Version),),
    ),
    Route(
        "GET",
        "/v1/limits",
        "limits",
        ANY,
        "Tell the limits of requests",
        replies=(json_reply(server.RequestLimits),),
    ),
    Route(
        "GET", "/livez", "livez", PUBLIC, "Tell whether the node lives", replies=(json_reply(server.Alive),)
    ),
    Route(
        "GET",
        "/readyz",
        "readyz",
        PUBLIC,
        "Tell whether the node serves",
        (READY_REPLICAS,),
        replies=(json_reply(server.Ready), json_reply(server.NotReady, "It does not serve yet.", status=503)),
    ),
    Route(
        "GET",
        "/metrics",
        "metrics",
        METRICS,
        "Metrics in Prometheus' text format, or as OpenMetrics",
        METRICS_DETAIL,
        replies=(bytes_reply("text/plain", "application/openmetrics-text"),),
    ),
    Route(
        "GET",
        "/openapi.json",
        "openapi",
        PUBLIC,
        "This API as an OpenAPI document",
        replies=(bytes_reply(JSON_TYPE),),
    ),
    Route(
        "GET",
        "/console",
        "console_moved",
        PUBLIC,
        "Go to the console",
        replies=(Reply(308, "To `/console/`."),),
    ),
    Route(
        "GET",
        "/console/",
        "console",
        PUBLIC,
        "The web console",
        (IF_NONE_MATCH,),
        replies=(bytes_reply("text/html"), UNCHANGED),
    ),
    Route(
        "GET",
        "/console/{file}",
        "console_file",
        PUBLIC,
        "A file of the web console",
        (IF_NONE_MATCH,),
        replies=(
            bytes_reply("text/html", "text/javascript", "text/css", "image/svg+xml", "text/plain"),
            UNCHANGED,
        ),
    ),
    Route("GET", "/docs", "docs", PUBLIC, "This API as a page", replies=(bytes_reply("text/html"),)),
    Route(
        "GET",
        "/docs/errors",
        "docs",
        PUBLIC,
        "This API as a page: where the types of problems lead",
        replies=(bytes_reply("text/html"),),
    ),
)

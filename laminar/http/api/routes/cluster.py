"""Rows of the table of routes about the cluster and its nodes, for every client."""

from __future__ import annotations

from typing import Final

from laminar.http.api.documents import cluster, server
from laminar.http.api.parameters import AFTER_VERSION, WAIT
from laminar.http.api.roles import ADMIN_OF_ALL, ANY
from laminar.http.api.routes.route import UNCHANGED, Route, json_reply

ROUTES: Final = (
    Route(
        "GET",
        "/v1/cluster",
        "cluster",
        ANY,
        "Describe the cluster, or wait for its next version",
        (AFTER_VERSION, WAIT),
        replies=(json_reply(cluster.Cluster), UNCHANGED),
    ),
    Route(
        "GET",
        "/v1/health",
        "health",
        ANY,
        "Show what is wrong in the cluster, and what to do about it",
        replies=(json_reply(cluster.Health),),
    ),
    Route("GET", "/v1/nodes", "list_nodes", ANY, "List nodes", replies=(json_reply(cluster.Nodes),)),
    Route(
        "GET",
        "/v1/nodes/{node}",
        "describe_node",
        ANY,
        "Describe a node",
        replies=(json_reply(cluster.Node),),
    ),
    Route(
        "GET",
        "/v1/nodes/{node}/bundle",
        "node_bundle",
        ADMIN_OF_ALL,
        "Tell what a node says of itself, for those who help: no data of records, no secret",
        replies=(json_reply(server.NodeBundle),),
    ),
)

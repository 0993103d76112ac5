"""Rows of the table of routes for named producers, and for sinks and their batches."""

from __future__ import annotations

from typing import Final

from laminar.http.api.documents import transactions
from laminar.http.api.parameters import KEY, LISTING, ONCE, RECORD, RECORD_HEADERS, ROUTE, SINK_EPOCH, STAGE
from laminar.http.api.roles import ANY, WRITE_SINK, WRITE_STAGE
from laminar.http.api.routes.route import NO_CONTENT, Body, Route, json_reply

_SINK: Final = "/v1/sinks/{sink}"

ROUTES: Final = (
    Route(
        "POST",
        "/v1/producers",
        "begin_producer",
        ANY,
        "Get a producer's id and epoch; with a name, its previous holder is refused from now on",
        (KEY,),
        body=Body.JSON,
        document=transactions.NewProducer,
        replies=(json_reply(transactions.Producer, status=201),),
    ),
    Route(
        "GET",
        "/v1/sinks",
        "list_sinks",
        ANY,
        "List sinks",
        LISTING,
        replies=(json_reply(transactions.SinkPage),),
    ),
    Route(
        "GET",
        _SINK,
        "describe_sink",
        WRITE_SINK,
        "Describe a sink: its epoch, and the last batch that was committed",
        replies=(json_reply(transactions.Sink),),
    ),
    Route(
        "POST",
        _SINK,
        "begin_sink",
        WRITE_SINK,
        "Begin to drive a sink: older drivers are refused from now on",
        (SINK_EPOCH, ONCE, KEY),
        replies=(json_reply(transactions.Sink),),
    ),
    Route(
        "DELETE",
        _SINK,
        "delete_sink",
        WRITE_SINK,
        "Delete a sink: its driver is refused, and its name is free",
        (KEY,),
        replies=(NO_CONTENT,),
    ),
    Route(
        "POST",
        _SINK + "/batches/{number}/stages",
        "stage",
        WRITE_STAGE,
        "Stage records of a batch for a partition: they are readable when the batch is committed",
        (*RECORD, *STAGE, *RECORD_HEADERS, ROUTE),
        body=Body.RECORDS,
        replies=(json_reply(transactions.Staged, status=201),),
    ),
    Route(
        "POST",
        _SINK + "/batches/{number}/prepared",
        "prepare_stages",
        WRITE_SINK,
        "Keep stages of a batch in a partition, for a commit whose stages fill several requests",
        body=Body.JSON,
        document=transactions.Prepare,
        replies=(json_reply(transactions.Prepared),),
    ),
    Route(
        "PUT",
        _SINK + "/batches/{number}",
        "commit_batch",
        WRITE_SINK,
        "Commit a batch: all its stages in all partitions, or nothing",
        body=Body.JSON,
        document=transactions.Commit,
        replies=(json_reply(transactions.Committed),),
    ),
)

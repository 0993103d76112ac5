"""Rows of the table of routes for topics, their partitions, and the key ranges of partitions."""

from __future__ import annotations

from typing import Final

from laminar.http.api.documents import key_routes, partitions, records, topics
from laminar.http.api.parameters import (
    DESCRIBE_WAIT,
    IF_MATCH,
    IF_NONE_MATCH,
    READ_REPLICA,
    TOPIC_LISTING,
    WAIT,
    needed,
)
from laminar.http.api.roles import ADMIN, ANY, DESCRIBE
from laminar.http.api.routes.route import NO_CONTENT, PARTITION, TOPIC, UNCHANGED, Body, Route, json_reply

ROUTES: Final = (
    Route(
        "GET",
        "/v1/topics",
        "list_topics",
        ANY,
        "List topics",
        TOPIC_LISTING,
        replies=(json_reply(topics.TopicPage),),
    ),
    Route(
        "GET",
        TOPIC,
        "describe_topic",
        DESCRIBE,
        "Describe a topic",
        (IF_NONE_MATCH,),
        replies=(json_reply(topics.Topic), UNCHANGED),
    ),
    Route(
        "PUT",
        TOPIC,
        "create_topic",
        ADMIN,
        "Create a topic, if it isn't there yet",
        body=Body.JSON,
        document=topics.NewTopic,
        replies=(
            json_reply(topics.Topic, "Created.", status=201),
            json_reply(topics.Topic, "It exists already."),
        ),
    ),
    Route(
        "PATCH",
        TOPIC,
        "update_topic",
        ADMIN,
        "Change a topic's settings by a merge patch, or its number of replicas",
        (needed(IF_MATCH),),
        body=Body.JSON,
        document=topics.TopicPatch,
        replies=(json_reply(topics.Topic),),
    ),
    Route(
        "DELETE",
        TOPIC,
        "delete_topic",
        ADMIN,
        "Delete a topic and its records",
        (needed(IF_MATCH),),
        replies=(json_reply(topics.DeletedTopic, status=202),),
    ),
    Route(
        "GET",
        TOPIC + "/partitions",
        "list_partitions",
        DESCRIBE,
        "List a topic's partitions with leaders and replicas",
        (DESCRIBE_WAIT, READ_REPLICA),
        replies=(json_reply(partitions.Partitions),),
    ),
    Route(
        "GET",
        PARTITION,
        "describe_partition",
        DESCRIBE,
        "Describe a partition",
        replies=(json_reply(partitions.Partition),),
    ),
    Route(
        "DELETE",
        PARTITION,
        "reclaim_partition",
        ADMIN,
        "Delete a partition that others follow, once its records are acknowledged",
        replies=(json_reply(records.DeletedRecords),),
    ),
    Route(
        "GET",
        TOPIC + "/routes",
        "list_routes",
        DESCRIBE,
        "List the key ranges of a topic",
        replies=(json_reply(key_routes.KeyRoutes),),
    ),
    Route(
        "POST",
        TOPIC + "/routes",
        "begin_route",
        ADMIN,
        "Split, merge or move partitions",
        body=Body.JSON,
        document=key_routes.NewRoute,
        replies=(
            json_reply(key_routes.RouteChange, "It is done already."),
            json_reply(key_routes.RouteChange, "Begun: `Location` says how far it is.", status=202),
        ),
    ),
    Route(
        "GET",
        TOPIC + "/routes/{version}",
        "describe_route",
        DESCRIBE,
        "Describe the change that makes, or made, a route; with `wait_ms`, once it is done",
        (WAIT,),
        replies=(json_reply(key_routes.RouteChange),),
    ),
    Route(
        "DELETE",
        TOPIC + "/routes/{version}",
        "cancel_route",
        ADMIN,
        "Cancel a change of a route that has not ended a partition yet",
        replies=(NO_CONTENT,),
    ),
)

"""Rows of the table of routes for consumers: cursors, channels with their jobs, consumer groups."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from laminar.http.api.append_body import JSON_TYPE
from laminar.http.api.documents import channels, cursors, groups, jobs
from laminar.http.api.parameters import IF_MATCH, JOB_LISTING, LISTING, needed
from laminar.http.api.roles import ADMIN, DESCRIBE, READ
from laminar.http.api.routes.route import NO_CONTENT, TOPIC, Body, Reply, Route, json_reply
from laminar.wire.channels import JOBS_TYPE, STREAM_TYPE

_CHANNEL: Final = TOPIC + "/channels/{channel}"

ROUTES: Final = (
    Route(
        "GET",
        TOPIC + "/cursors",
        "list_cursors",
        READ,
        "List a topic's cursors",
        LISTING,
        replies=(json_reply(cursors.CursorPage),),
    ),
    Route(
        "GET",
        TOPIC + "/cursors/{cursor}",
        "describe_cursor",
        READ,
        "Describe a cursor: positions and lag",
        replies=(json_reply(cursors.Cursor),),
    ),
    Route(
        "PUT",
        TOPIC + "/cursors/{cursor}",
        "set_cursor",
        READ,
        "Move a cursor, by compare-and-set",
        body=Body.JSON,
        document=cursors.CursorChange,
        replies=(json_reply(cursors.Cursor),),
    ),
    Route(
        "DELETE",
        TOPIC + "/cursors/{cursor}",
        "delete_cursor",
        READ,
        "Delete a cursor",
        replies=(NO_CONTENT,),
    ),
    Route(
        "GET",
        TOPIC + "/channels",
        "list_channels",
        DESCRIBE,
        "List a topic's channels",
        LISTING,
        replies=(json_reply(channels.ChannelPage),),
    ),
    Route(
        "GET",
        _CHANNEL,
        "describe_channel",
        DESCRIBE,
        "Describe a channel: its settings, and where it stands in each partition",
        replies=(json_reply(channels.Channel),),
    ),
    Route(
        "PUT",
        _CHANNEL,
        "create_channel",
        ADMIN,
        "Create a channel, if it isn't there yet",
        body=Body.JSON,
        document=channels.NewChannel,
        replies=(
            json_reply(channels.Channel, "Created, and open in all partitions.", status=201),
            json_reply(channels.Channel, "It exists already."),
        ),
    ),
    Route(
        "PATCH",
        _CHANNEL,
        "update_channel",
        ADMIN,
        "Change a channel's settings by a merge patch",
        (needed(IF_MATCH),),
        body=Body.JSON,
        document=channels.ChannelPatch,
        replies=(json_reply(channels.Channel),),
    ),
    Route(
        "DELETE",
        _CHANNEL,
        "delete_channel",
        ADMIN,
        "Delete a channel, and what it knows of each record",
        (IF_MATCH,),
        replies=(NO_CONTENT,),
    ),
    Route(
        "POST",
        _CHANNEL + "/receive",
        "receive_jobs",
        READ,
        "Receive records that go to no other consumer until they are late",
        body=Body.JSON,
        document=jobs.Receive,
        replies=(
            Reply(
                200,
                "What was given out; none if there was nothing in time. Or a stream of it.",
                MappingProxyType({JSON_TYPE: jobs.Received, JOBS_TYPE: None, STREAM_TYPE: None}),
            ),
        ),
    ),
    Route(
        "POST",
        _CHANNEL + "/acks",
        "settle_jobs",
        READ,
        "Acknowledge, refuse, release or extend records that were received",
        body=Body.JSON,
        document=jobs.Acks,
        replies=(json_reply(jobs.Settled),),
    ),
    Route(
        "PUT",
        _CHANNEL + "/position",
        "seek_channel",
        READ,
        "Move a channel: what comes after its new position is given out again",
        body=Body.JSON,
        document=jobs.Position,
        replies=(json_reply(jobs.Positioned),),
    ),
    Route(
        "GET",
        _CHANNEL + "/aside",
        "list_aside",
        READ,
        "List the records that wait to be tried again",
        JOB_LISTING,
        replies=(json_reply(jobs.AsidePage),),
    ),
    Route(
        "GET",
        _CHANNEL + "/dead",
        "list_dead",
        READ,
        "List the dead records",
        JOB_LISTING,
        replies=(json_reply(jobs.AsidePage),),
    ),
    Route(
        "POST",
        _CHANNEL + "/dead",
        "settle_dead",
        READ,
        "Replay or drop dead records",
        body=Body.JSON,
        document=jobs.DeadChange,
        replies=(json_reply(jobs.DeadChanged),),
    ),
    Route(
        "GET",
        TOPIC + "/groups/{group}",
        "describe_group",
        READ,
        "Describe a group: members and cursors",
        replies=(json_reply(groups.Group),),
    ),
    Route(
        "PUT",
        TOPIC + "/groups/{group}/members/{member}",
        "renew_member",
        READ,
        "Join a group or renew a member's session, and list the members",
        body=Body.JSON,
        document=groups.Renewal,
        replies=(json_reply(groups.RenewedMember),),
    ),
    Route(
        "DELETE",
        TOPIC + "/groups/{group}/members/{member}",
        "leave_group",
        READ,
        "Leave a group",
        replies=(NO_CONTENT,),
    ),
)

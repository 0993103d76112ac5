"""The HTTP route that tells clients the limits of their requests."""

from __future__ import annotations

import msgspec

from laminar.http.api.documents import server as documents
from laminar.http.api.documents.shared import MAX_PARTITIONS, MAX_REPLICAS
from laminar.http.api.documents.transactions import MAX_STAGES
from laminar.http.api.limits import Limits
from laminar.http.api.parameters import MAX_FETCH_BYTES, MAX_FETCH_RECORDS, MAX_UPLOAD_PARTS, MAX_WAIT_MS
from laminar.http.protocol.messages import Request, Response
from laminar.http.protocol.request_head import LONGEST_HEAD_BYTES, LONGEST_TARGET_BYTES, MOST_HEADERS
from laminar.node.transactions.uploads import MAX_OPEN


class RequestLimitsRoute:
    """The handler of the HTTP route of the limits of requests."""

    def __init__(self, limits: Limits, *, max_upload_bytes: int) -> None:
        self._limits = limits
        self._max_upload_bytes = max_upload_bytes

    def limits(self, request: Request) -> Response:
        """Answer GET /v1/limits with the largest sizes and counts that requests may have."""
        return Response.json(
            documents.RequestLimits(
                **msgspec.structs.asdict(self._limits),
                max_head_bytes=LONGEST_HEAD_BYTES,
                max_head_fields=MOST_HEADERS,
                max_target_bytes=LONGEST_TARGET_BYTES,
                max_fetch_bytes=MAX_FETCH_BYTES,
                max_fetch_records=MAX_FETCH_RECORDS,
                max_wait_ms=MAX_WAIT_MS,
                max_partitions=MAX_PARTITIONS,
                max_replicas=MAX_REPLICAS,
                max_upload_parts=MAX_UPLOAD_PARTS,
                max_stages_of_partition=MAX_STAGES,
                max_uploads_of_partition=MAX_OPEN,
                max_upload_bytes_of_partition=self._max_upload_bytes,
            )
        )

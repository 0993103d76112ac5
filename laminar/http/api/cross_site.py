"""The refusal of requests that a web page of another site may have sent (cross-site request forgery).

A browser sends requests of any page to any address that it can reach, this machine's loopback included. Three
checks refuse the requests of other sites' pages, and need no credentials:

- `Host` names this server: an IP address, localhost, or one of its names. A page whose own name was made to
  resolve to our address (DNS rebinding) sends its own name.
- `Origin`, which browsers add to whatever may change something, is that of the server itself or of a listed
  site; `Sec-Fetch-Site: cross-site` without a listed origin is refused too. Only a link to the console may be
  followed from anywhere: its files are the same for everyone.
- A body has a content type that a page cannot send to another site without asking first, by a request that is
  refused here (CORS preflight). Forms can send three types; older browsers send those without `Origin`.

Programs other than browsers send neither `Origin` nor `Sec-Fetch-Site`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final

from laminar.http.api.problems import Problem
from laminar.http.api.routes import BODIES, Body
from laminar.http.protocol.request_head import RequestHead

# The content type that `curl -d` gives every body. A form can send it too, with `Origin` or from a page of
# this server only.
FORM_TYPE: Final = "application/x-www-form-urlencoded"
# Content types that a page can send to any site without asking, beside `FORM_TYPE`.
PAGE_TYPES: Final = ("text/plain", "multipart/form-data")


class Sites:
    """The sites whose pages may use a server: the server itself, by its names, and listed origins.

    A name that begins with a dot stands for every name below it.
    """

    def __init__(self, names: Iterable[str], origins: Iterable[str] = ()) -> None:
        given = [name.lower().rstrip(".") for name in names if name]
        self._names = frozenset(["localhost", *given])
        self._suffixes = tuple(name for name in given if name.startswith("."))
        self._origins = frozenset(origin.lower() for origin in origins)

    def check(self, head: RequestHead) -> None:
        """Raise `Problem` for a request that a page of another site may have sent.

        It is 421 `wrong_host` if `Host` names another server, and 403 `cross_site` if a page of a site that
        is not listed sent the request.
        """
        headers = head.headers
        host = headers.get("host", "")
        if host and not self._is_own(host):
            raise Problem(
                "wrong_host",
                "the Host header names another server",
                field="host",
                value=host,
                limit="this node's names, localhost, IP addresses",
            )
        origin = headers.get("origin")
        if origin is not None:
            if not self._is_known(origin, host):
                raise Problem(
                    "cross_site", "a page of another site asks for this", field="origin", value=origin
                )
        elif headers.get("sec-fetch-site", "").lower() == "cross-site" and not _is_visit(head):
            raise Problem(
                "cross_site",
                "a page of another site asks for this",
                field="sec-fetch-site",
                value="cross-site",
            )

    def _is_own(self, host: str) -> bool:
        name = host.lower()
        if name.startswith("["):
            name, _, rest = name[1:].partition("]")
            if rest and not rest.startswith(":"):
                return False
        else:
            name = name.partition(":")[0].rstrip(".")
        if name in self._names or name.endswith(self._suffixes):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_known(self, origin: str, host: str) -> bool:
        origin = origin.lower()
        if origin in self._origins:
            return True
        scheme, mark, authority = origin.partition("://")
        return bool(mark) and scheme in ("http", "https") and authority == host.lower()


def _is_visit(head: RequestHead) -> bool:
    """Return whether a browser opens a page of the console, for example because a link was followed."""
    return (
        head.method == "GET"
        and (head.path == "/console" or head.path.startswith("/console/"))
        and head.headers.get("sec-fetch-mode", "") == "navigate"
        and head.headers.get("sec-fetch-dest", "") == "document"
    )


def check_body_type(head: RequestHead, operation: str) -> None:
    """Raise `Problem` 415 for a body with a content type that a page of another site could send.

    A JSON document must have the type of JSON. Records may have any type except `PAGE_TYPES`. The `operation`
    says which of the two the body is (docs/protocol.md#web-pages).
    """
    kind = BODIES.get(operation, Body.NONE)
    if kind is Body.NONE or not (head.content_length or head.chunked):
        return
    given = head.headers.get("content-type", "")
    name = given.partition(";")[0].strip().lower()
    if kind is Body.JSON:
        # A form always has a type, and any other request of a page without one has an `Origin`.
        if name in ("", "application/json") or name.endswith("+json"):
            return
        # Pages of other sites cannot PUT or PATCH without asking first, whatever the type.
        if head.method != "POST" and name == FORM_TYPE:
            return
        limit = "application/json"
    else:
        if name not in PAGE_TYPES:
            return
        limit = f"any type except {' and '.join(PAGE_TYPES)}"
    raise Problem(
        "unsupported_media_type",
        "this type of body is not taken here",
        field="content-type",
        value=given,
        limit=limit,
        hint="Send a document as application/json, a record as application/octet-stream.",
    )

"""`laminar context`: names for clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from laminar.cli.contexts import Contexts
from laminar.cli.errors import UsageError
from laminar.cli.options import AS_TABLE, Listing


def add(
    name: Annotated[str, Parameter(help="A name for the cluster.")],
    *urls: Annotated[
        str, Parameter(help="URLs of its nodes, also with commas between; one is enough, more are safer.")
    ],
    token: Annotated[
        str | None,
        Parameter(help="The token. Other users of this machine can see it here, but not in --token-file."),
    ] = None,
    token_file: Annotated[
        Path | None, Parameter(help="A file with the token, which each command reads again.")
    ] = None,
    ca: Annotated[
        Path | None, Parameter(help="A PEM file with the CA of the cluster's certificates.")
    ] = None,
    certificate: Annotated[
        Path | None, Parameter(help="A PEM file with a certificate that says who asks, in place of a token.")
    ] = None,
    certificate_key: Annotated[
        Path | None, Parameter(help="A PEM file with its key, unless that is in the same file.")
    ] = None,
    use: Annotated[
        bool, Parameter(negative="", help="Make it the current one; the first always is.")
    ] = False,
) -> None:
    """Add a context, or replace it."""
    from laminar.client.net.endpoints import resolve

    if not urls:
        raise UsageError("give one URL at least: laminar context add NAME http://HOST:PORT")
    found = resolve(
        urls,
        token,
        token_file=token_file,
        ca=ca,
        certificate=certificate,
        key=certificate_key,
        environment={},
    )
    context: dict[str, object] = {"urls": list(found.urls)}
    if token is not None:
        context["token"] = token
    # Paths are kept whole: commands run in any folder.
    files = {"token_file": token_file, "ca": ca, "certificate": certificate, "key": certificate_key}
    for key, file in files.items():
        if file is not None:
            if not file.is_file():
                raise UsageError(f"{file}: there is no such file")
            context[key] = str(file.absolute())
    contexts = Contexts.load()
    contexts.by_name[name] = context
    if use or contexts.current is None:
        contexts.current = name
    contexts.save()


def use(name: Annotated[str, Parameter(help="A context that was added.")]) -> None:
    """Make a context the current one."""
    contexts = Contexts.load()
    if name not in contexts.by_name:
        known = ", ".join(sorted(contexts.by_name)) or "none yet"
        raise UsageError(f"there is no context {name!r} (there are: {known})")
    contexts.current = name
    contexts.save()


def list_contexts(*, listing: Listing = AS_TABLE) -> None:
    """List contexts."""
    from laminar.cli.output import show

    contexts = Contexts.load()
    rows = [
        {
            "context": name,
            "current": name == contexts.current,
            "urls": context.get("urls") or [context.get("url", "")],
            "token": "set" if context.get("token") else context.get("token_file"),
            "ca": context.get("ca"),
            "certificate": context.get("certificate"),
        }
        for name, context in sorted(contexts.by_name.items())
    ]
    show(rows, listing, columns=("context", "current", "urls"), name="context")

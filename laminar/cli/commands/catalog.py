"""`laminar catalog`: the cluster's own records, where an operator must decide for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from laminar.cli.errors import Failed, UsageError, complain
from laminar.cli.exit_codes import EXIT_DONE, EXIT_FAILED
from laminar.cli.options import AS_TABLE, Listing


def recover(
    folder: Annotated[Path, Parameter(help="The data folder of a node that is stopped.")],
    *,
    accept_loss: Annotated[
        bool,
        Parameter(negative="", help="Remove the other controllers for good. Without it: show what is there."),
    ] = False,
    into: Annotated[
        str | None,
        Parameter(help="Take this folder into the epoch that the recovery of another folder has printed."),
    ] = None,
    listing: Listing = AS_TABLE,
) -> int:
    """Let the catalog continue with this folder's copy, when a majority of its voters is gone for good.

    Stop all nodes that are left, run it without an option on each of their folders, and choose the one with
    the latest last term, then the highest last index. Changes of topics and places that only the lost nodes
    held are lost. Then start that node, and take the other folders into the epoch that it has printed.
    """
    from laminar.cli.output import show
    from laminar.log.disk.disk import RealDisk
    from laminar.log.disk.errors import StorageError
    from laminar.node.catalog.recovery import Refused, StoppedNode
    from laminar.node.runtime.data_folder import IdentityError

    if accept_loss and into is not None:
        raise UsageError("--accept-loss and --into are mutually exclusive")
    epoch = b""
    if into is not None:
        try:
            epoch = bytes.fromhex(into)
        except ValueError:
            epoch = b""
        if len(epoch) != 16:
            raise UsageError(f"--into must be the 32 hexadecimal digits that a recovery printed, not {into}")
    try:
        node = StoppedNode(RealDisk(), str(folder))
        try:
            copy = asyncio.run(node.describe())
            if into is not None:
                node.take_into(epoch)
            elif accept_loss:
                epoch = asyncio.run(node.recover())
        finally:
            node.close()
    except (Refused, IdentityError, StorageError) as error:
        raise Failed(str(error)) from error
    row = {
        "node": copy.node,
        "cluster": copy.cluster,
        "epoch": epoch.hex() or copy.epoch or "none",
        "voters": copy.voters,
        "last_term": copy.last_term,
        "last_index": copy.last_index,
    }
    show([row], listing, columns=tuple(row), name="node")
    if not accept_loss and into is None:
        complain("nothing was done: with --accept-loss the voters on other nodes are removed for good")
        return EXIT_FAILED
    return EXIT_DONE

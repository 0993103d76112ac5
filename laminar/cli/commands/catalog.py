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
    """Restart the catalog from this folder's copy, after a majority of its voters is lost for good.

    1. Stop all nodes that are left. 2. Run this without an option on each of their folders, and choose the
    folder with the highest last term, then the highest last index. 3. Run it there with --accept-loss: it
    removes the other voters and prints the epoch of this recovery. 4. Start that node. 5. Run it with
    --into EPOCH on each other folder. Changes of topics and placements that only lost nodes had are lost.
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

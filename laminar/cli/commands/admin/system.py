"""`laminar system unit`: a unit of systemd for a node on this machine."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from laminar.cli.errors import UsageError

UNIT = """\
[Unit]
Description=Laminar, a replicated log and message queue
Wants=network-online.target
After=network-online.target
# A fault that no restart can mend fails as any other: five tries, then an operator.
StartLimitIntervalSec=60
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
User={user}
ExecStart={program} serve --config {config} --data {data}
ExecReload=/bin/kill -HUP $MAINPID
# A node drains, hands its leaderships over and syncs.
TimeoutStopSec=30
Restart=on-failure
RestartSec=2
LimitNOFILE=65536
LimitCORE=0
# What may be written: the data folder alone.
ProtectSystem=strict
{writable}
ProtectHome={home}
PrivateTmp=true
PrivateDevices=true
ProtectKernelTunables=true
ProtectKernelModules=true
ProtectKernelLogs=true
ProtectControlGroups=true
ProtectClock=true
ProtectHostname=true
NoNewPrivileges=true
RestrictSUIDSGID=true
RestrictNamespaces=true
RestrictRealtime=true
LockPersonality=true
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
SystemCallArchitectures=native
UMask=0077

[Install]
WantedBy=multi-user.target
"""


def unit(
    *,
    data: Annotated[Path, Parameter(help="The node's data folder.")] = Path("/var/lib/laminar"),
    config: Annotated[Path, Parameter(help="The TOML file of its settings.")] = Path(
        "/etc/laminar/laminar.toml"
    ),
    user: Annotated[str, Parameter(help="The user that it runs as.")] = "laminar",
) -> None:
    """Print a unit of systemd, which restarts the node, and lets it write only its data folder.

    A node that steers packets by XDP (setting `steer`) needs more rights than this unit gives.
    """
    for name, path in (("data", data), ("config", config)):
        if not path.is_absolute() or any(each.isspace() or each in "%\"'\\" for each in str(path)):
            raise UsageError(f"--{name} {path}: an absolute path, without blanks, quotes and %")
    program = _program()
    # Under ProtectHome=true nothing of /home, /root and /run/user is there.
    at_home = any(each.parts[1:2] in (("home",), ("root",)) for each in (data, config, program))
    # systemd makes a folder below /var/lib, for this user; another one has to be there.
    state = data.relative_to("/var/lib") if data.is_relative_to("/var/lib") else None
    writable = (
        f"ReadWritePaths={data}" if state is None else f"StateDirectory={state}\nStateDirectoryMode=0700"
    )
    values = {"data": data, "config": config, "user": user, "program": program, "writable": writable}
    print(UNIT.format(**values, home="read-only" if at_home else "true"), end="")


def _program() -> Path:
    """Return the path of the program that runs this, or of the one in the same folder as Python."""
    beside = Path(sys.executable).with_name("laminar")
    found = shutil.which("laminar")
    return beside if beside.exists() or found is None else Path(found)

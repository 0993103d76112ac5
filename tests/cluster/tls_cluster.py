"""A cluster of processes that speak TLS, with a CA of its own."""

from __future__ import annotations

import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from laminar.testing.cluster import LocalCluster
from tests.certificates import Authority, Pair

SECRET = "a secret of more than sixteen characters"


@dataclass
class TlsCluster(LocalCluster):
    """As a `LocalCluster`, and each node with a certificate of the cluster's CA."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.settings = {"secret": SECRET, **self.settings}
        self.authority = Authority(Path(self.directory) / "ca")
        self.context = self.authority.context()
        for number in range(self.nodes):
            self.certify(number)

    def certify(self, number: int, *, days: int = 10) -> Pair:
        """Write a new certificate of a node, in place of the one before."""
        node = self.members[number]
        return self.authority.node(node.name, node.host, days=days)

    @property
    def urls(self) -> list[str]:
        """Every node's HTTP address, running or not."""
        return [f"https://{node.host}:{node.port}" for node in self.members]

    def command(self, number: int) -> list[str]:
        """Return the command line of a node."""
        name = self.members[number].name
        folder = self.authority.folder
        pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
        flags = [
            part
            for setting, value in self.authority.settings(pair).items()
            for part in (f"--{setting.replace('_', '-')}", value)
        ]
        return super().command(number) + flags

    def client(self, **arguments: Any) -> httpx.Client:
        """Return a client that trusts the cluster's CA, and follows redirects."""
        return httpx.Client(
            verify=self.context, follow_redirects=True, timeout=60, trust_env=False, **arguments
        )

    def get(self, number: int, path: str) -> Any:
        """Return what a node answers as JSON; None unless the status is 200."""
        try:
            with self.client() as client:
                answer = client.get(f"{self.urls[number]}{path}")
        except httpx.HTTPError:
            return None
        return answer.json() if answer.status_code == 200 else None

    def metric(self, number: int, name: str, where: str = "") -> float:
        """Return the sum of a node's metric over its processes; of those with these labels, if any."""
        with self.client() as client:
            text = client.get(f"{self.urls[number]}/metrics").text
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith(name) and where in line
        )

    def hang_up(self, number: int) -> None:
        """Send SIGHUP to a node."""
        process = self.members[number].process
        assert process is not None
        process.send_signal(signal.SIGHUP)

    def serial(self, number: int) -> str:
        """Return the serial number of the certificate that a node shows to a new connection."""
        node = self.members[number]
        with self.context.wrap_socket(
            socket.create_connection((node.host, node.port), timeout=60), server_hostname=node.host
        ) as sock:
            shown = sock.getpeercert()
        assert shown is not None
        return str(shown["serialNumber"])

    def _is_ready(self, number: int) -> bool:
        node = self.members[number]
        if not node.running or self._node_file(number) is None:
            return False
        if self.get(number, "/readyz") is None:
            return False
        cluster = self.get(number, "/v1/cluster") or {}
        seen = {each["node"] for each in cluster.get("nodes", ()) if each.get("alive", True)}
        return {member.name for member in self.members if member.running} <= seen

"""A cluster of processes that asks for tokens, and may speak TLS."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from pathlib import Path
from typing import Any

import laminar
from laminar.cli import run
from laminar.testing.cluster import LocalCluster

SECRET = "a secret of the nodes of this test"


class Guarded(LocalCluster):
    """Nodes that ask for tokens; with `tls` also with certificates, which `laminar cert` makes."""

    def __init__(self, directory: Path, *, tls: bool, nodes: int = 3) -> None:
        super().__init__(directory, nodes=nodes, shards=2, settings={"access": "tokens", "secret": SECRET})
        self.ca: Path | None = None
        if tls:
            self.certificates = directory / "certificates"
            self.ca = self.certificates / "ca.pem"
            self.make_certificate("ca")
            for node in self.members:
                self.make_certificate("node", node.name, "--host", node.host)

    def make_certificate(self, *arguments: str) -> None:
        """Call `laminar cert` with these arguments."""
        made = run_laminar(self, "cert", *arguments, "--directory", str(self.certificates))
        assert 0 == made.returncode, made.stderr

    @property
    def urls(self) -> list[str]:
        return [node.url.replace("http:", "https:" if self.ca else "http:") for node in self.members]

    def command(self, number: int) -> list[str]:
        given = super().command(number)
        if self.ca is not None:
            name = str(self.certificates / self.members[number].name)
            given += [
                "--tls-certificate",
                f"{name}.pem",
                "--tls-key",
                f"{name}.key",
                "--tls-ca",
                str(self.ca),
            ]
        return given

    def connect(self, **arguments: Any) -> laminar.Client:
        """Return a client; with the first token unless another is given."""
        return laminar.connect(**{"url": self.urls, "token": self.admin_token, "ca": self.ca} | arguments)

    def _is_ready(self, number: int) -> bool:
        if self._node_file(number) is None or not self.admin_token:
            return False
        url = self.urls[number]
        try:
            with self.connect(url=url) as client:
                ready = client.ask_node(url, "/readyz").status == 200
                nodes = client.ask_node(url, "/v1/cluster").json().get("nodes", ())
        except laminar.Error:
            return False
        return ready and self.nodes == sum(each.get("alive", True) for each in nodes)


def run_laminar(cluster: Guarded, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run `laminar` on the cluster, with the environment of a process of its own, but in this one."""
    environment = cluster.environment() | {"LAMINAR_URL": ",".join(cluster.urls), **more}
    if cluster.ca is not None:
        environment["LAMINAR_CA"] = str(cluster.ca)
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    own = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environment)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(arguments)
    finally:
        os.environ.clear()
        os.environ.update(own)
    said = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return subprocess.CompletedProcess(arguments, code, *said)

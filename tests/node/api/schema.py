"""Schemathesis against a node, by the OpenAPI document that it serves: bounded runs for `make test-long`.

`python -m tests.node.api.schema PATH_OF_ST SEED [KIND...]`: no request that fits the document may get a 5xx,
or an answer whose status or type the document does not name, whoever asks: a reader, a writer, an admin, and
a client without a token. `test_api_fuzz.py` sends what fits no document.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from laminar.testing.cluster import LocalCluster

# By kind of principal: how many examples each operation gets. Of what it may not do few are enough.
EXAMPLES = {"admin": 20, "writer": 8, "reader": 8, "nobody": 3}
# All limits of each value, and beyond, are tried once as the one that may most, and without a token.
PHASES = {"admin": "coverage,fuzzing", "nobody": "coverage,fuzzing"}
ROLES = {"writer": "write", "reader": "read"}
# It takes ids from answers, so it would revoke its own token, delete the topic that all is about, or begin
# a change of its partitions, during which they answer 503.
LAST = ("begin_route", "delete_topic", "revoke_token")
TIME_LIMIT_S = 900
MOST = {"wait_ms": 20, "min_offset": 0}
IMPORTING = "importing"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
SETTINGS: dict[str, str | int] = {"access": "tokens", "default_replicas": 1, "max_append_bytes": 2 << 20}


def main() -> int:
    """The worst exit status of Schemathesis."""
    _, program, seed, *kinds = sys.argv
    worst = 0
    with (
        tempfile.TemporaryDirectory(prefix="laminar-schema-") as folder,
        LocalCluster(Path(folder), nodes=1, shards=1, settings=SETTINGS) as cluster,
        httpx.Client(base_url=cluster.urls[0], trust_env=False) as http,
    ):
        http.headers["authorization"] = f"Bearer {cluster.admin_token}"
        tokens = {"admin": cluster.admin_token, "nobody": ""}
        for kind, role in ROLES.items():
            document = {"name": kind, "grants": [{"role": role}]}
            tokens[kind] = http.post("/v1/admin/tokens", json=document).raise_for_status().json()["token"]
        # "0" is what a generator of names likes best.
        http.put("/v1/topics/0", json={}).raise_for_status()
        described = Path(folder) / "openapi.json"
        described.write_text(json.dumps(_impatient(http.get("/openapi.json").json())))
        for kind in kinds or EXAMPLES:
            print(f"-- as {kind}", flush=True)
            command = [program, "run", str(described), "--url", cluster.urls[0]]
            command += ["--phases", PHASES.get(kind, "fuzzing")]
            command += ["--checks", CHECKS, "--max-examples", str(EXAMPLES[kind]), "--seed", seed]
            command += ["--continue-on-failure", "--generation-with-security-parameters", "false"]
            if tokens[kind]:
                command += ["--header", f"Authorization: Bearer {tokens[kind]}"]
            for part in ("--exclude-operation-id", "--include-operation-id"):
                chosen = [word for operation in LAST for word in (part, operation)]
                worst = max(worst, subprocess.run([*command, *chosen], timeout=TIME_LIMIT_S).returncode)
    return worst


def _impatient(document: dict[str, Any]) -> dict[str, Any]:
    """The document, by which no request waits long: requests are made one after the other.

    Nor for records to come: a read of what is not there yet is answered with 503 `replica_lagging`. And no
    topic is made for an import: until that ends, all that asks for the topic is answered 503 `being_created`.
    """
    for methods in document["paths"].values():
        for operation in methods.values():
            for row in operation["parameters"]:
                if row["name"] in MOST:
                    row["schema"]["maximum"] = MOST[row["name"]]
    left_out = [
        schema["properties"].pop(IMPORTING, None)
        for schema in document["components"]["schemas"].values()
        if "properties" in schema
    ]
    assert any(left_out), f"no schema has {IMPORTING}: is it another name now?"
    return document


if __name__ == "__main__":
    sys.exit(main())

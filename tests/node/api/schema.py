"""Schemathesis against a node, by the OpenAPI document that it serves: a bounded run for `make test-long`.

`python -m tests.node.api.schema PATH_OF_ST SEED`: no request that fits the document may get a 5xx, or an
answer whose status or type the document does not name. `test_api_fuzz.py` sends what fits no document.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

import httpx

from laminar.testing.nodes import serve

EXAMPLES = 20
TIME_LIMIT_S = 900
LONGEST_WAIT_MS = 20
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def main() -> int:
    """The exit status of Schemathesis."""
    _, program, seed = sys.argv
    with serve(settings={"max_append_bytes": 2 << 20}) as url:
        # "0" is what a generator of names likes best.
        httpx.put(f"{url}/v1/topics/0", json={}, trust_env=False).raise_for_status()
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(_impatient(httpx.get(f"{url}/openapi.json", trust_env=False).json()), file)
            file.flush()
            command = [program, "run", file.name, "--url", url, "--phases", "fuzzing", "--checks", CHECKS]
            command += ["--max-examples", str(EXAMPLES), "--seed", seed, "--continue-on-failure"]
            return subprocess.run(command, timeout=TIME_LIMIT_S).returncode


def _impatient(document: dict[str, Any]) -> dict[str, Any]:
    """The document, by which no request waits long: requests are made one after the other."""
    for methods in document["paths"].values():
        for operation in methods.values():
            for row in operation["parameters"]:
                if row["name"] == "wait_ms":
                    row["schema"]["maximum"] = LONGEST_WAIT_MS
    return document


if __name__ == "__main__":
    sys.exit(main())

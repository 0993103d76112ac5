"""A client that knows Laminar's API from its OpenAPI document alone, and checks every answer against it."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx
from jsonschema import Draft202012Validator


class Described:
    """Calls operations by their ids; what is answered otherwise than described fails the test."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self.document: dict[str, Any] = http.get("/openapi.json").json()
        self.operations: dict[str, tuple[str, str, dict[str, Any]]] = {
            operation["operationId"]: (method.upper(), path, operation)
            for path, methods in self.document["paths"].items()
            for method, operation in methods.items()
        }
        self.called: set[tuple[str, int]] = set()

    def call(
        self,
        operation_id: str,
        *,
        document: object = None,
        content: bytes | None = None,
        media_type: str = "",
        accept: str = "",
        **parameters: str | int,
    ) -> httpx.Response:
        """The answer of an operation; its parameters are named as in the document, `-` written as `_`."""
        method, path, operation = self.operations[operation_id]
        query: dict[str, str | int] = {}
        headers: dict[str, str] = {"accept": accept} if accept else {}
        for row in operation["parameters"]:
            name = row["name"].replace("-", "_")
            if name not in parameters:
                assert not row.get("required"), f"{operation_id} needs {name}"
                continue
            value = parameters.pop(name)
            self.check(value, row["schema"])
            if row["in"] == "path":
                path = path.replace("{" + row["name"] + "}", quote(str(value), safe=""))
            elif row["in"] == "query":
                query[row["name"]] = value
            else:
                headers[row["name"]] = str(value)
        assert not parameters, f"{operation_id} is described without {parameters}"
        body = operation.get("requestBody", {})
        if document is not None:
            media_type = media_type or next(iter(body["content"]))
            self.check(document, body["content"][media_type]["schema"])
            headers["content-type"] = media_type
            answer = self._http.request(method, path, params=query, headers=headers, json=document)
        else:
            assert content is not None or not body.get("required"), f"{operation_id} needs a body"
            if content is not None:
                assert {media_type, "*/*"} & body["content"].keys(), f"{media_type} is not described"
                headers["content-type"] = media_type
            answer = self._http.request(method, path, params=query, headers=headers, content=content)
        self.judge(operation_id, answer)
        return answer

    def judge(self, operation_id: str, answer: httpx.Response) -> None:
        """The answer's status, media type and document are described."""
        self.called.add((operation_id, answer.status_code))
        responses = self.operations[operation_id][2]["responses"]
        response = responses.get(str(answer.status_code), responses["default"])
        if "$ref" in response:
            assert answer.status_code >= 400, f"{operation_id} describes no {answer.status_code}"
            name = response["$ref"].removeprefix("#/components/responses/")
            response = self.document["components"]["responses"][name]
        kind = answer.headers.get("content-type", "").partition(";")[0]
        if "content" not in response:
            assert not answer.content
            return
        schema = response["content"][kind]["schema"]
        if kind in ("application/json", "application/problem+json"):
            self.check(answer.json(), schema)

    def check(self, value: object, schema: dict[str, Any]) -> None:
        """The value fits the schema, whose references are into the document."""
        whole = schema | {"components": self.document["components"]}
        Draft202012Validator(whole).validate(value)

"""The rules of credentials: made once, never changed, revoked; the same on every node."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from laminar.http.api.documents import access as documents
from laminar.http.api.roles import ROLES
from membership import credential_rules as rules
from membership.catalog_delta import changed_by, delta_between
from membership.records import CatalogState, Grant
from membership.requests import ChangeAccess, CreateCredential, RevokeCredential

ID = "0123456789abcdef"
TOKEN = CreateCredential(
    id=ID,
    name="billing",
    grants=[Grant("write", "orders")],
    salt=b"s" * rules.SALT_BYTES,
    digest=b"d" * rules.DIGEST_BYTES,
    created_ms=5,
    expires_ms=9,
)


def follow(state: CatalogState, step: CreateCredential | RevokeCredential) -> tuple[CatalogState, str]:
    """State and outcome after a step."""
    after, result = rules.change_access(state, ChangeAccess(step))
    assert result.version == after.version
    return after, result.outcome


def test_a_credential_is_made_once_and_revoked() -> None:
    """A repetition changes nothing; another secret under the same id is refused."""
    made, outcome = follow(CatalogState(), TOKEN)
    record = made.credentials[ID]

    assert ("created", "billing", 9, 1) == (outcome, record.name, record.expires_ms, record.version)
    assert (made, "exists") == follow(made, TOKEN)
    assert (made, "already_exists") == follow(made, replace(TOKEN, digest=b"e" * 32))
    after, outcome = follow(made, RevokeCredential(ID))
    assert ("deleted", 0, 2) == (outcome, len(after.credentials), after.version)
    assert (after, "absent") == follow(after, RevokeCredential(ID))


def test_the_first_one_is_made_only_while_there_is_none() -> None:
    """Two leaders, one after the other: the second makes none."""
    first = replace(TOKEN, only_if_none=True)
    made, outcome = follow(CatalogState(), first)

    assert "created" == outcome
    assert (made, "conflict") == follow(made, replace(first, id="f" * 16))


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "0123"},
        {"id": ID.upper()},
        {"name": ""},
        {"name": "a b"},
        {"name": "a\n"},
        {"name": "n" * 201},
        {"grants": []},
        {"grants": [Grant("read", "")] * (rules.MOST_GRANTS + 1)},
        {"grants": [Grant("root", "")]},
        {"grants": [Grant("read", "a/b")]},
        {"grants": [Grant("read", "p" * 201)]},
        {"salt": b"short"},
        {"digest": b""},
        {"expires_ms": -1},
        {"certificate": "CN=billing"},
        {"certificate": "c" * 1001, "salt": b"", "digest": b""},
    ],
    ids=str,
)
def test_what_is_no_credential_is_refused(wrong: dict[str, Any]) -> None:
    """Whatever a node proposed: the rule does not trust it."""
    assert (CatalogState(), "invalid") == follow(CatalogState(), replace(TOKEN, **wrong))


def test_a_certificate_needs_no_secret() -> None:
    """Its subject name is all."""
    made, outcome = follow(CatalogState(), replace(TOKEN, certificate="CN=billing", salt=b"", digest=b""))

    assert ("created", "CN=billing") == (outcome, made.credentials[ID].certificate)


def test_there_are_at_most_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process has all of them in memory."""
    monkeypatch.setattr(rules, "MOST_CREDENTIALS", 1)
    made, _ = follow(CatalogState(), TOKEN)

    assert (made, "quota") == follow(made, replace(TOKEN, id="f" * 16))


def test_a_copy_follows_by_deltas_and_keeps_the_table_while_no_credential_changes() -> None:
    """What shards compare is the table itself."""
    made, _ = follow(CatalogState(), TOKEN)
    other = replace(made, version=2, next_replica_id=7)
    gone, _ = follow(other, RevokeCredential(ID))
    copy = changed_by(CatalogState(), delta_between(CatalogState(), made))

    assert made.credentials == copy.credentials
    same = changed_by(copy, delta_between(made, other))
    assert same.credentials is copy.credentials
    assert 0 == len(changed_by(same, delta_between(other, gone)).credentials)


def test_rules_and_documents_have_the_same_limits() -> None:
    """The catalog's packages do not know HTTP."""
    assert rules.ROLES == ROLES
    assert (rules.MOST_GRANTS, rules.MOST_SUBJECT_CHARACTERS) == (documents.MAX_GRANTS, documents.MAX_SUBJECT)
    assert rules.PREFIX.pattern == documents.PREFIX_PATTERN

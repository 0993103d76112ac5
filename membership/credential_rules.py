"""The rules of credentials: a credential never changes, it is made and revoked.

The functions are rules as in `catalog_rules`.
"""

from __future__ import annotations

import re

from membership.changes import Change, next_state, same_state
from membership.limit_rules import PRINCIPAL
from membership.records import CatalogState, CredentialRecord, Grant
from membership.requests import ChangeAccess, CreateCredential, RevokeCredential

ROLES = ("read", "write", "admin", "metrics")
"""The roles that a grant may give, as in `laminar.http.api.roles`; a test compares the two."""

MOST_CREDENTIALS = 10_000
"""Most credentials of the cluster: every process has all of them in memory."""

MOST_GRANTS = 64
"""Most grants of a credential."""

MOST_SUBJECT_CHARACTERS = 1_000
"""Most characters of the subject name of a client certificate."""

CREDENTIAL_ID = re.compile(r"[0-9a-f]{16}")
PREFIX = re.compile(r"[A-Za-z0-9._-]{0,200}")
SALT_BYTES, DIGEST_BYTES = 16, 32


def change_access(state: CatalogState, request: ChangeAccess) -> Change:
    """Create or revoke a credential, depending on the request's kind."""
    match request.step:
        case CreateCredential() as create:
            return create_credential(state, create)
        case RevokeCredential() as revoke:
            return revoke_credential(state, revoke)


def create_credential(state: CatalogState, request: CreateCredential) -> Change:
    """Record a credential, unless its id is taken or, with `only_if_none`, any credential is recorded.

    The same request once more changes nothing.
    """
    wrong = _wrong_credential(request)
    if wrong:
        return same_state(state, "invalid", wrong)
    known = state.credentials.get(request.id)
    if known is not None:
        same = (known.salt, known.digest) == (request.salt, request.digest)
        return same_state(state, "exists" if same else "already_exists", f"credential {request.id!r} exists")
    if request.only_if_none and state.credentials:
        return same_state(state, "conflict", "there are credentials already")
    if len(state.credentials) >= MOST_CREDENTIALS:
        return same_state(state, "quota", f"there are {MOST_CREDENTIALS} credentials")
    record = CredentialRecord(
        id=request.id,
        name=request.name,
        grants=request.grants,
        salt=request.salt,
        digest=request.digest,
        created_ms=request.created_ms,
        expires_ms=request.expires_ms,
        version=state.version + 1,
        certificate=request.certificate,
    )
    return next_state(state, "created", {}, credentials=state.credentials | {record.id: record})


def revoke_credential(state: CatalogState, request: RevokeCredential) -> Change:
    """Delete the credential with the request's id; the result is `absent` if there is none."""
    if request.id not in state.credentials:
        return same_state(state, "absent", f"no credential {request.id!r}")
    return next_state(state, "deleted", {}, credentials=state.credentials.changed({request.id: None}))


def _wrong_credential(request: CreateCredential) -> str:
    if CREDENTIAL_ID.fullmatch(request.id) is None:
        return f"id {request.id!r} is not 16 hexadecimal digits"
    if PRINCIPAL.fullmatch(request.name) is None:
        return f"name {request.name!r} is not 1 to 200 of A-Z a-z 0-9 . _ -"
    if not 1 <= len(request.grants) <= MOST_GRANTS:
        return f"{len(request.grants)} grants, of 1 to {MOST_GRANTS}"
    if request.expires_ms < 0:
        return f"expires_ms {request.expires_ms} is below 0"
    if len(request.certificate) > MOST_SUBJECT_CHARACTERS:
        return f"certificate of {len(request.certificate)} characters, of at most {MOST_SUBJECT_CHARACTERS}"
    sizes = (len(request.salt), len(request.digest))
    if sizes != ((0, 0) if request.certificate else (SALT_BYTES, DIGEST_BYTES)):
        return f"salt and digest of {sizes[0]} and {sizes[1]} bytes"
    return next(filter(None, map(_wrong_grant, request.grants)), "")


def _wrong_grant(grant: Grant) -> str:
    if grant.role not in ROLES:
        return f"role {grant.role!r} is not one of {', '.join(ROLES)}"
    if PREFIX.fullmatch(grant.prefix) is None:
        return f"prefix {grant.prefix!r} is not at most 200 of A-Z a-z 0-9 . _ -"
    return ""

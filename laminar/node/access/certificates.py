"""The subject name of a client's certificate in the form of credentials: `CN=billing,O=Example`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# The short forms in RFC 4514 of names in `ssl.SSLSocket.getpeercert`; others are left as they are.
_SHORT: Final = {
    "commonName": "CN",
    "countryName": "C",
    "domainComponent": "DC",
    "localityName": "L",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "stateOrProvinceName": "ST",
    "userId": "UID",
}
_ESCAPED: Final = frozenset('\\,+"<>;=')


def subject_of(certificate: Mapping[str, Any]) -> str:
    """Return the subject of a certificate in the form of `getpeercert`; parts in the certificate's order.

    Characters that separate parts are escaped in values, so that no two subjects have the same text. It is
    empty without a subject.
    """
    parts = []
    for part in certificate.get("subject", ()):
        parts.append("+".join(f"{_SHORT.get(name, name)}={_escaped(value)}" for name, value in part))
    return ",".join(parts)


def _escaped(value: str) -> str:
    return "".join(f"\\{each}" if each in _ESCAPED else each for each in value)

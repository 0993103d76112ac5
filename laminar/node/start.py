"""The start of a node: opens what its processes share, then runs its supervisor.

That is the data folder, the certificates, the secrets and the sockets. What cannot be opened is logged, and
ends the start with an exit code.
"""

from __future__ import annotations

import logging
import os

from laminar.log import StorageError
from laminar.node.access.cluster_secret import SecretError, keyring_of, with_secret
from laminar.node.entry_points import EntryPoints, default_entry_points
from laminar.node.host import machine
from laminar.node.host.certificates import CertificateError, Certificates, TlsFiles
from laminar.node.host.log_setup import set_up_logging
from laminar.node.host.settings import Settings, fault_of_open_http, is_loopback
from laminar.node.runtime.data_folder import DataFolder, IdentityError, check_owner, open_data_folder
from laminar.node.runtime.environment import Environment
from laminar.node.runtime.listeners import NodeSockets, open_kept_sockets, open_sockets, plan_ports
from laminar.node.supervisor import EXIT_FAILED, Supervisor

log = logging.getLogger("laminar.supervisor")

EXIT_USAGE = 2


def serve(
    settings: Settings, *, entry_points: EntryPoints | None = None, environment: Environment | None = None
) -> int:
    """Run a node until it is asked to stop; return the exit code. Call it in the process's only thread.

    A node that cannot start logs the reason and returns 1; or 2 if Python runs with -O, or would import one
    of our packages from another place.
    """
    set_up_logging(process=settings.node or "supervisor", level=settings.log_level, style=settings.log_format)
    if not __debug__:
        log.error("python -O removes the checks that keep data safe: start without -O and PYTHONOPTIMIZE")
        return EXIT_USAGE
    for line in machine.misplaced_packages():
        log.error("%s: start from another folder, or with python -P", line)
        return EXIT_USAGE
    shards = settings.shards or machine.shards_of_this_machine()
    directory = os.path.abspath(settings.data)
    environment = environment or Environment()
    try:
        certificates = open_certificates(settings)
        check_owner(settings.data)
        folder = open_data_folder(
            environment.disk,
            directory,
            node=settings.node or (certificates.only_name if certificates is not None else ""),
            joining=bool(settings.join),
        )
    except (CertificateError, IdentityError, StorageError) as error:
        log.error("%s", error)
        return EXIT_FAILED
    identity = folder.identity
    try:
        settings = with_secret(settings, directory, joins=identity.has_peers or bool(settings.join))
        secrets = keyring_of(settings, directory)
    except SecretError as error:
        log.error("%s", error)
        folder.close()
        return EXIT_FAILED
    try:
        if certificates is not None:
            certificates.name(folder.identity.node)
        sockets = open_sockets_of(settings, shards, folder)
    except (CertificateError, OSError, StorageError) as error:
        log.error("%s", error)
        folder.close()
        return EXIT_FAILED
    try:
        addresses = sockets.addresses(settings.public_host, gossip=settings.gossip_host)
    except OSError as error:
        log.error("%s", error)
        sockets.close()
        folder.close()
        return EXIT_FAILED
    set_up_logging(process=folder.identity.node, level=settings.log_level, style=settings.log_format)
    supervisor = Supervisor(
        settings,
        shards,
        folder,
        sockets,
        addresses,
        entry_points or default_entry_points(settings, environment),
        environment=environment,
        certificates=certificates,
        secrets=secrets,
    )
    return supervisor.run()


def open_certificates(settings: Settings) -> Certificates | None:
    """Return the certificates that the settings name; None without TLS.

    Raises:
        CertificateError: they cannot be used, or are not of the node that the settings name.
    """
    if not settings.tls:
        return None
    files = TlsFiles(settings.tls_certificate, settings.tls_key, settings.tls_ca)
    return Certificates(files, node=settings.node or None)


def open_sockets_of(settings: Settings, shards: int, folder: DataFolder) -> NodeSockets:
    """Open a node's sockets by its settings; for port 0 on the ports of the last start, if they are free."""
    # `load` has checked both; but `Settings` may have been made without it, and no listener may be open to
    # other machines unless the settings allow it.
    if not settings.secret and not is_loopback(settings.host):
        raise PermissionError(f"host {settings.host} is not loopback, and no secret is set")
    if fault_of_open_http(settings):
        raise PermissionError(fault_of_open_http(settings))
    if settings.port:
        return open_sockets(settings.host, plan_ports(settings.port, shards, None))
    sockets = open_kept_sockets(settings.host, shards, folder.read_ports())
    folder.write_ports(sockets.ports)
    return sockets

"""A socket that listens, for whoever serves HTTP.

Owns the errors of an address that cannot be had. Knows no protocol.
"""

from __future__ import annotations

import errno
import socket

from octavo.config.settings import ConfigError


def listen_tcp(host: str, port: int, *, send_buffer: int = 0) -> socket.socket:
    """A bound socket, which does not block. send_buffer: bytes of the kernel's, per connection; 0: its own choice.

    Raises ConfigError, which names host or port.
    """
    field = "port"
    try:
        info = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(info[0], socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        field = "port" if info[4][1] else "host"
        sock.bind(info[4])
    except socket.gaierror:
        raise ConfigError("host", host, "is no address of this machine") from None
    except OSError as error:
        field = "host" if error.errno == errno.EADDRNOTAVAIL else field
        value = port if field == "port" else host
        raise ConfigError(field, value, f"cannot be bound ({error.strerror})") from None
    if send_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    sock.setblocking(False)
    return sock

"""Addresses of this machine."""

from __future__ import annotations

import os
import socket


def get_ip() -> str:
    """This machine's address as others reach it; VLLM_HOST_IP if that is set."""
    if given := os.environ.get("VLLM_HOST_IP"):
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address of no machine: nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def get_open_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])

"""Which network interface a process binds: the one that leads to the master, or the one named."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys
from contextlib import suppress
from typing import NamedTuple

from hybridpar.errors import SpecError

_SIOCGIFADDR = 0x8915 if sys.platform == "linux" else 0xC0206921
_LOOPBACK = ("127.0.0.1", "lo" if sys.platform == "linux" else "lo0")


class Interface(NamedTuple):
    """A network interface and its IPv4 address."""

    address: str
    name: str


def interfaces() -> dict[str, str]:
    """Every interface that has an IPv4 address, and the address."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                request = struct.pack("40s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def choose_interface(named: str | None, master: str, port: int, num_hosts: int) -> Interface:
    """The one interface for our sockets, gloo and NCCL.

    That is the first of: the one named by the caller, by ``HYBRIDPAR_INTERFACE``, by
    ``GLOO_SOCKET_IFNAME``; loopback, if the whole job is on this host; the one that the way to the
    master leaves by.

    Args:
        named: what the caller names, or None.
        master: torchrun's ``MASTER_ADDR``.
        port: torchrun's ``MASTER_PORT``.
        num_hosts: how many hosts the job has.

    Raises:
        SpecError: if there is no such interface, or the way to the master is the loopback.
    """
    for setting, value in (
        ("RoleLauncher(interface=)", named),
        ("HYBRIDPAR_INTERFACE", os.environ.get("HYBRIDPAR_INTERFACE")),
        ("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME")),
    ):
        if value:
            return _named(setting, value)
    if num_hosts == 1:
        return Interface(*_LOOPBACK)
    address = _way_to(master, port)
    if ipaddress.ip_address(address).is_loopback:
        raise SpecError(
            f"MASTER_ADDR '{master}' is {_resolve(master)} on host {socket.gethostname()}: the "
            f"loopback, which the other {num_hosts - 1} hosts of the job cannot reach. Give "
            "torchrun an address that every host can reach (--rdzv-endpoint or --master-addr, and "
            "--local-addr), mend /etc/hosts, or name the interface with HYBRIDPAR_INTERFACE."
        )
    for name, known in interfaces().items():
        if known == address:
            return Interface(address, name)
    raise SpecError(
        f"The way from host {socket.gethostname()} to MASTER_ADDR '{master}' leaves by {address}, "
        f"which is the first address of no interface: {_list()}. Name one with "
        "HYBRIDPAR_INTERFACE."
    )


def _named(setting: str, name: str) -> Interface:
    address = interfaces().get(name)
    if address is None:
        raise SpecError(
            f"{setting} names the interface '{name}', but host {socket.gethostname()} has no such "
            f"interface with an IPv4 address. It has {_list()}."
        )
    return Interface(address, name)


def _list() -> str:
    return ", ".join(f"{name} ({address})" for name, address in interfaces().items()) or "none"


def _resolve(master: str) -> str:
    try:
        return socket.gethostbyname(master)
    except OSError as error:
        raise SpecError(
            f"Host {socket.gethostname()} finds no IPv4 address for MASTER_ADDR '{master}': "
            f"{error}. Give torchrun an address that every host can reach, or mend /etc/hosts."
        ) from error


def _way_to(master: str, port: int) -> str:
    """The address that packets to the master would have as their source; none is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_resolve(master), port))
        except OSError as error:
            raise SpecError(
                f"Host {socket.gethostname()} has no way to MASTER_ADDR '{master}': {error}. It "
                f"has the interfaces {_list()}."
            ) from error
        return str(probe.getsockname()[0])

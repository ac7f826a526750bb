"""Checks of interfaces and ports. Each tells what it found as a `Finding`."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from hybridpar.checkup.finding import Finding
from hybridpar.errors import SpecError
from hybridpar.launch.interfaces import choose_interface, interfaces

_ELSEWHERE = "192.0.2.1"  # of a block for examples (RFC 5737): the way to it is the default route
_PORT = 29500  # torchrun's own; no packet is sent
_FEW_PORTS = 1000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def chosen_interface(master: str | None = None) -> Finding:
    """The interfaces, and which a job over several hosts would take.

    Args:
        master: the address of the job's first host, torchrun's ``MASTER_ADDR``; None takes the
            default route.
    """
    listed = ", ".join(f"{name} {address}" for name, address in interfaces().items()) or "none"
    what = f"interfaces: {listed}; on one machine a job binds the loopback alone"
    try:
        chosen = choose_interface(None, master or _ELSEWHERE, _PORT, 2)
    except SpecError as error:
        if master is None and "names the interface" not in str(error):
            return Finding("ok", f"{what}; there is no way to other hosts")
        return Finding("fail", what, str(error))
    towards = "hosts" if master is None else master
    return Finding("ok", f"{what}; towards other {towards}: {chosen.name} {chosen.address}")


def host_name() -> Finding:
    """Whether this host's name leads to an address that others can reach."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Finding(
            "warn", f"host name: {name} has no address ({error})",
            "Over several hosts give torchrun addresses, not names; or mend /etc/hosts.",
        )  # fmt: skip
    if address.startswith("127.") and len(interfaces()) > 1:
        return Finding(
            "warn", f"host name: {name} is {address}, the loopback",
            "Over several hosts give torchrun --local-addr, or mend /etc/hosts. On one machine it "
            "does not matter.",
        )  # fmt: skip
    return Finding("ok", f"host name: {name} is {address}")


def ports() -> Finding:
    """Whether a socket on the loopback works, and how many ports the system chooses from."""
    try:
        _talk_to_myself()
    except OSError as error:
        return Finding(
            "fail", f"ports: a connection over the loopback fails: {error}",
            "Bring the loopback up (ip link set lo up), and allow connections to 127.0.0.1.",
        )  # fmt: skip
    low, high = 0, 0
    with suppress(OSError, ValueError):
        low, high = map(int, _RANGE.read_text().split())
    what = "ports: a connection over the loopback works"
    what += f"; the system chooses from {low} to {high}" if high else ""
    if high and high - low < _FEW_PORTS:
        return Finding("warn", what, "A connection takes one: widen net.ipv4.ip_local_port_range.")
    return Finding("ok", what)


def _talk_to_myself() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(2.0)
        with socket.create_connection(listener.getsockname(), timeout=2.0) as caller:
            answerer, _ = listener.accept()
            with answerer:
                answerer.settimeout(2.0)
                caller.sendall(b"1")
                if answerer.recv(1) != b"1":
                    raise OSError("what arrives is not what was sent")

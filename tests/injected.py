"""Preloaded into the forkserver of the tests: strikes a chosen process at a chosen moment.

What and where is in the environment variable HYBRIDPAR_TEST_FAULT: ``"ps0 mid kill FILE"``. Without
it nothing happens. FILE gets the moment of the strike.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from hybridpar.checkpoint import files
from hybridpar.launch import worker
from hybridpar.master import Master
from hybridpar.server.parameter_server import ParameterServer

_marking = threading.Lock()
STEPS = {"first": 1, "mid": 6}  # counted from 1: a step's turn


def strike(name: str, when: str) -> None:
    """Do to this process what the test wants, if it is the one and this is the moment."""
    fault = os.environ.get("HYBRIDPAR_TEST_FAULT", "").split()
    if fault[:2] != [name, when]:
        return
    how = fault[2]
    with _marking:  # to its end, or another thread's file would be empty when this one stops all
        Path(fault[3]).write_text(str(time.monotonic()))
        if how in ("kill", "stop"):
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
    if how == "raise":
        raise ArithmeticError("struck")
    if how == "exit":
        sys.exit(3)
    if how == "memory":
        torch.empty(1 << 50)


def strike_step(name: str, step: int) -> None:
    for when, number in STEPS.items():
        if step == number:
            strike(name, when)


def _patch() -> None:
    open_store, server_handle, master_handle = (
        worker.open_store,
        ParameterServer.handle,
        Master.handle,
    )

    def opening(assignment: Any, *args: Any) -> Any:
        strike(assignment.name, "start")
        return open_store(assignment, *args)

    def serving(self: ParameterServer, peer: str, method: str, args: tuple[Any, ...]) -> object:
        if method == "take_turn":
            strike_step(self._name, args[1].step)
        if method == "finish_save":  # its saver thread may be writing yet
            strike(self._name, "save")
        if method == "stop":
            strike(self._name, "shutdown")
        return server_handle(self, peer, method, args)

    def leading(self: Master, peer: str, method: str, args: tuple[Any, ...]) -> object:
        if method == "take_turn":
            strike_step("master", args[1].step)
        if method == "finish":
            strike("master", "shutdown")
        return master_handle(self, peer, method, args)

    def writing(folder: Path, name: str, state: object) -> Any:
        strike(name.removesuffix(".pt"), "save")
        return write_state(folder, name, state)

    write_state = files.write_state
    files.write_state = writing
    worker.open_store = opening
    ParameterServer.handle = serving  # type: ignore[method-assign]
    Master.handle = leading  # type: ignore[method-assign]


_patch()

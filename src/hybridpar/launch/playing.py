"""`play`: one role, from its beginning to its end, in whatever process it is given to."""

from __future__ import annotations

import datetime
import pickle
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hybridpar.errors import TrainFunctionError, WaitTimeoutError
from hybridpar.launch.assignment import Assignment
from hybridpar.launch.rendezvous import connect, connect_servers, listen
from hybridpar.launch.train_function import unpickled_work
from hybridpar.master import Master
from hybridpar.server.parameter_server import ParameterServer
from hybridpar.trainer.context import TrainerContext
from hybridpar.transport import Handler


class Where:
    """Lets reports name the step that this process is in."""

    context: TrainerContext | None = None

    @property
    def step(self) -> int | None:
        """The step; None before the first."""
        return None if self.context is None else self.context.step


def play(assignment: Assignment, store: Store, where: Where) -> bytes | None:
    """Play a role to its end in this process; a trainer's pickled result comes back."""
    if assignment.role == "master":
        _play_master(assignment, store)
    elif assignment.role == "ps":
        _play_server(assignment, store)
    else:
        return _play_trainer(assignment, store, where)
    return None


def _play_master(assignment: Assignment, store: Store) -> None:
    master = Master(
        assignment.roles.trainers,
        lambda: connect_servers(assignment, store),
        assignment.timeout_s,
    )
    vain = _VainWait()
    with closing(listen(assignment, store, vain.noted(master.handle), master.lose)):
        threading.Thread(target=vain.until, args=(master.wait_until_finished,), daemon=True).start()
        vain.wait()


def _play_server(assignment: Assignment, store: Store) -> None:
    server = ParameterServer(assignment.name, assignment.timeout_s)
    vain = _VainWait()
    with closing(listen(assignment, store, vain.noted(server.handle), server.lose)):
        # For as long as the job runs: the launcher ends it if the master dies.
        threading.Thread(target=vain.until, args=(server.stopped.wait,), daemon=True).start()
        vain.wait()


def _play_trainer(assignment: Assignment, store: Store, where: Where) -> bytes:
    device = _device(assignment)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("trainers", store),
        rank=assignment.rank,
        world_size=assignment.roles.trainers,
        # Longer than servers and master wait for whoever is missing, whom they can name.
        timeout=datetime.timedelta(seconds=assignment.timeout_s + 10),
    )
    master = connect(assignment, store, "master")
    servers = connect_servers(assignment, store)
    where.context = context = TrainerContext(
        rank=assignment.rank,
        num_trainers=assignment.roles.trainers,
        device=device,
        master=master,
        servers=servers,
        shares_memory=assignment.share_memory,
        attempt=assignment.attempt,
    )
    train, args = unpickled_work(assignment.name, assignment.work)
    result = _pickled_result(assignment.name, train(context, *args))
    for server in servers:
        server.settle()  # the last pushes of a loop by hand
        server.close()
    # The others may train for long yet.
    master.send("finish", assignment.rank).wait(patiently=True)
    master.close()
    return result


def _pickled_result(name: str, result: object) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TrainFunctionError(
            f"The train function on {name} returned a {type(result).__name__} that cannot be "
            f"pickled ({error}). Return plain values and tensors."
        ) from error


def _device(assignment: Assignment) -> torch.device:
    if assignment.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", assignment.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class _VainWait:
    """Ends a server or the master, saying why, when one of its calls has waited in vain.

    It knows who was missing. The trainers may be in an all-reduce, and hear its answer much later.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None

    def noted(self, handler: Handler) -> Handler:
        """A handler whose vain waits are noted."""

        def handle(peer: str, method: str, args: tuple[Any, ...]) -> object:
            try:
                return handler(peer, method, args)
            except WaitTimeoutError as error:
                self._end(error)
                raise

        return handle

    def until(self, done: Callable[[], object]) -> None:
        """End well when ``done`` returns, on a thread of its own; badly if it raises."""
        try:
            done()
            self._end(None)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self._end(error)

    def wait(self) -> None:
        """Wait for the end."""
        self._over.wait()
        if self._error is not None:
            raise self._error

    def _end(self, error: BaseException | None) -> None:
        if not self._over.is_set():
            self._error = error
            self._over.set()

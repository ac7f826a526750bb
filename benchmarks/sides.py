"""The sides of compare.py. Each trains a case in fresh processes and returns its steps' times.

`tutorial` is our own writing of the pattern of PyTorch's tutorial "Combining Distributed
DataParallel with Distributed RPC Framework": RemoteModule, distributed autograd and
DistributedOptimizer.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import CASES, LR, Batch, Case, DenseHalf, make_batches
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hybridpar as hp
from hybridpar.shared_memory import new_segment

Times = list[float]  # seconds of each timed step
WARM_UP = 20


def timed(case: Case, step: Callable[[Batch], object], rank: int) -> Times:
    """Take a case's steps, the first ones untimed."""
    batches = make_batches(case, rank)
    times = []
    for number in range(WARM_UP + case.steps):
        started = time.perf_counter()
        step(batches[number % len(batches)])
        if number >= WARM_UP:
            times.append(time.perf_counter() - started)
    return times


# -- hybridpar -------------------------------------------------------------------------------------


class Model(hp.HybridModel[Batch]):
    def __init__(self, case: Case) -> None:
        super().__init__(
            *(
                hp.RemoteEmbeddingSpec(
                    f"t{n}", num_embeddings=case.rows, embedding_dim=case.dim, mode="sum",
                    init=nn.init.zeros_,
                )
                for n in range(case.tables)
            )
        )  # fmt: skip
        self.dense = DenseHalf(case)
        self._one_id = case.ids == 1

    def sparse_inputs(self, batch: Batch) -> dict[str, Any]:
        if self._one_id:
            return {f"t{n}": ids for n, ids in enumerate(batch.ids)}
        return {f"t{n}": (ids, batch.offsets) for n, ids in enumerate(batch.ids)}

    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor:
        return self.dense([embeddings[f"t{n}"] for n in range(len(batch.ids))], batch.features)


def train_hybridpar(ctx: hp.TrainerContext, case: Case, consistency: str) -> Times:
    settings = hp.optim.RowWiseAdagrad(lr=LR) if case.row_wise_adagrad else hp.optim.SGD(lr=LR)
    loop = hp.TrainerLoop(
        Model(case), ctx,
        loss=lambda output, batch: F.cross_entropy(output, batch.target),
        dense_optimizer=lambda params: torch.optim.SGD(params, lr=LR),
        sparse_optimizer=settings, consistency=consistency,
    )  # fmt: skip
    batches = make_batches(case, ctx.rank)
    marks = []

    def stream() -> Iterator[Batch]:
        for number in range(WARM_UP + case.steps + 1):
            marks.append(time.perf_counter())  # asked for once a step
            yield batches[number % len(batches)]

    loop.fit(stream())
    return [after - before for before, after in zip(marks[WARM_UP:], marks[WARM_UP + 1 :])]


def hybridpar(case: Case, trainers: int, servers: int, consistency: str) -> list[Times]:
    roles = hp.Roles(trainers=trainers, servers=servers)
    launcher = hp.RoleLauncher(roles, num_threads=1, device="cpu")
    return launcher.run(train_hybridpar, (case, consistency))


def train_first_step(ctx: hp.TrainerContext) -> float:
    case = CASES["tutorial"]
    loop = hp.TrainerLoop(
        Model(case), ctx,
        loss=lambda output, batch: F.cross_entropy(output, batch.target),
        dense_optimizer=lambda params: torch.optim.SGD(params, lr=LR),
        sparse_optimizer=hp.optim.SGD(lr=LR),
    )  # fmt: skip
    loop.fit(make_batches(case, ctx.rank, count=1))
    return time.time()


def start() -> float:
    """Seconds from `launch` to the end of the first step, by a forkserver that is warm."""
    roles = hp.Roles(trainers=2, servers=1)
    hp.launch(train_first_step, roles=roles, device="cpu")
    started = time.time()
    return max(hp.launch(train_first_step, roles=roles, device="cpu")) - started


def train_and_look(ctx: hp.TrainerContext, case: Case) -> tuple[list[float], list[float]]:
    """Megabytes of each server, and of this trainer after some steps."""
    settings = hp.optim.RowWiseAdagrad(lr=LR) if case.row_wise_adagrad else hp.optim.SGD(lr=LR)
    loop = hp.TrainerLoop(
        Model(case), ctx,
        loss=lambda output, batch: F.cross_entropy(output, batch.target),
        dense_optimizer=lambda params: torch.optim.SGD(params, lr=LR),
        sparse_optimizer=settings,
    )  # fmt: skip
    batches = make_batches(case, ctx.rank)
    own = []
    for steps in (50, 50, 200):
        loop.fit(batches[n % len(batches)] for n in range(steps))
        own.append(megabytes(os.getpid(), "RssAnon"))
    return [megabytes(pid, "VmRSS") for pid in server_ids(loop)], own


def server_ids(loop: hp.TrainerLoop[Batch]) -> list[int]:
    """The processes whose memory this trainer reads the tables from."""
    tables, probe = loop.model._connected, new_segment(1)
    assert probe is not None
    shared = [
        server.call("share", tables.model_id, probe.handle) for server in tables.servers.values()
    ]
    return [handles[0].pid for handles in shared]


def megabytes(pid: int, what: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) / 1024
    return 0.0


def memory(case: Case) -> tuple[float, float, str]:
    """Megabytes that the tables and their state take, a server, and a trainer."""
    launcher = hp.RoleLauncher(hp.Roles(trainers=2, servers=1), num_threads=1, device="cpu")
    servers, own = launcher.run(train_and_look, (case,))[0]
    width = case.dim + (1 if case.row_wise_adagrad else 0)
    held = case.tables * case.rows * width * 4 / 2**20
    return held, servers[0], ", ".join(f"{value:.0f}" for value in own)


# -- one process, plain torch ----------------------------------------------------------------------


def make_table(case: Case) -> nn.EmbeddingBag:
    weight = torch.zeros(case.rows, case.dim)
    return nn.EmbeddingBag.from_pretrained(
        weight, freeze=False, mode="sum", sparse=not case.dense_gradients
    )


class RowWiseAdagrad(torch.optim.Optimizer):
    """torch has none: one accumulator a row, on the rows of a sparse gradient."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.zeros(p.shape[0], 1)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad.coalesce()
                rows, values = grad.indices()[0], grad.values()
                total = self.state[p]["sum"]
                total.index_add_(0, rows, values.square().mean(1, keepdim=True))
                values.div_(total[rows].sqrt_().add_(1e-10)).mul_(-group["lr"])
                index = rows.unsqueeze(1).expand_as(values)
                p.scatter_add_(0, index, values)


def train_plain(rank: int, case: Case, conn: Any) -> None:
    torch.set_num_threads(1)
    tables, dense = [make_table(case) for _ in range(case.tables)], DenseHalf(case)
    weights = [table.weight for table in tables]
    kind = RowWiseAdagrad if case.row_wise_adagrad else torch.optim.SGD
    sparse, top = kind(weights, lr=LR), torch.optim.SGD(dense.parameters(), lr=LR)

    def step(batch: Batch) -> None:
        pooled = [t(ids, batch.offsets) for t, ids in zip(tables, batch.ids)]
        loss = F.cross_entropy(dense(pooled, batch.features), batch.target)
        sparse.zero_grad()
        top.zero_grad()
        loss.backward()
        sparse.step()
        top.step()

    conn.send(timed(case, step, rank))


def plain(case: Case, copies: int) -> list[Times]:
    return in_processes(train_plain, [(rank, case) for rank in range(copies)])


# -- the dense half alone under DDP: what no side can beat -----------------------------------------


def step_dense(
    dense: nn.Module, optimizer: torch.optim.Optimizer, pooled: list[Tensor], batch: Batch
) -> None:
    """One step of the dense half on given rows."""
    loss = F.cross_entropy(dense(pooled, batch.features), batch.target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_ddp(rank: int, case: Case, world: int, port: int, conn: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    dense = DistributedDataParallel(DenseHalf(case))
    optimizer = torch.optim.SGD(dense.parameters(), lr=LR)

    def step(batch: Batch) -> None:
        bags = batch.offsets.numel()
        pooled = [torch.zeros(bags, case.dim, requires_grad=True) for _ in range(case.tables)]
        step_dense(dense, optimizer, pooled, batch)

    conn.send(timed(case, step, rank))
    dist.barrier()
    os._exit(0)


def ddp(case: Case, trainers: int) -> list[Times]:
    port = free_port()
    return in_processes(train_ddp, [(rank, case, trainers, port) for rank in range(trainers)])


# -- the tutorial's pattern ------------------------------------------------------------------------


def _take_steps(table_modules: Any, rank: int, case: Case) -> Times:
    """Runs in a trainer, sent there by the master, as in the tutorial."""
    import torch.distributed.autograd as dist_autograd
    from torch.distributed.optim import DistributedOptimizer
    from torch.distributed.rpc import RRef

    dense = DistributedDataParallel(DenseHalf(case))
    parameters = [p for module in table_modules for p in module.remote_parameters()]
    parameters += [RRef(p) for p in dense.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=LR)

    def step(batch: Batch) -> None:
        with dist_autograd.context() as context:
            pooled = [m.forward(i, batch.offsets) for m, i in zip(table_modules, batch.ids)]
            loss = F.cross_entropy(dense(pooled, batch.features), batch.target)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)

    return timed(case, step, rank)


def _tutorial_process(
    rank: int, case: Case, trainers: int, ports: tuple[int, int], conn: Any
) -> None:
    import warnings

    import torch.distributed.rpc as rpc
    from torch.distributed.nn import RemoteModule

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = "lo"
    names = [f"trainer{n}" for n in range(trainers)] + ["master", "ps"]
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{ports[1]}")
    if rank < trainers:
        address = f"tcp://127.0.0.1:{ports[0]}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=trainers)
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
    if names[rank] == "master":
        shape = {"mode": "sum", "sparse": not case.dense_gradients}
        modules = [
            RemoteModule("ps", nn.EmbeddingBag, args=(case.rows, case.dim), kwargs=shape)
            for _ in range(case.tables)
        ]
        futures = [
            rpc.rpc_async(name, _take_steps, args=(modules, n, case), timeout=0)
            for n, name in enumerate(names[:trainers])
        ]
        conn.send([future.wait() for future in futures])
    else:
        conn.send(None)
    rpc.shutdown()
    os._exit(0)


def tutorial(case: Case, trainers: int) -> list[Times]:
    ports = (free_port(), free_port())
    work = [(rank, case, trainers, ports) for rank in range(trainers + 2)]
    return next(times for times in in_processes(_tutorial_process, work) if times is not None)


# -- TorchRec --------------------------------------------------------------------------------------


def _torchrec_process(
    rank: int, case: Case, world: int, port: int, sharding: str, conn: Any
) -> None:
    """Two trainers that shard the tables between them, fused sparse optimizer."""
    import warnings

    warnings.simplefilter("ignore")
    import torchrec
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import (
        construct_module_sharding_plan,
        data_parallel,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    cpu = torch.device("cpu")
    keys = [f"t{n}" for n in range(case.tables)]
    collection = torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(
                name=key, feature_names=[key], embedding_dim=case.dim, num_embeddings=case.rows
            )
            for key in keys
        ],
        device=cpu,
    )
    kind = torchrec.optim.RowWiseAdagrad if case.row_wise_adagrad else torch.optim.SGD
    apply_optimizer_in_backward(kind, collection.parameters(), {"lr": LR})
    cut = {
        "table_wise": lambda n: table_wise(rank=n % world),
        "row_wise": lambda n: row_wise(),
        "data_parallel": lambda n: data_parallel(),
    }[sharding]
    plan = construct_module_sharding_plan(
        collection,
        {key: cut(n) for n, key in enumerate(keys)},
        local_size=world,
        world_size=world,
        device_type="cpu",
        sharder=EmbeddingBagCollectionSharder(),
    )
    sharded = DistributedModelParallel(
        collection,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=cpu,
        plan=ShardingPlan({"": plan}),
        sharders=[EmbeddingBagCollectionSharder()],
    )
    dense = DistributedDataParallel(DenseHalf(case))
    optimizer = torch.optim.SGD(dense.parameters(), lr=LR)

    def step(batch: Batch) -> None:
        lengths = torch.diff(batch.offsets, append=torch.tensor([batch.ids[0].numel()]))
        features = torchrec.KeyedJaggedTensor(
            keys=keys, values=torch.cat(batch.ids), lengths=lengths.repeat(case.tables)
        )
        step_dense(dense, optimizer, list(sharded(features).to_dict().values()), batch)

    conn.send(timed(case, step, rank))
    dist.barrier()
    os._exit(0)


def torchrec(case: Case, trainers: int, sharding: str) -> list[Times]:
    importlib.import_module("torchrec.distributed.model_parallel")  # once, for all processes
    port = free_port()
    work = [(rank, case, trainers, port, sharding) for rank in range(trainers)]
    return in_processes(_torchrec_process, work)


# -- processes -------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def in_processes(target: Callable[..., None], work: list[tuple[Any, ...]], limit_s: float = 300):
    """What each process sent back, from as many at once as there is work."""
    context = multiprocessing.get_context("fork")  # torch is imported once
    pipes, processes = [], []
    for args in work:
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=target, args=(*args, theirs)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        results = []
        for pipe in pipes:
            if not pipe.poll(limit_s):
                raise TimeoutError(f"{target.__name__} took more than {limit_s} s")
            results.append(pipe.recv())
        for process in processes:
            process.join(20)
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()

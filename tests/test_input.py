"""Whatever a user gives wrong is refused, saying what it is, where it is, and how to mend it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hybridpar as hp
import refused as r
from hybridpar.launch.train_function import unpickled_work
from hybridpar.messages import Room
from hybridpar.planner import check_memory, make_plan
from hybridpar.server.memory import available_bytes
from hybridpar.specs import specs_by_feature
from hybridpar.trainer.batches import Batches

optim = hp.optim


def loop(**options: Any) -> Callable[[], object]:
    given = {"loss": r.total, "dense_optimizer": r.adam} | options
    return lambda: hp.TrainerLoop(r.Model(), None, **given)  # type: ignore[arg-type]


def tower(**more: Any) -> hp.RemoteEmbeddingSpec:
    given = {"module": nn.Linear, "args": (2, 2), "optimizer": torch.optim.Adam}
    return hp.RemoteEmbeddingSpec("tower", **given | more)


# -- specs, settings and roles: no process is started ----------------------------------------------

SPECS: dict[str, tuple[Callable[[], object], str]] = {
    "no name": (lambda: r.table(""), "needs a name that is not empty, not ''"),
    "name of a number": (lambda: r.table(3), "needs a name that is not empty, not 3"),
    "no rows": (
        lambda: r.table(num_embeddings=0),
        "Table 'item' got num_embeddings=0. Give a whole number of at least 1",
    ),
    "negative rows": (lambda: r.table(num_embeddings=-5), "num_embeddings=-5. Give a whole"),
    "text as rows": (lambda: r.table(num_embeddings="10"), "num_embeddings='10'. Give a whole"),
    "rows of True": (lambda: r.table(num_embeddings=True), "num_embeddings=True. Give a whole"),
    "no columns": (lambda: r.table(embedding_dim=0), "embedding_dim=0. Give a whole"),
    "half a column": (lambda: r.table(embedding_dim=1.5), "embedding_dim=1.5. Give a whole"),
    "unknown mode": (lambda: r.table(mode="avg"), "mode='avg'. Give one of 'sum', 'mean', 'max'"),
    "unknown sharding": (lambda: r.table(sharding="rows"), "Give one of 'table_wise', 'row_wise'"),
    "dtype of ints": (lambda: r.table(dtype=torch.int8), "dtype=torch.int8. Give one of torch.flo"),
    "padding_idx past the end": (
        lambda: r.table(padding_idx=10), "padding_idx=10. Give an id within the 10 rows"),
    "padding_idx too negative": (lambda: r.table(padding_idx=-11), "an id within the 10 rows"),
    "half a padding_idx": (lambda: r.table(padding_idx=0.5), "padding_idx=0.5. Give an id"),
    "max_norm of 0": (lambda: r.table(max_norm=0), "max_norm=0. Give a finite number above 0"),
    "max_norm NaN": (lambda: r.table(max_norm=float("nan")), "max_norm=nan. Give a finite"),
    "text as max_norm": (lambda: r.table(max_norm="1"), "max_norm='1'. Give a finite"),
    "negative norm_type": (lambda: r.table(norm_type=-1), "norm_type=-1. Give a number above 0"),
    "pooling_factor of 0": (lambda: r.table(pooling_factor=0), "pooling_factor=0. Give a finite"),
    "text as a seed": (lambda: r.table(seed="x"), "seed='x'. Give a whole number that torch"),
    "seed too large": (lambda: r.table(seed=1 << 64), "Give a whole number that torch.manual_seed"),
    "init of a number": (lambda: r.table(init=0.5), "init=0.5. Give a function that fills"),
    "init of another shape": (
        lambda: r.table(init=torch.ones(4, 10)), "shape (4, 10). Give a tensor of shape (10, 4)"),
    "init without values": (
        lambda: r.table(init=torch.ones(10, 4, device="meta")), "a tensor of real numbers"),
    "trainable of text": (lambda: r.table(trainable="no"), "trainable='no'. Give True or False"),
    "features of text": (lambda: r.table(features="ab"), "such as features=('ab',)"),
    "features of numbers": (lambda: r.table(features=(1, 2)), "a tuple of names, such as"),
    "features of a number": (lambda: r.table(features=3), "features=3. Give a tuple of names"),
    "a feature twice": (lambda: r.table(features=("a", "a")), "Give each name once"),
    "optimizer of torch": (
        lambda: r.table(optimizer=torch.optim.Adam), "the settings hybridpar.optim.Adam(lr=...)"),
    "args without a module": (lambda: r.table(args=(1,)), "Give them together with module="),
    "two specs of one name": (
        lambda: specs_by_feature((r.table(), r.table())),
        "Two specs are named 'item'. Give every table its own name",
    ),
    "two tables of one feature": (
        lambda: specs_by_feature((r.table("a", features=("x",)), r.table("x"))),
        "Feature 'x' is claimed by tables 'a' and 'x'. A feature reads one table: rename",
    ),
    "a list of specs": (
        lambda: r.Model([r.table()]),  # type: ignore[arg-type]
        "got a list where a spec goes. Give it the specs one after another",
    ),
    "a module with rows": (lambda: tower(num_embeddings=3), "Give it to the module itself"),
    "a module with settings": (lambda: tower(optimizer=optim.Adam()), "such as torch.optim.Adam"),
    "args of a number": (lambda: tower(args=3), "Module 'tower' got args=3. Give a tuple"),
    "kwargs of a list": (lambda: tower(kwargs=[1]), "kwargs=[1]. Give a dict"),
    "a module without a server": (lambda: make_plan([tower()], 0), "1 tables on 0 servers"),
}  # fmt: skip

SETTINGS: dict[str, tuple[Callable[[], object], str]] = {
    "negative lr": (lambda: optim.SGD(lr=-1.0), "SGD got lr=-1.0. Give a finite number that is"),
    "text as lr": (lambda: optim.SGD(lr="0.1"), "SGD got lr='0.1'. Give a finite number"),
    "lr None": (lambda: optim.Adagrad(lr=None), "Adagrad got lr=None. Give a finite number"),
    "lr NaN": (lambda: optim.Adam(lr=float("nan")), "Adam got lr=nan. Give a finite number"),
    "a tensor as lr": (lambda: optim.SGD(lr=torch.tensor(0.1)), "Give a finite number"),
    "clip_norm of 0": (lambda: optim.SGD(clip_norm=0.0), "clip_norm=0.0. Give a finite number abo"),
    "negative clip_value": (lambda: optim.SGD(clip_value=-1), "clip_value=-1. Give a finite"),
    "nesterov alone": (lambda: optim.SGD(nesterov=True), "Give a momentum above 0 with it"),
    "nesterov of a number": (
        lambda: optim.SGD(nesterov=2, momentum=0.5), "nesterov=2. Give True or False"),
    "one beta": (lambda: optim.Adam(betas=0.9), "betas=0.9. Give two numbers from 0 to below 1"),
    "beta of 1": (lambda: optim.AdamW(betas=(0.9, 1.0)), "Give two numbers from 0 to below 1"),
    "text as betas": (lambda: optim.Adam(betas=("a", "b")), "Give two numbers from 0 to below 1"),
    "alpha above 1": (lambda: optim.RMSprop(alpha=1.5), "alpha=1.5. Give a number from 0 to 1"),
    "FTRL without lr": (lambda: optim.FTRL(lr=0.0), "FTRL divides by it"),
    "loss of a number": (loop(loss=3), "loss is 3. Give a function of (output, batch)"),
    "accumulate 0": (loop(accumulate=0), "accumulate is 0. Give how many batches make a step"),
    "accumulate half": (loop(accumulate=1.5), "accumulate is 1.5. Give how many batches"),
    "autocast of text": (loop(autocast="bf16"), "autocast is 'bf16'. Give torch.bfloat16, torch.f"),
    "scaler of True": (loop(grad_scaler=True), "grad_scaler is True. Give a torch.amp.GradScaler"),
    "clip_grad_norm of 0": (loop(clip_grad_norm=0), "clip_grad_norm is 0. Give a number above 0"),
    "clip_grad_value of text": (loop(clip_grad_value="1"), "clip_grad_value is '1'. Give a number"),
    "ddp of True": (loop(ddp=True), "ddp is True. Give a dict of DistributedDataParallel's"),
    "a scheduler itself": (loop(schedulers=[]), "schedulers is []. Give a function of (dense opt"),
    "unknown policy": (
        loop(non_finite="warn"), "non_finite is 'warn'. Choose one of 'raise', 'skip', 'ignore'"),
    "no context": (loop(), "got a NoneType as its ctx. Pass on the ctx that the train function"),
    "a plain module": (
        lambda: hp.TrainerLoop(nn.Linear(1, 1), None, loss=r.total, dense_optimizer=r.adam),
        "got a Linear as its model. Subclass hybridpar.HybridModel",
    ),
    "no trainers": (lambda: hp.Roles(trainers=0), "Roles got trainers=0. Give a whole number"),
    "no servers": (lambda: hp.Roles(trainers=1, servers=0), "servers=0. Give a whole number of at"),
    "no ps": (lambda: hp.launch(print, roles={"trainer": 1, "ps": 0}), "servers=0. Give a whole"),
    "unknown role": (lambda: hp.launch(print, roles={"worker": 1}), 'Name "trainer" and "ps"'),
    "unknown device": (
        lambda: hp.RoleLauncher({"trainer": 1}, device="gpu"),
        "device is 'gpu'. Choose 'cpu', 'cuda' or None",
    ),
    "unknown start": (
        lambda: hp.RoleLauncher({"trainer": 1}, start_method="fork"),
        "start_method is 'fork'. Choose 'forkserver', 'spawn' or None",
    ),
    "no threads": (lambda: hp.RoleLauncher({"trainer": 1}, num_threads=0), "num_threads is 0"),
    "no time": (lambda: hp.RoleLauncher({"trainer": 1}, timeout_s="1"), "timeout_s is '1'. Give a"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPECS)
def test_a_spec(case: str) -> None:
    make, message = SPECS[case]
    with pytest.raises(hp.SpecError) as caught:
        make()
    assert message in str(caught.value)


@pytest.mark.parametrize("case", SETTINGS)
def test_a_setting(case: str) -> None:
    make, message = SETTINGS[case]
    with pytest.raises(hp.SpecError) as caught:
        make()
    assert message in str(caught.value)


def test_what_other_libraries_count_with_is_taken() -> None:
    class Whole:  # as NumPy's integers
        def __index__(self) -> int:
            return 3

    spec = r.table(padding_idx=Whole())
    assert (spec.padding_idx, type(spec.padding_idx)) == (3, int)


# -- batches ---------------------------------------------------------------------------------------

IDS: dict[str, tuple[str, str]] = {
    "id too large": (
        "'item'",
        "got id 10, but num_embeddings of table 'item' is 10. Raise",
    ),
    "negative id": (
        "'user'",
        "got the negative id -2 for table 'user'. Ids run from 0 to 5",
    ),
    "float ids": ("'user'", "has dtype torch.float32. Give int64 or int32: ids.long()"),
    "bool ids": ("'user'", "has dtype torch.bool. Give int64 or int32 ids, not a mask: mask.nonz"),
    "uint8 ids": ("'user'", "has dtype torch.uint8. Give int64 or int32"),
    "scalar ids": ("'item'", "has shape (). Give a 1-D or 2-D tensor"),
    "meta ids": ("'item'", "on device 'meta' of layout torch.strided. Give a dense tensor that"),
    "sparse ids": ("'item'", "of layout torch.sparse_coo. Give a dense tensor"),
    "offsets decrease": ("'item'", "offset 1 of bag 2 is below the 2 before it. Offsets are where"),
    "offsets from 1": ("'item'", "offsets start at 1. The first must be 0. Offsets are where each"),
    "offsets past the end": ("'item'", "the last offset is 3, past the 2 ids. Offsets are where"),
    "float offsets": ("'item'", "offsets has dtype torch.float32. Give int64 or int32"),
    "meta offsets": ("'item'", "offsets is a tensor on device 'meta'"),
    "2-D offsets": ("'item'", "offsets has shape (1, 2). Give a 1-D tensor"),
    "2-D ids with offsets": ("'item'", "ids has shape (1, 2). Give a 1-D tensor"),
    "no offset": ("'item'", "has 2 ids but no offset: no bag holds them. Give each bag's start"),
    "weights too short": ("'item'", "of shape (1,). Give a float tensor of the ids' shape, (2,)"),
    "weights of whole numbers": ("'item'", "per_sample_weights are torch.int64"),
    "meta weights": ("'item'", "without values (meta). Give a float tensor"),
    "weights without a sum": ("'user'", "table 'user' has mode=None. They go with mode='sum'"),
    "a list": ("'item'", "is a list. Give a tensor of ids, or the pair (ids, offsets)"),
    "None": ("'item'", "is a NoneType. Give a tensor of ids"),
    "unknown feature": ("'itme'", "which no spec names. The specs name 'item', 'user': add it"),
    "a number as a feature": ("3", "which no spec names. The specs name 'item', 'user'"),
    "no mapping": ("sparse_inputs", "returned a list. Return a dict from feature names to ids"),
}


@pytest.fixture(scope="module")
def said_to_batches() -> dict[str, str]:
    (said,) = hp.launch(r.refused_batches, roles={"trainer": 1, "ps": 2})
    return said


@pytest.mark.parametrize("case", IDS)
def test_a_batch(case: str, said_to_batches: dict[str, str]) -> None:
    feature, message = IDS[case]
    said = said_to_batches[case]
    assert said.startswith("InputError: ")
    assert feature in said
    assert "on trainer0 (batch of step " in said
    assert message in said


def test_all_bad_batches_are_tried(said_to_batches: dict[str, str]) -> None:
    assert set(IDS) == set(r.BATCHES)
    assert said_to_batches["same"] == "True"


LOSSES = {
    "vector": "on trainer0 (step 0) is of shape (3,). Return a scalar tensor, such as loss.mean()",
    "number": "on trainer0 (step 0) is a float. Return a scalar tensor",
    "nothing": "on trainer0 (step 0) is a NoneType. Return a scalar tensor",
    "empty": "on trainer0 (step 0) is an empty dict. Return one loss at least",
    "one_of_two": "on trainer0 (step 0), 'price', is of shape (2,). Return a scalar",
    "detached": "on trainer0 (step 0) depends on no embedding and no parameter that learns",
    "of_the_batch": "so there is no gradient. Look for a detach(), item() or no_grad()",
    "None": "fit got batches of type NoneType. Give an iterable of batches",
    "a number": "fit got batches of type int. Give an iterable of batches",
    "text": "fit got batches of type str. Give an iterable of batches",
    "function": "fit's function of the epoch returned batches of type int. Give an iterable",
    "epochs -1": "SpecError: epochs is -1. Give how many passes: a whole number",
    "epochs half": "SpecError: epochs is 0.5. Give how many passes",
    "epochs None": "SpecError: epochs is None. Give how many passes",
}


@pytest.fixture(scope="module")
def said_to_losses() -> dict[str, str]:
    (said,) = hp.launch(r.refused_losses, roles={"trainer": 1, "ps": 1})
    return said


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_or_source(case: str, said_to_losses: dict[str, str]) -> None:
    assert set(LOSSES) == set(said_to_losses)
    assert said_to_losses[case].startswith(("InputError: ", "SpecError: "))
    assert LOSSES[case] in said_to_losses[case]


def test_an_iterator_of_text() -> None:
    with pytest.raises(hp.InputError, match="batches of type bytes"):
        Batches(b"ab", 1).epoch(0)


# -- placing ---------------------------------------------------------------------------------------

PLACES = {
    "too large": "table 'item' (17,592,186,044,416 bytes): all tables on ps0 and ps1 need 17,592,",
    "too large together": "tables 't0' (824,633,720,832 bytes), 't1' (824,633,720,832 bytes), 't2'",
    "max_norm by columns": "'item' cannot be sharded column-wise: max_norm looks at a row's",
    "no such file": "Table 'item': a server cannot read init, the file /nowhere/values.pt: FileNot",
    "init that cannot be sent": "'item' has init=<function <lambda>",
    "no optimizer": "Table 'item' has no optimizer. Give sparse_optimizer=hybridpar.optim.Adagrad",
    "optimizer's class": "give the settings hybridpar.optim.Adagrad(lr=...)",
    "optimizer of torch": "give the settings hybridpar.optim.Adam(lr=...)",
    "optimizer of no table": "names itme, which are no tables. The model's tables: 'item'",
    "no module": "Module 'tower' was built as a str. Give",
    "schedulers of nothing": "schedulers gave a float. Return a list of torch's learning-rate",
    "no schedulers": "schedulers gave a NoneType. Return a list of torch's learning-rate",
    "no dense optimizer": "dense_optimizer gave None. Give a function of the parameters that retu",
}


@pytest.fixture(scope="module")
def said_to_places() -> dict[str, str]:
    (said,) = hp.launch(r.refused_places, roles={"trainer": 1, "ps": 2})
    return said


@pytest.mark.parametrize("case", PLACES)
def test_a_model(case: str, said_to_places: dict[str, str]) -> None:
    assert set(PLACES) == set(r.PLACES)
    said = said_to_places[case]
    assert said.startswith("SpecError: ")
    assert PLACES[case] in said


def test_a_job_goes_on_after_what_was_refused(said_to_places: dict[str, str]) -> None:
    assert said_to_places["after"] == "1"


def test_a_table_larger_than_memory_fails_the_job_by_its_name() -> None:
    with pytest.raises(hp.WorkerError, match=r"raised SpecError: .*'huge' \(17,592,") as caught:
        hp.launch(r.too_large, roles={"trainer": 2, "ps": 1})
    assert "on ps0 need 17,592,186,044,416 bytes" in caught.value.cause
    assert "bytes of memory left. Make them smaller: fewer rows" in caught.value.cause
    assert caught.value.role == "trainer"


def test_memory_is_counted_by_machine() -> None:
    specs = [r.table("t", num_embeddings=1000, sharding="row_wise", optimizer=optim.Adagrad())]
    plan = make_plan(specs, 3)
    assert sum(plan.num_bytes) == 1000 * 4 * 8
    check_memory(plan, [Room("a", 32_000)] * 3)
    check_memory(plan, [Room("a", 11_000), Room("b", 11_000), Room("c", 11_000)])
    check_memory(plan, [Room("a", None)] * 3)
    check_memory(plan, [Room("a", None), Room("a", 32_000), Room("b", None)])
    with pytest.raises(hp.SpecError, match="on ps0 and ps1 and ps2 need 32,000 bytes"):
        check_memory(plan, [Room("a", 31_999)] * 3)
    with pytest.raises(hp.SpecError, match=r"on ps1 need 10,656 bytes .* its machine has 10,655"):
        check_memory(plan, [Room("a", 30_000), Room("b", 10_655), Room("a", 30_000)])


MEMINFO = "MemTotal:       2000 kB\nMemAvailable:   1000 kB\nHugePages_Total:   0\n"


@pytest.mark.parametrize(
    ("groups", "lines", "wanted"),
    [
        ({}, "0::/\n", 1_024_000),
        ({"job": {"memory.max": "max", "memory.current": "5"}}, "0::/job\n", 1_024_000),
        (
            {"job": {"memory.max": "5000", "memory.current": "900", "memory.stat":
                     "anon 500\ninactive_file 400\n"}},
            "0::/job\n",
            4_500,
        ),
        (
            {"job": {"memory.max": "3000", "memory.current": "900", "memory.stat": ""}},
            "0::/job/part\n",
            2_100,
        ),
        (
            {"memory/job": {"memory.limit_in_bytes": "700", "memory.usage_in_bytes": "600",
                            "memory.stat": "total_inactive_file 50\n"}},
            "8:pids:/\n4:cpu,memory:/job\n0::/\n",
            150,
        ),
        (
            {"job": {"memory.max": "100", "memory.current": "900", "memory.stat": ""}},
            "0::/job\n",
            0,
        ),
    ],
    ids=["none", "no limit", "with cached files", "the parent's", "version 1", "over it"],
)  # fmt: skip
def test_memory_left(
    tmp_path: Path, groups: dict[str, dict[str, str]], lines: str, wanted: int
) -> None:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(MEMINFO)
    (proc / "self" / "cgroup").write_text(lines)
    for group, files in groups.items():
        (tmp_path / group).mkdir(parents=True)
        for name, text in files.items():
            (tmp_path / group / name).write_text(text)
    assert available_bytes(proc, tmp_path) == wanted


def test_memory_that_the_system_does_not_tell(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) is None
    (tmp_path / "meminfo").write_text("MemTotal:  5 kB\n")
    assert available_bytes(tmp_path, tmp_path) is None


# -- the train function ----------------------------------------------------------------------------


def test_a_lambda() -> None:
    with pytest.raises(hp.TrainFunctionError, match=r"<lambda>' or its args.*top of a module"):
        hp.launch(lambda ctx: ctx.rank, roles={"trainer": 1})


def test_a_function_in_a_function() -> None:
    def train(ctx: hp.TrainerContext) -> int:
        return ctx.rank

    with pytest.raises(hp.TrainFunctionError, match="Define the function at the top of a module"):
        hp.launch(train, roles={"trainer": 1})


def test_args_that_cannot_be_sent() -> None:
    with pytest.raises(hp.TrainFunctionError, match="pass plain values or tensors as args"):
        hp.launch(r.allowed, roles={"trainer": 1}, args=((number for number in range(3)),))


def test_no_function() -> None:
    with pytest.raises(hp.TrainFunctionError, match=r"got train=3\. Give a function of the"):
        hp.launch(3, roles={"trainer": 1})  # type: ignore[arg-type]


def test_a_function_that_a_trainer_cannot_import() -> None:
    work = b"cno_such_module\ntrain\n."
    with pytest.raises(hp.TrainFunctionError, match="trainer1 cannot import the train function"):
        unpickled_work("trainer1", work)


SCRIPT = """
    import hybridpar as hp

    def train(ctx):
        return ctx.rank
"""
GUARDED = "\n    if __name__ == '__main__':\n"
CALL = "    print(hp.RoleLauncher({'trainer': 1}, start_method='spawn').run(train))\n"


def run(tmp_path: Path, script: str, *, interactive: bool = False) -> str:
    """What a script prints, errors included."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    how = ["-c", path.read_text()] if interactive else [str(path)]
    done = subprocess.run([sys.executable, *how], capture_output=True, text=True, timeout=90)
    return done.stdout + done.stderr


def test_a_script_as_it_should_be(tmp_path: Path) -> None:
    assert run(tmp_path, SCRIPT + GUARDED + "    " + CALL).splitlines()[-1] == "[0]"


def test_an_interactive_session(tmp_path: Path) -> None:
    said = run(tmp_path, SCRIPT + CALL, interactive=True)
    assert "TrainFunctionError: The train function 'train', or what its args are made of" in said
    assert "is defined in a notebook or an interactive session" in said
    assert "Put it into a module (a .py file) and import it from there" in said


def test_a_script_without_a_guard(tmp_path: Path) -> None:
    said = run(tmp_path, SCRIPT + CALL)
    assert "TrainFunctionError: launch('train') was called in a process of a job that is" in said
    assert 'Call launch under if __name__ == "__main__":' in said
    assert "WorkerError: " in said


def test_a_function_behind_the_guard(tmp_path: Path) -> None:
    hidden = "        def train(ctx):\n            return 0\n    "
    said = run(tmp_path, "\n    import hybridpar as hp\n" + GUARDED + hidden + CALL)
    assert "trainer0 cannot import the train function or what its args are made of" in said
    assert 'outside of if __name__ == "__main__":' in said


# -- what is allowed -------------------------------------------------------------------------------


def test_what_might_look_wrong_and_is_not() -> None:
    (found,) = hp.launch(r.allowed, roles={"trainer": 1, "ps": 1})
    assert found == {
        "mean of an empty bag": True,
        "a missing feature": 2,
        "numbers of bags that differ": {"item": 2, "user": 3},
        "no batch": 0,
        "no epoch": 0,
    }


def test_more_servers_than_rows() -> None:
    (right,) = hp.launch(r.few_rows, roles={"trainer": 1, "ps": 4})
    assert right == [True, True, True]

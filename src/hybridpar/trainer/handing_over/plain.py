"""Filling a hybrid model from the state of a plain one.

Shapes: R rows of a table, D columns.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from hybridpar.errors import SpecError
from hybridpar.trainer.handing_over.row_writes import write_range
from hybridpar.trainer.tables import RemoteTables


def load_plain(
    model: nn.Module,
    tables: RemoteTables,
    state: Mapping[str, Tensor],
    keys: Mapping[str, str],
    *,
    strict: bool,
) -> None:
    """See :meth:`HybridModel.load_plain`."""
    found = _differences(model, tables, state, keys, strict=strict)
    if found:
        raise SpecError("The plain state does not fit the model:\n  " + "\n  ".join(found))
    _gather(tables, "the beginning of load_plain")
    own = model.state_dict()
    model.load_state_dict({name: state[name] for name in own if name in state}, strict=False)
    for name, key in keys.items():
        if tables.spec(name).module is None:
            if key in state:
                write_range(tables, name, state[key], tables.ctx.rank, tables.ctx.num_trainers)
        elif tables.ctx.rank == 0:
            tables.set_module_state(name, _below(state, key))
    _gather(tables, "the end of load_plain")


def _differences(
    model: nn.Module,
    tables: RemoteTables,
    state: Mapping[str, Tensor],
    keys: Mapping[str, str],
    *,
    strict: bool,
) -> list[str]:
    """All that keeps the model from being filled."""
    found = []
    used: set[str] = set()
    own = model.state_dict()
    for name in own:
        if name in state:
            used.add(name)
            found += _shape_difference(f"parameter '{name}'", own[name].shape, state[name])
        elif strict:
            found.append(f"the state has no '{name}', which the dense half has")
    for name, key in keys.items():
        if name not in tables.specs:
            found.append(f"the model has no table '{name}'; it has {sorted(tables.specs)}")
        elif tables.spec(name).module is not None:
            theirs = _below(state, key)
            used.update(f"{key}.{inner}" for inner in theirs)
            found += _module_differences(tables, name, key, theirs)
        elif key in state:
            used.add(key)
            spec = tables.spec(name)
            shape = spec.num_embeddings, spec.embedding_dim
            found += _shape_difference(f"table '{name}'", shape, state[key])
        elif strict:
            found.append(f"the state has no '{key}', given for table '{name}'")
    if strict:
        found += [f"tables= names no key for '{name}'" for name in tables.specs if name not in keys]
        found += [f"nothing takes '{key}' of the state" for key in state if key not in used]
    return found


def _module_differences(
    tables: RemoteTables, name: str, key: str, state: Mapping[str, Tensor]
) -> list[str]:
    mine = tables.module_state_dict(name)
    found = [f"the state has no '{key}.{inner}', which module '{name}' has"
             for inner in mine if inner not in state]  # fmt: skip
    found += [f"module '{name}' has no '{inner}'" for inner in state if inner not in mine]
    for inner in mine.keys() & state.keys():
        found += _shape_difference(f"'{inner}' of module '{name}'", mine[inner].shape, state[inner])
    return found


def _shape_difference(what: str, mine: tuple[int, ...], theirs: Tensor) -> list[str]:
    if tuple(mine) == tuple(theirs.shape):
        return []
    return [f"{what} has shape {tuple(mine)}, and in the state {tuple(theirs.shape)}"]


def _below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The part of a state that belongs to one submodule."""
    start = f"{prefix}."
    return {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}


def _gather(tables: RemoteTables, where: str) -> None:
    """Wait until every trainer is here."""
    tables.master.send("gather", tables.model_id, tables.ctx.rank, where).wait(patiently=True)

"""What ``hybridpar plan`` reads: a model or its specs, and a sample, from files.

``FILE:NAME`` names something in a Python file; without ``:NAME`` it is looked for.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hybridpar import optim
from hybridpar.errors import SpecError, describe
from hybridpar.optim import SparseOptimizerSettings
from hybridpar.specs import RemoteEmbeddingSpec
from hybridpar.trainer.model import HybridModel

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MODEL_NAMES = ("specs", "model")
_BATCHES_NAME = "batches"


def read_model(
    source: str,
) -> tuple[HybridModel[Any] | Sequence[RemoteEmbeddingSpec], SparseOptimizerSettings | None]:
    """A model, or specs alone; and the optimizer that a JSON file names for all tables.

    Args:
        source: ``FILE.json``, ``FILE.py:NAME`` or ``FILE.py``. NAME is a `HybridModel` or a class
            of one, specs in a sequence, one spec, or a function without arguments that returns any
            of them. Without it ``specs`` is taken, else ``model``, else the file's only class of
            `HybridModel`.

    Raises:
        SpecError: if there is no such file or name, or it is something else.
    """
    path, name = _split(source)
    if path.suffix == ".json":
        return _from_json(path)
    module = _imported(path)
    found = _named(module, path, name) if name else _looked_for(module, path)
    if callable(found) and not isinstance(found, HybridModel):
        found = _called(source, found)
    if isinstance(found, RemoteEmbeddingSpec):
        found = [found]
    if isinstance(found, HybridModel):
        return found, None
    if isinstance(found, Sequence) and all(isinstance(s, RemoteEmbeddingSpec) for s in found):
        return found, None
    raise SpecError(
        f"{source} is {found!r}. Name a HybridModel, specs, or a function that returns either."
    )


def read_batches(source: str, model_source: str) -> Any:
    """A sample of batches: an iterable, or a function from a trainer's rank to one.

    Args:
        source: ``FILE.json`` or ``FILE.pt`` with a batch, or a list of batches, each a mapping from
            features to ids; or ``FILE.py:NAME``; or only ``NAME``, in the model's file.
        model_source: where the model is.

    Raises:
        SpecError: if there is no such file or name.
    """
    path, name = _split(source)
    if path.suffix in (".json", ".pt"):
        return _batches(path)
    if path.suffix != ".py":
        path, name = _split(model_source)[0], source
        if path.suffix != ".py":
            raise SpecError(
                f"--batches {source} names something in a Python file, but the model is in {path}. "
                "Give FILE.py:NAME, or a FILE.json or FILE.pt with ids."
            )
    found = _named(_imported(path), path, name or _BATCHES_NAME)
    return _by_rank(found) if callable(found) else found


def optimizer_of(text: str) -> SparseOptimizerSettings:
    """Settings from their name, with arguments or not: ``Adam``, or ``Adam(lr=0.01)``.

    Raises:
        SpecError: if there is no such optimizer, or an argument is wrong.
    """
    known = [kind for kind in optim.__all__ if kind != SparseOptimizerSettings.__name__]
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
        name = ast.unparse(call.func)
        arguments = {str(part.arg): ast.literal_eval(part.value) for part in call.keywords}
        if name in known and not call.args:
            settings: SparseOptimizerSettings = getattr(optim, name)(**{"lr": 1e-3} | arguments)
            return settings
    except (SyntaxError, TypeError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"The optimizer {text!r} cannot be built: {error}.") from error
    raise SpecError(
        f"There is no optimizer {text!r}. Choose one of {', '.join(known)}; arguments by name, as "
        "in 'Adam(lr=0.01)'."
    )


def uniform_batches(
    specs: Sequence[RemoteEmbeddingSpec], batch_size: int
) -> Callable[[int], Iterator[dict[str, Any]]]:
    """Made-up batches: each sample has a table's ``pooling_factor`` ids, rounded, any as likely.

    Raises:
        SpecError: if a hosted module is among the specs: nobody knows its inputs.
    """
    hosted = [spec.name for spec in specs if spec.module is not None]
    if hosted:
        raise SpecError(f"Inputs of the module '{hosted[0]}' cannot be made up. Give --batches.")

    def draw(rank: int) -> Iterator[dict[str, Any]]:
        generator = torch.Generator().manual_seed(rank)
        while True:
            yield {
                feature: torch.randint(
                    spec.num_embeddings,
                    (batch_size, max(1, round(spec.pooling_factor or 1))),
                    generator=generator,
                )
                for spec in specs
                for feature in spec.features
            }

    return draw


def _split(source: str) -> tuple[Path, str]:
    before, colon, name = source.rpartition(":")
    return (Path(before), name) if colon else (Path(source), "")


def _check_exists(path: Path) -> None:
    if not path.is_file():
        raise SpecError(f"There is no file {path}.")


def _imported(path: Path) -> ModuleType:
    """A Python file as a module, its folder on the path as for a script; imported once."""
    _check_exists(path)
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path.absolute()):
        return loaded
    if str(path.parent.absolute()) not in sys.path:
        sys.path.insert(0, str(path.parent.absolute()))
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:
        raise SpecError(f"{path} is no Python or JSON file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look for it there
    spec.loader.exec_module(module)
    return module


def _named(module: ModuleType, path: Path, name: str) -> Any:
    if not hasattr(module, name):
        raise SpecError(f"{path} has no '{name}'. Name what it has: {path}:NAME.")
    return getattr(module, name)


def _looked_for(module: ModuleType, path: Path) -> Any:
    for name in _MODEL_NAMES:
        if hasattr(module, name):
            return getattr(module, name)
    models = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, HybridModel)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    ]
    if len(models) != 1:
        names = ", ".join(model.__name__ for model in models) or "none"
        raise SpecError(
            f"{path} has no 'specs' and no 'model', and its classes of HybridModel are {names}. "
            f"Name one: {path}:NAME."
        )
    return models[0]


def _called(source: str, function: Callable[[], object]) -> Any:
    needed = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise SpecError(
            f"{source} needs the arguments {', '.join(needed)}. Write a function without arguments "
            "that gives them, and name it: FILE.py:NAME."
        )
    return function()


def _by_rank(function: Callable[..., Any]) -> Callable[[int], Any]:
    """A function of the rank, whether or not this one takes it."""
    takes = inspect.signature(function).parameters
    return function if takes else lambda _: function()


def _from_json(
    path: Path,
) -> tuple[list[RemoteEmbeddingSpec], SparseOptimizerSettings | None]:
    _check_exists(path)
    try:
        content = json.loads(path.read_text())
        tables = content["tables"] if isinstance(content, Mapping) else content
        specs = [_spec(dict(table)) for table in tables]
        named = content.get("optimizer") if isinstance(content, Mapping) else None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(
            f'{path} is not of the form {{"tables": [{{"name": …, "num_embeddings": …, '
            f'"embedding_dim": …}}]}}: {type(error).__name__}: {error}.'
        ) from error
    return specs, optimizer_of(named) if named else None


def _spec(table: dict[str, Any]) -> RemoteEmbeddingSpec:
    if "dtype" in table:
        table["dtype"] = _DTYPES[table["dtype"]]
    if "optimizer" in table:
        table["optimizer"] = optimizer_of(table["optimizer"])
    return RemoteEmbeddingSpec(table.pop("name"), **table)


def _batches(path: Path) -> list[dict[str, Any]]:
    """The batches of ids in a file."""
    _check_exists(path)
    try:
        content = (
            json.loads(path.read_text())
            if path.suffix == ".json"
            else torch.load(path, weights_only=True)
        )
        given = content if isinstance(content, list) else [content]
        return [_batch(path, batch) for batch in given]
    except SpecError:
        raise
    except Exception as error:  # torch.load raises whatever it stumbles over
        raise SpecError(
            f"{path} has no batches of ids: {describe(error)}. Give {{feature: ids}}, or a list of "
            'such; ids are a tensor, or {"ids": ..., "offsets": ...}.'
        ) from error


def _batch(path: Path, batch: object) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        raise SpecError(f"{path} has a {type(batch).__name__} as a batch. Give {{feature: ids}}.")
    return {feature: _value(value) for feature, value in batch.items()}


def _value(value: Any) -> Any:
    """A feature's ids as `sparse_inputs` gives them."""
    if isinstance(value, Mapping):
        value = value["ids"], value.get("offsets"), value.get("weights")
        return tuple(None if part is None else _tensor(part) for part in value)
    if isinstance(value, tuple):
        return tuple(None if part is None else _tensor(part) for part in value)
    return _tensor(value)


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value)

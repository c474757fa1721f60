"""Checkpoint files: whole or not there, checked when read, and with the one before kept.

A save writes beside the file, waits until the disk has it, keeps the old file as `NAME.previous`,
and moves the new one into place in one step. Whenever the process dies, NAME or NAME.previous is a
whole checkpoint. Only tensors and plain values are stored, so reading one runs no code of the file.
"""

import contextlib
import os
import warnings
from pathlib import Path

import torch

from .environment import package_version
from .hashing import fingerprint

FORMAT = 1
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class CheckpointError(ValueError):
    """A checkpoint that can't be read, or doesn't fit what it is loaded into; nothing was changed."""


def save(path: str | os.PathLike, content: dict) -> None:
    """Write `content`, a dict of tensors and plain values, as described above.

    TypeError, before anything is written, names a value that isn't plain. OSError where the disk
    fails; the file is then as it was.
    """
    path = Path(path)
    _require_plain(content, "")
    marked = {"checkpoint": FORMAT, "contract": contract(), "carbon_compile": package_version(), "torch": str(torch.__version__), **content}
    marked["fingerprint"] = fingerprint(_hashable(content))
    fresh = path.with_name(f".{path.name}.new")
    try:
        with open(fresh, "wb") as file:
            torch.save(marked, file)
            file.flush()
            os.fsync(file.fileno())
        _keep_previous(path)
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise
    _sync_folder(path.parent)


def previous(path: str | os.PathLike) -> Path:
    """Where `save` keeps the checkpoint before this one."""
    return Path(path).with_name(Path(path).name + ".previous")


def _keep_previous(path):
    """A second name for the present file; `path` itself is never missing, not even for a moment."""
    if not path.exists():
        return
    second = path.with_name(f".{path.name}.old")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(second)
    try:
        os.link(path, second)
    except OSError:  # a file system without hard links: better no second name than a copy of gigabytes
        return
    os.replace(second, previous(path))


def _sync_folder(folder):
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load(path: str | os.PathLike, map_location="cpu") -> dict:
    """The content of a checkpoint, checked against its fingerprint.

    Where the file is damaged and the one before is whole, that one is read, with a warning.
    CheckpointError where neither can be; FileNotFoundError where there is none.
    """
    try:
        return _read(path, map_location)
    except FileNotFoundError:
        if not previous(path).exists():
            raise
        damage = "is missing"
    except CheckpointError as error:
        if not previous(path).exists():
            raise
        damage = str(error)
    content = _read(previous(path), map_location)
    warnings.warn(f"{path}: {damage}; loaded {previous(path)} instead", stacklevel=2)
    return content


def _read(path, map_location):
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        first = (str(error).strip() or "nothing more").splitlines()[0]
        raise CheckpointError(f"{path} can't be read: {first}") from error
    if not isinstance(content, dict) or "checkpoint" not in content:
        raise CheckpointError(f"{path} isn't a checkpoint of carbon's: it has no \"checkpoint\"")
    if content["checkpoint"] != FORMAT:
        raise CheckpointError(f"{path} is a checkpoint of format {content['checkpoint']}; this release reads {FORMAT}")
    body = {key: value for key, value in content.items() if key not in _MARKS}
    if fingerprint(_hashable(body)) != content["fingerprint"]:
        raise CheckpointError(f"{path} is damaged: its content doesn't have the fingerprint that was stored with it")
    return content


_MARKS = ("checkpoint", "contract", "carbon_compile", "torch", "fingerprint")


def contract() -> str:
    from .certify import contract_version

    return contract_version()


def _hashable(value):
    """`value` as fingerprints take it: dtypes, devices and bytes by their text."""
    if isinstance(value, dict):
        return {str(k): _hashable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_hashable(v) for v in value]
    return str(value) if isinstance(value, (torch.dtype, torch.device, bytes)) else value


def _require_plain(value, path):
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, (str, int)):
                raise TypeError(f"a checkpoint can't hold {path or 'it'}: a key is a {type(key).__name__}")
            _require_plain(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _require_plain(item, f"{path}.{i}")
    elif not isinstance(value, (torch.Tensor, *_PLAIN)):
        raise TypeError(f"a checkpoint can't hold {path}: a {type(value).__name__} is neither a tensor nor a plain value")


# --- two of them


def differing(a: dict, b: dict) -> list[str]:
    """The entries of two checkpoints that don't hold the same bits; releases of torch and carbon aside."""
    keys = sorted((a.keys() | b.keys()) - set(_MARKS))
    return [key for key in keys if fingerprint(_hashable([a.get(key)])) != fingerprint(_hashable([b.get(key)]))]


def tensor_count(value) -> int:
    """How many tensors a checkpoint, or a part of it, holds."""
    if isinstance(value, (dict, list, tuple)):
        return sum(map(tensor_count, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor)


# --- does it fit?


def misfits(saved: dict, live: dict, what: str) -> list[str]:
    """Why tensors by name can't be loaded into others: missing, unexpected, of another shape or dtype."""
    found = [f"{what} lacks {name}" for name in live if name not in saved]
    found += [f"{what} has {name}, which the model lacks" for name in saved if name not in live]
    for name in saved.keys() & live.keys():
        one, other = _type(saved[name]), _type(live[name])
        if one != other:
            found.append(f"{name} is {one} in {what} and {other} in the model")
    return sorted(found)


def _type(value):
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def optimizer_misfits(saved: dict, optimizer: torch.optim.Optimizer) -> list[str]:
    """Why an optimizer's state can't be loaded."""
    one, other = [len(g["params"]) for g in saved["param_groups"]], [len(g["params"]) for g in optimizer.param_groups]
    if one != other:
        return [f"the checkpoint's optimizer has groups of {one} parameters, this one {other}"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for place, entry in saved["state"].items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameters[place].shape and value.numel() == parameters[place].numel():
                return [f"the optimizer's {key} of parameter {place} is {_type(value)}, the parameter {_type(parameters[place])}"]
    return []


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """`optimizer.load_state_dict`, which converts floating state to the parameter's dtype, without that."""
    optimizer.load_state_dict(saved)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for place, entry in saved["state"].items():
        live = optimizer.state[parameters[place]]
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and live[key].dtype is not value.dtype:
                live[key] = value.to(live[key].device)

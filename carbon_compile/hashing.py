"""Fingerprints: one SHA-256 for a model, an optimizer, or any tensors, the same on every device.

`torch.hash_tensor` is an XOR, so a permuted tensor hashes equal; this hashes names, dtypes, shapes
and bytes. The module is not called `fingerprint` because importing it would then hide the function
`carbon_compile.fingerprint` behind a module of the same name.
"""

import ctypes
import hashlib
import json
import sys
from collections.abc import Mapping

import torch

from . import host
from .bits import ENGINE_FLAGS, canonical_bits

# Elements canonicalised at a time, so that the copy made for it stays small.
_CHUNK = 1 << 24


def fingerprint(obj):
    """The SHA-256, as 64 hex digits, of everything `obj` holds.

    Args:
        obj: a module (its `state_dict()`: parameters and persistent buffers), an optimizer (state by
            parameter order, and hyperparameters of each group; flags that only choose an
            implementation, such as `foreach` and `fused`, are left out), a tensor, a state_dict, or
            lists, tuples and dicts of tensors and plain Python values.

    The device, strides, sharing of storage, the order of a dict's keys, the `_orig_mod.` that
    `torch.compile` puts into names, and the payload of NaNs do not count. Names, dtypes, shapes,
    signs of zeros and all other bits do. A module and its state_dict hash equal; so do an optimizer
    and its state_dict.

    What is hashed, for each leaf in order: the length of a JSON header as 8 bytes, the header
    `[path, dtype or type, shape]`, the length of the data, and the data: little-endian elements in
    index order. Mappings are visited in order of their keys.

    Raises TypeError for an object, or a part of one, that has no fixed bytes.
    """
    if not isinstance(obj, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, Mapping, list, tuple)):
        raise TypeError(
            f"cannot fingerprint a {type(obj).__name__}: pass a module, an optimizer, a tensor, "
            "a state_dict, or lists and dicts of tensors"
        )
    digest = hashlib.sha256()
    _add(digest, (), obj)
    return digest.hexdigest()


def _add(digest, path, obj):
    if isinstance(obj, torch.Tensor):
        _add_tensor(digest, path, obj)
    elif isinstance(obj, torch.nn.Module):
        _add(digest, path, obj.state_dict())
    elif isinstance(obj, torch.optim.Optimizer) or _is_optimizer_state(obj):
        state = obj.state_dict() if isinstance(obj, torch.optim.Optimizer) else obj
        _add_mapping(digest, path, _optimizer_facts(state))
    elif isinstance(obj, Mapping):
        _add_mapping(digest, path, obj)
    elif isinstance(obj, (list, tuple)):
        _add_record(digest, path, "list", [len(obj)], b"")
        for i, item in enumerate(obj):
            _add(digest, (*path, i), item)
    elif isinstance(obj, float):
        _add_record(digest, path, "float", None, obj.hex().encode())
    elif obj is None or isinstance(obj, (bool, int, str)):
        _add_record(digest, path, type(obj).__name__, None, str(obj).encode())
    else:
        where = ".".join(map(str, path))
        raise TypeError(f"cannot fingerprint {where}: a {type(obj).__name__} has no fixed bytes")


def _add_mapping(digest, path, mapping):
    _add_record(digest, path, "dict", [len(mapping)], b"")
    named = {_name(key): value for key, value in mapping.items()}
    if len(named) < len(mapping):
        raise TypeError(f"cannot fingerprint {'.'.join(map(str, path)) or 'it'}: two keys have one name")
    for key in sorted(named, key=lambda key: (isinstance(key, str), key)):
        _add(digest, (*path, key), named[key])


def _name(key):
    if isinstance(key, str):
        return key.replace("_orig_mod.", "")
    if isinstance(key, int):
        return int(key)
    raise TypeError(f"cannot fingerprint a dict with a {type(key).__name__} as a key; use names")


def _is_optimizer_state(obj):
    return isinstance(obj, Mapping) and obj.keys() == {"state", "param_groups"}


def _optimizer_facts(state_dict):
    groups = [
        {name: value for name, value in group.items() if name not in ENGINE_FLAGS}
        for group in state_dict["param_groups"]
    ]
    # SGD without momentum keeps, or does not keep, an entry of None, depending on the variant.
    state = {
        parameter: {name: value for name, value in entry.items() if value is not None}
        for parameter, entry in state_dict["state"].items()
    }
    state = {parameter: entry for parameter, entry in state.items() if entry}
    return {"state": state, "param_groups": groups}


def _add_record(digest, path, kind, shape, data):
    header = json.dumps([list(path), kind, shape]).encode()
    digest.update(len(header).to_bytes(8, "little") + header)
    digest.update(len(data).to_bytes(8, "little") + data)


def _add_tensor(digest, path, tensor):
    if hasattr(tensor, "full_tensor"):  # a DTensor: the logical tensor is what counts
        tensor = host.full_tensor(tensor)
    tensor = tensor.detach()
    where = ".".join(map(str, path)) or "a tensor"
    if tensor.is_meta or type(tensor).__name__ == "FakeTensor":
        raise TypeError(f"cannot fingerprint {where}: it has no data (meta or fake tensor)")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"cannot fingerprint {where}: a {tensor.layout} {tensor.dtype} tensor is not plain")
    header = json.dumps([list(path), str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]).encode()
    digest.update(len(header).to_bytes(8, "little") + header)
    digest.update((tensor.numel() * tensor.element_size()).to_bytes(8, "little"))
    try:
        for chunk in tensor.cpu().reshape(-1).split(_CHUNK):
            _add_bytes(digest, canonical_bits(chunk))
    except TypeError as error:
        raise TypeError(f"cannot fingerprint {where}: {error}") from None


def _add_bytes(digest, bits):
    if sys.byteorder != "little":
        raise TypeError("fingerprints are defined on little-endian machines")
    bits = bits.contiguous()
    size = bits.numel() * bits.element_size()
    if size:
        # Read in place: PyTorch has no buffer protocol of its own, and NumPy is not required.
        digest.update((ctypes.c_char * size).from_address(bits.data_ptr()))

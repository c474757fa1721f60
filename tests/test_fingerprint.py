"""Fingerprints and bit comparison: what counts, what does not, and what is refused."""

import copy
import struct

import pytest
import torch
from torch import nn

import carbon_compile
from carbon_compile import fingerprint
from carbon_compile.bits import assert_bitwise, canonical_bits, tensor_diff

FLOATS = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained(optimizer_class, **options):
    net = model()
    optimizer = optimizer_class(net.parameters(), lr=0.125, **options)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.arange(12.0).view(4, 3)).sum().backward()
        optimizer.step()
    return net, optimizer


def test_the_function_survives_the_import_of_its_module():
    from carbon_compile import hashing

    assert carbon_compile.fingerprint is hashing.fingerprint


def test_known_value():
    # Pinned: recorded fingerprints must stay comparable.
    tensors = {"b": torch.tensor([1.0, -0.0, float("nan")]), "a": torch.tensor([[1, 2]], dtype=torch.int16)}
    assert fingerprint(tensors) == fingerprint(dict(reversed(tensors.items())))

    def record(header, data):
        return struct.pack("<Q", len(header)) + header + struct.pack("<Q", len(data)) + data

    import hashlib

    expected = hashlib.sha256(
        record(b'[[], "dict", [2]]', b"")
        + record(b'[["a"], "int16", [1, 2]]', struct.pack("<2h", 1, 2))
        + record(b'[["b"], "float32", [3]]', struct.pack("<3I", 0x3F800000, 0x80000000, 0x7FC00000))
    )
    assert fingerprint(tensors) == expected.hexdigest()


def test_module_state_dict_and_compiled_module_agree():
    net = model()
    assert fingerprint(net) == fingerprint(net.state_dict()) == fingerprint(copy.deepcopy(net))
    assert fingerprint(torch.compile(net, backend="eager")) == fingerprint(net)
    inner = nn.Sequential(torch.compile(model(), backend="eager"))
    assert fingerprint(inner) == fingerprint(nn.Sequential(model()))


def test_every_kind_of_state_counts():
    net = model()
    before = fingerprint(net)
    seen = {before}
    for tensor in net.state_dict().values():
        kept = tensor.clone()
        tensor.view(-1)[0] += 1
        seen.add(fingerprint(net))
        tensor.copy_(kept)
    assert len(seen) == 1 + len(net.state_dict()) and fingerprint(net) == before


def test_name_dtype_shape_and_order_count():
    x = torch.arange(6.0)
    variants = [
        x,
        [x],
        {"x": x},
        {"y": x},
        {"x": {"x": x}},
        x.view(2, 3),
        x.view(3, 2),
        x.view(torch.int32),
        x.flip(0),
        x.double(),
        [x, x],
        [[x], x],
        {"x": x, "step": 3},
        {"x": x, "step": 3.0},
        {"x": x, "step": "3"},
        {"x": x, 1: None},
        {"x": x, "1": None},
    ]
    assert len({fingerprint(v) for v in variants}) == len(variants)
    assert fingerprint([x]) == fingerprint((x,))


def test_strides_and_shared_storage_do_not_count():
    x = torch.arange(24.0).view(4, 6)
    for view in (x.t(), x[::2, 1:5], x[1], x[0, 0], x[:, :0], x.expand(2, 4, 6)):
        assert fingerprint(view) == fingerprint(view.clone(memory_format=torch.contiguous_format))
    z = torch.complex(x, -x)
    assert fingerprint(z.conj()) == fingerprint(z.conj().resolve_conj())
    tied = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    tied[1].load_state_dict(tied[0].state_dict())
    untied = fingerprint(tied)
    tied[1].weight = tied[0].weight
    assert fingerprint(tied) == untied


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + [torch.complex64])
def test_dtypes(dtype):
    x = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    changed = x.clone()
    changed[2] = 0
    assert fingerprint(x) == fingerprint(x.clone()) != fingerprint(changed)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_payloads_do_not_count_but_signed_zeros_do(dtype):
    size = torch.empty((), dtype=dtype).element_size()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    one, two = torch.full((2, 3), float("nan")).to(dtype), torch.full((2, 3), float("nan")).to(dtype)
    # The sign bit of a NaN, and for wide formats its payload.
    two.view(integer).bitwise_xor_(0x80 if size == 1 else torch.iinfo(integer).min | (1 if size > 1 else 0))
    assert not torch.equal(one.view(integer), two.view(integer))
    assert fingerprint(one) == fingerprint(two)
    assert_bitwise(one, two)
    zero = torch.zeros(3).to(dtype)
    assert fingerprint(zero) != fingerprint((-torch.zeros(3)).to(dtype))


def test_large_tensors_hash_in_pieces(monkeypatch):
    from carbon_compile import hashing

    x = torch.arange(1000.0).view(10, 100).t()
    whole = fingerprint(x)
    monkeypatch.setattr(hashing, "_CHUNK", 77)
    assert fingerprint(x) == whole


@pytest.mark.parametrize(
    "optimizer_class, options",
    [(torch.optim.SGD, {"momentum": 0.5}), (torch.optim.SGD, {}), (torch.optim.AdamW, {}), (torch.optim.Adam, {})],
)
def test_optimizer(optimizer_class, options):
    _, optimizer = trained(optimizer_class, **options)
    before = fingerprint(optimizer)
    assert before == fingerprint(optimizer.state_dict())
    optimizer.param_groups[0]["foreach"] = True
    assert fingerprint(optimizer) == before, "how it computes does not count"
    optimizer.param_groups[0]["lr"] = 0.25
    assert fingerprint(optimizer) != before, "a hyperparameter counts"
    optimizer.param_groups[0]["lr"] = 0.125
    for entry in optimizer.state.values():
        for value in entry.values():
            if isinstance(value, torch.Tensor):
                value.view(-1)[0] += 1
                assert fingerprint(optimizer) != before, "state counts"
                value.view(-1)[0] -= 1


@pytest.mark.parametrize(
    "obj, message",
    [
        (3, "cannot fingerprint a int"),
        (iter([]), "cannot fingerprint a"),
        ({"a": {"b": object()}}, r"a\.b: a object has no fixed bytes"),
        ({("k",): torch.ones(1)}, "tuple as a key"),
        (torch.ones(2, device="meta"), "no data"),
        ([torch.eye(2).to_sparse()], "0: a torch.sparse_coo"),
        ({"a": torch.ones(1), "_orig_mod.a": torch.ones(1)}, "two keys have one name"),
    ],
)
def test_what_has_no_bytes_is_refused(obj, message):
    with pytest.raises(TypeError, match=message):
        fingerprint(obj)


def test_tensor_diff_names_the_first_difference():
    a = torch.arange(12.0).view(3, 4)
    b = a.clone()
    assert tensor_diff(a, b) is None and tensor_diff(a[:0], b[:0]) is None
    b[1, 2] = torch.nextafter(b[1, 2], torch.tensor(torch.inf))
    b[2, 0] = -1
    difference = tensor_diff(a, b)
    assert difference.index == (1, 2) and difference.ulps == 1
    assert (difference.a_hex, difference.b_hex) == ("0x40c00000", "0x40c00001")
    assert (difference.differing, difference.elements) == (2, 12)
    assert "2 of 12 elements differ; first at (1, 2): 6.0 (0x40c00000)" in str(difference)


@pytest.mark.parametrize(
    "a, b, ulps",
    [
        (0.0, -0.0, 0),
        (2.0**-149, -(2.0**-149), 2),
        (float("nan"), 1.0, None),
        (-float("inf"), float("inf"), 2 * 0x7F800000),
    ],
)
def test_ulps(a, b, ulps):
    assert tensor_diff(torch.tensor(a), torch.tensor(b)).ulps == ulps


def test_tensor_diff_of_other_dtypes():
    assert tensor_diff(torch.tensor([1, 5]), torch.tensor([1, 3])).ulps == 2
    assert tensor_diff(torch.tensor([True]), torch.tensor([False])).a_hex == "0x01"
    d = tensor_diff(torch.tensor([1 + 2j, 3j]), torch.tensor([1 + 2j, 4j]))
    assert d.index == (1, 1) and d.a == 3.0
    d = tensor_diff(torch.tensor(1.0).bfloat16(), torch.tensor(-1.0).bfloat16())
    assert d.a_hex == "0x3f80" and d.b_hex == "0xbf80" and d.b == -1.0


def test_assert_bitwise():
    x = torch.ones(2)
    assert_bitwise({"a": [x, 1]}, {"a": [x.clone(), 1]})
    for a, b, message in [
        (x, x.double(), r"torch.float32 \(2,\) against torch.float64 \(2,\)"),
        (x, torch.ones(3), r"\(2,\) against .* \(3,\)"),
        ({"a": [x, -x]}, {"a": [x, x]}, r"step\['a'\]\[1\]: 2 of 2 elements differ; first at \(0,\)"),
        ({"a": x}, {"b": x}, "only one has"),
        ([x], [x, x], "1 items against 2"),
        (1, 2, "1 against 2"),
    ]:
        with pytest.raises(AssertionError, match=message):
            assert_bitwise(a, b, "step")


def test_canonical_bits_keep_the_shape():
    assert canonical_bits(torch.ones(2, 3).t()).shape == (3, 2)
    assert canonical_bits(torch.ones(2, 3, dtype=torch.complex64)).shape == (2, 3, 2)


@pytest.mark.gpu
def test_the_device_does_not_count():
    net, optimizer = trained(torch.optim.AdamW)
    weights, state = fingerprint(net), fingerprint(optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    net.cuda()
    optimizer.load_state_dict(optimizer.state_dict())
    assert fingerprint(net) == weights and fingerprint(optimizer) == state

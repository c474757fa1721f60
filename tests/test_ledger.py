"""Digests, the ledger's file, what is recorded, and where two ledgers part."""

import contextlib
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import carbon_compile
from carbon_compile import cli, ledger_file, recording, runlog
from carbon_compile.bits import canonical_bits
from carbon_compile.digest import C1, C2, Batch, G, digest, digests
from carbon_compile.ledger_file import LedgerError, Writer, differences, read

MASK = 2**64 - 1


def by_hand(x):
    """The definition in Python's integers: eight bytes at a time."""
    bits = canonical_bits(x).contiguous()
    size, total = bits.element_size(), 0
    stream = b"".join((b & (1 << 8 * size) - 1).to_bytes(size, "little") for b in bits.reshape(-1).tolist())
    for i in range(0, len(stream), 8):
        v = (int.from_bytes(stream[i : i + 8], "little") + i // 8 * G) * C1 & MASK
        v = (v ^ (v >> 32)) * C2 & MASK
        total += v ^ (v >> 32)
    return total & MASK


def patterns(dtype, integer, *values):
    return torch.tensor(values, dtype=integer).view(dtype)


FLAT = torch.randn(20000)
# Every width, NaNs beside other elements of their word, lengths around a word's and a chunk's end, and
# views that begin inside a word or are no plain memory.
TENSORS = [
    torch.randn(5), torch.tensor(3.0), torch.tensor([float("nan"), -float("inf"), -0.0]), torch.empty(0), torch.randn(4, 6).t(),
    torch.randn(300).bfloat16(), torch.randn(7).half(), torch.randn(9, dtype=torch.float64), torch.arange(5), torch.tensor([True, False]),
    torch.arange(250, 256, dtype=torch.uint8), torch.randn(3, dtype=torch.complex64), torch.randn(40).to(torch.float8_e4m3fn), torch.randn(40000),
    patterns(torch.float32, torch.int32, 0x7F800001, 0x7F800000, -1, -0x800000, 0x7FFFFFFF), torch.full((33001,), float("nan")).bfloat16(),
    patterns(torch.bfloat16, torch.int16, 0x7F81, 0x7F80, -1, -0x80, 0x7FFF, -0x7F, 5), patterns(torch.float16, torch.int16, 0x7C00, 0x7C01, -1, -0x400, 0x7FFF, 5),
    patterns(torch.float64, torch.int64, 0x7FF0000000000001, -1, 0x7FF0000000000000), torch.arange(5).to(torch.uint16), torch.arange(3).to(torch.uint64),
    FLAT[1:9], FLAT[2:7], FLAT[3:16388], FLAT[1:19998], FLAT.half()[3:99], torch.arange(77, dtype=torch.uint8)[5:70], torch.arange(99).to(torch.bfloat16)[1:2],
    torch.randn(3, dtype=torch.complex64).conj(), torch.randn(3, dtype=torch.complex128).conj().imag, torch.randn(2, 3, dtype=torch.complex64).t(),
]  # fmt: skip


def test_a_digest_is_what_its_definition_says():
    assert [int(d) & MASK for d in digests(TENSORS)] == [by_hand(x) for x in TENSORS]
    assert [digest(x) for x in TENSORS] == [by_hand(x) for x in TENSORS]


def test_a_digest_sees_bits_and_places_and_nothing_else():
    x = torch.randn(100, 3)
    assert digest(x) == digest(x.t().contiguous().t()) == digest(x.reshape(-1))
    nans = torch.tensor([0x7FC00000, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert digest(nans) == digest(torch.full((3,), float("nan")))
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    seen = {digest(x), digest(x.flip(0)), digest(x.roll(1)), digest(torch.cat([x, torch.zeros(1, 3)]))}
    swapped = x.clone()
    swapped[[3, 50]] = x[[50, 3]]
    assert len(seen | {digest(swapped)}) == 5


@pytest.mark.parametrize("integer", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_every_bit_of_every_element_changes_the_digest(integer):
    x = torch.arange(11).to(integer)
    flipped = x.repeat(11 * 8 * x.element_size(), 1)
    for row, (place, bit) in enumerate(itertools.product(range(11), range(8 * x.element_size()))):
        flipped[row, place] ^= torch.tensor(1 << bit, dtype=torch.uint64).to(torch.int64).to(integer)
    found = set(digests(list(flipped)).tolist())
    assert len(found) == len(flipped) and digest(x) not in {d & MASK for d in found}


def test_digests_for_later_are_those_of_now():
    for size in (3, 5000):
        x = torch.randn(2, size)
        told, finish = digests(list(x)), Batch(list(x)).later(list(x))
        x.zero_()
        assert torch.equal(finish(), told) and not torch.equal(digests(list(x)), told)


def test_a_tensor_without_plain_bits_is_refused():
    with pytest.raises(TypeError, match="has no plain bits"):
        digest(torch.eye(3).to_sparse())


INTERPRETED = """
import torch
from carbon_compile.digest import digests
from carbon_compile.digest_kernels import Batch
from tests.test_ledger import FLAT, TENSORS

def started(batch, tensors):
    out = torch.zeros(len(tensors), dtype=torch.int64)
    batch.start(tensors, out)
    return out

batch, expected = Batch(TENSORS), digests(TENSORS)
for _ in range(2):
    assert torch.equal(started(batch, TENSORS), expected), started(batch, TENSORS) == expected
# New memory, other values, and then memory that is aligned otherwise.
small = [FLAT[:7], torch.randn(3, 2).t()]
batch = Batch(small)
for other in ([FLAT[8:15], small[1]], [FLAT[9:16].clone(), torch.randn(3, 2).t()], [FLAT[1:8], small[1]], small):
    assert torch.equal(started(batch, other), digests(other)), other
"""

OFFLINE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from carbon_compile import digest_kernels as kernels

kernel, compiled = kernels.digest_kernel, 0
pointers = dict(zip(kernel.arg_names, ["*i32", "*i64", "*i64", "*i32", "*i64", "*i64"]))
for capability in (80, 90, 100):
    for kind in [*kernels._FLOATS.values(), kernels._PLAIN]:
        for aligned in (True, False):
            constants = dict(zip(kernel.arg_names[6:], [*kind, aligned, kernels._CHUNK, kernels._BLOCK], strict=True))
            source = ASTSource(kernel, pointers | dict.fromkeys(constants, "constexpr"), {(kernel.arg_names.index(name),): value for name, value in constants.items()})
            ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": kernels._WARPS}).asm["ptx"]
            # Whole chunks are read sixteen bytes a thread.
            assert ("ld.global.v2.b64" in ptx or "ld.global.v4.b32" in ptx) == aligned, ptx
            compiled += 1
print("compiled", compiled)
"""


def in_a_process(code, **environment):
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, cwd=root, capture_output=True, text=True)


def test_the_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    done = in_a_process("import numpy\n" + INTERPRETED, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


def test_the_kernel_compiles_for_gpus_that_are_not_here():
    pytest.importorskip("triton")
    done = in_a_process(OFFLINE)
    assert done.stdout == "compiled 30\n", done.stderr[-3000:]


@pytest.mark.gpu
def test_the_kernel_on_cuda():
    flat = torch.randn(3_000_001, device="cuda")
    on_gpu = [*(x.cuda() for x in TENSORS), flat, flat[1:], flat[2:2_000_003], flat.half()[3:], flat.bfloat16()]
    assert torch.equal(digests(on_gpu).cpu(), digests([x.cpu() for x in on_gpu]))


# --- recording


def train(path=None, steps=5, seed=0, before_step=lambda step, model: None, momentum=0.9, **how):
    """Train a small model, recording it, and return (ledger, model)."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    torch.manual_seed(1)
    with carbon_compile.ledger(path, **{"model": model, **how}) if path else contextlib.nullcontext() as ledger:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            before_step(step, model)
            model(torch.randn(6, 3)).square().mean().backward()
            optimizer.step()
    return ledger, model


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run.jsonl")


def test_a_step_is_one_line(path):
    ledger, model = train(path)
    assert (ledger.recorded, ledger.confirmed) == (5, 0)
    lines = [json.loads(line) for line in open(path)]
    assert list(lines[0])[0] == "ledger" and lines[0]["contract"].startswith("4")
    assert [line["step"] for line in lines[1:]] == [1, 2, 3, 4, 5]
    assert isinstance(lines[1]["loss"], float) and "names" in lines[1] and "names" not in lines[2]
    contents = read(path)
    weights = contents.tensors(5, "weights")
    assert set(weights) == set(model.state_dict())
    assert weights["2.weight"] == f"{digest(model[2].weight):016x}"
    assert list(contents.tensors(5, "gradients")) == [name for name, _ in model.named_parameters()]
    optimizer = contents.tensors(5, "optimizer")
    assert "0.weight.momentum_buffer" in optimizer and "groups.0.lr" in optimizer and "groups.0.foreach" not in optimizer


def test_without_a_model_parameters_have_numbers(path):
    train(path, model=None)
    assert list(read(path).tensors(1, "gradients")) == ["0.0", "0.1", "0.2", "0.3", "0.4", "0.5"]


def test_recording_changes_nothing(path):
    plain = torch.Tensor.backward
    (_, one), (_, other) = train(path), train()
    carbon_compile.assert_bitwise(one, other)
    assert torch.Tensor.backward is plain


def test_sampled_and_totals_only(path):
    ledger, _ = train(path, steps=7, every=3, tensors=False)
    contents = read(path)
    assert list(contents.steps) == [3, 6] and ledger.recorded == 2
    assert "tensors" not in contents.steps[3] and contents.tensors(3, "weights") == {}
    with pytest.raises(ValueError, match="every=0"):
        train(path, every=0)


def test_a_run_made_again_is_confirmed_and_continued(path):
    train(path, steps=3)
    ledger, _ = train(path, steps=5)
    assert (ledger.confirmed, ledger.recorded) == (3, 2)
    whole = path + ".whole"
    train(whole)
    assert open(path).read() == open(whole).read()


def test_another_run_into_the_same_file_is_refused(path):
    train(path, steps=3)
    kept = open(path).read()

    def flip(step, model):
        if step == 2:
            model[2].weight.data.view(torch.int32)[1, 0] ^= 1 << 22

    with pytest.raises(LedgerError, match="step 2 is not what .*run.jsonl recorded: loss differs first. Either the run didn't repeat"):
        train(path, before_step=flip)
    with pytest.raises(LedgerError, match="step 1 is not what"):
        train(path, seed=5)
    assert open(path).read() == kept


def test_losses_of_microbatches_and_of_none(path):
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with carbon_compile.ledger(path):
        (weight.sum() * 2).backward()
        (weight.sum() * float("inf")).backward()
        optimizer.step()
        optimizer.step()
    assert [line["loss"] for line in read(path).steps.values()] == [[4.0, "inf"], None]


def test_a_loss_is_what_it_was_when_the_backward_pass_began(path):
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with carbon_compile.ledger(path):
        for loss in (weight.sum(), weight * 3):
            loss.backward(torch.ones_like(loss))
            loss.detach().div_(2)
        optimizer.step()
    assert read(path).steps[1]["loss"] == [2.0, 3.0]


def test_a_closed_ledger_says_so(path):
    ledger, _ = train(path, observe=False, steps=0)
    for use in (ledger.flush, ledger.catch_up, lambda: ledger.due(1), lambda: ledger.step(0.5)):
        with pytest.raises(LedgerError, match="run.jsonl isn't open: use it as `with carbon_compile.ledger"):
            use()


def test_an_explicit_ledger(path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with carbon_compile.ledger(path, observe=False, start=10) as ledger:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        ledger.step(0.5, model, optimizer)
    assert read(path).steps[11]["loss"] == 0.5
    with carbon_compile.ledger(path + "2") as ledger, pytest.raises(LedgerError, match="open it with observe=False"):
        ledger.step(0.5, model, optimizer)
    with pytest.raises(LedgerError, match="isn't open"):
        ledger.record([], model, optimizer, 1)


def test_an_error_in_training_is_not_hidden(path):
    def fails(step, model):
        if step == 3:
            raise KeyError("batch")

    with pytest.raises(KeyError):
        train(path, before_step=fails)
    assert read(path).last == 2
    assert train(path)[0].confirmed == 2


def test_compiled_optimizers_are_recorded_and_keep_the_promise(path):
    from .definition import eager_engine

    runlog.LOG.reset()
    with eager_engine():
        for _ in range(2):
            torch.manual_seed(0)
            model = nn.Linear(3, 2)
            optimizer = torch.optim.AdamW(model.parameters())
            step = torch.compile(optimizer.step, backend="carbon")
            with carbon_compile.ledger(path, model=model) as ledger:
                for _ in range(2):
                    model(torch.ones(4, 3)).square().mean().backward()
                    step()
    assert ledger.confirmed == 2
    assert carbon_compile.certificate().reasons == []


def test_another_hook_behind_a_compiled_step_is_not_excused(path):
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from .definition import eager_engine

    hook = register_optimizer_step_post_hook(torch.compiler.disable(lambda optimizer, args, kwargs: optimizer.param_groups[0]["params"][0].data.mul_(2)))
    model = nn.Linear(3, 2)
    step = torch.compile(torch.optim.AdamW(model.parameters()).step, backend="carbon")
    model(torch.ones(4, 3)).sum().backward()
    try:
        with eager_engine(), carbon_compile.ledger(path, model=model), pytest.raises(carbon_compile.Refused, match="CB601"):
            step()
    finally:
        hook.remove()


# --- a layout that is kept from step to step


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out, self.square = nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.out(self.norm(self.square(x)))


def drop_gradient(model, optimizer):
    model.out.bias.grad = None


def bring_gradient(model, optimizer):
    model.unused.grad = torch.ones(2)


def transpose_gradient(model, optimizer):
    model.square.weight.grad = model.square.weight.grad.t().contiguous().t()


def swap_memory(model, optimizer):
    model.square.weight.data = torch.arange(16.0).reshape(4, 4)


def transpose_weight(model, optimizer):
    model.square.weight.data = model.square.weight.data.t()


def widen(model, optimizer):
    model.out.weight.data = model.out.weight.data.double()


def replace_buffer(model, optimizer):
    model.norm.running_mean = torch.arange(4.0)


def add_buffer(model, optimizer):
    model.out.register_buffer("scale", torch.ones(2))


def replace_module(model, optimizer):
    model.norm = nn.BatchNorm1d(4)


def replace_state(model, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.state[model.out.bias]["exp_avg"] += 1


def drop_state(model, optimizer):
    del optimizer.state[model.out.bias]


def reorder_state(model, optimizer):
    """Two entries of the same types change places."""
    first, second, *others = (model.norm.weight, model.norm.bias, *(p for p in optimizer.state if p is not model.norm.weight and p is not model.norm.bias))
    entries = dict(optimizer.state)
    optimizer.state.clear()
    optimizer.state.update((p, entries[p]) for p in (second, first, *others))


def rename_state(model, optimizer):
    entry = optimizer.state[model.out.bias]
    optimizer.state[model.out.bias] = {{"exp_avg": "average"}.get(key, key): value for key, value in entry.items()}


def add_state(model, optimizer):
    optimizer.state[model.out.bias]["more"] = 3


def change_state(model, optimizer):
    optimizer.state[model.out.bias]["step"] = 3


def number_to_tensor(model, optimizer):
    optimizer.state[model.out.bias]["number"] = torch.tensor(7)


def change_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.5


def change_rate_in_place(model, optimizer):
    optimizer.param_groups[0]["lr"].fill_(0.25)


def add_group(model, optimizer):
    model.more = nn.Linear(2, 1)
    optimizer.add_param_group({"params": model.more.parameters()})


CHANGES = [
    drop_gradient, bring_gradient, transpose_gradient, swap_memory, transpose_weight, widen, replace_buffer, add_buffer,
    replace_module, replace_state, drop_state, reorder_state, rename_state, add_state, change_state, number_to_tensor, change_rate, change_rate_in_place, add_group,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_kept_layout_records_what_a_fresh_one_does(path, change):
    model = Net()
    rate = torch.tensor(0.1) if change is change_rate_in_place else 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
    optimizer.state[model.out.bias]["number"] = 7
    with carbon_compile.ledger(path, model=model, observe=False) as kept:
        for step, happens in enumerate([lambda *_: None, change, lambda *_: None], 1):
            happens(model, optimizer)
            kept.step(0.5, optimizer=optimizer)
            with carbon_compile.ledger(f"{path}.{step}", model=model, observe=False, start=step - 1) as fresh:
                fresh.step(0.5, optimizer=optimizer)
    contents = read(path)
    for step in (1, 2, 3):
        alone = read(f"{path}.{step}")
        for group in ledger_file.GROUPS[1:]:
            assert contents.tensors(step, group) == alone.tensors(step, group)
            assert contents.steps[step][group] == alone.steps[step][group]
    same = change in (reorder_state, transpose_gradient)
    assert same == all(contents.steps[1][group] == contents.steps[2][group] for group in ledger_file.GROUPS)
    assert contents.tensors(2, "weights")["square.weight"] == f"{digest(model.square.weight):016x}"


def test_a_layout_is_kept_while_gradients_come_and_go(path, monkeypatch):
    layouts = []
    plain = recording._Layout
    monkeypatch.setattr(recording, "_Layout", lambda *given: layouts.append(plain(*given)) or layouts[-1])
    train(path, steps=6)
    assert len(layouts) == 1


def test_a_sparse_gradient_is_refused_at_any_step(path):
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with carbon_compile.ledger(path, observe=False) as ledger:
        weight.grad = torch.ones(3, 2)
        ledger.step(0.5, optimizer=optimizer)
        weight.grad = weight.grad.to_sparse()
        with pytest.raises(TypeError, match="has no plain bits"):
            ledger.step(0.5, optimizer=optimizer)
    assert read(path).last == 1


# --- steps on their way


class Event:
    """What says whether a device is done, told by the test."""

    def __init__(self):
        self.done, self.waited = False, 0

    def query(self):
        return self.done

    def synchronize(self):
        self.waited += not self.done
        self.done = True


@pytest.fixture
def events(monkeypatch):
    """Every step's hashes arrive when the test says so; the events in the order of steps."""
    found, sent = [], recording.Ledger._sent

    def late(ledger, *given):
        arrival = sent(ledger, *given)
        arrival.event = Event()
        found.append(arrival.event)
        return arrival

    monkeypatch.setattr(recording.Ledger, "_sent", late)
    return found


def test_lines_are_written_in_order_as_they_arrive(path, events):
    def at(step, model):
        if step == 4:
            assert read(path).last == 0
            events[0].done = events[2].done = True
        elif step == 5:
            assert read(path).last == 1
            events[1].done = True
        elif step == 6:
            assert read(path).last == 3 and not any(event.waited for event in events)

    train(path, steps=6, before_step=at)
    assert [event.waited for event in events] == [0, 0, 0, 1, 1, 1]
    whole = path + ".whole"
    train(whole, steps=6)
    assert open(path).read() == open(whole).read()


def test_a_killed_process_loses_no_more_than_the_steps_on_their_way(path, events):
    seen = []
    train(path, steps=20, before_step=lambda step, model: seen.append(step - 1 - read(path).last))
    assert seen == [min(made, recording.LATE) for made in range(20)]
    assert read(path).last == 20


class Card(str):
    """A CPU that the recorder takes for a GPU."""

    type = "cuda"


def test_what_a_gpu_sends_is_digests_then_losses_in_memory_used_again(path, monkeypatch):
    rooms = []
    monkeypatch.setattr(recording, "_room", lambda out: rooms.append((torch.empty_like(out), type("Done", (Event,), {"record": lambda self, stream: None})())) or rooms[-1])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    tensors = [torch.randn(3), torch.randn(5000)]
    losses = [0.5, torch.tensor(0.1), torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor(float("nan"), dtype=torch.float64)]
    with carbon_compile.ledger(path, observe=False) as ledger:
        first, second = (ledger._sent(tensors, Batch(tensors), Card("cpu"), losses, [1, 2, 3]) for _ in range(2))
        assert first.integers()[:2].tolist() == digests(tensors).tolist() and (first.tensors, first.losses) == (2, [1, 2, 3])
        assert [recording._told(bits & MASK) for bits in first.integers()[2:].tolist()] == [torch.tensor(0.1).item(), 1.5, "nan"]
        second.release()
        third = ledger._sent([x + 1 for x in tensors], Batch(tensors), Card("cpu"), losses, [1, 2, 3])
        assert third.integers() is second.integers() is not first.integers() and len(rooms) == 2
        assert third.integers()[:2].tolist() == digests([x + 1 for x in tensors]).tolist()


def test_nothing_is_written_behind_a_step_that_did_not_repeat(path, events):
    train(path, steps=3)
    kept = open(path).read()

    events.clear()

    def flip(step, model):
        if step == 3:
            model[2].weight.data.view(torch.int32)[1, 0] ^= 1 << 22
        elif step == 6:  # steps 4 and 5 are new, and on their way
            events[0].done = events[1].done = events[2].done = True

    with pytest.raises(LedgerError, match="step 3 is not what"):
        train(path, steps=7, before_step=flip)
    assert len(events) == 6 and open(path).read() == kept


# --- the file


def rewrite(path, change):
    lines = open(path).readlines()
    with open(path, "w") as file:
        file.writelines(change(lines))


@pytest.mark.parametrize(
    "change,line",
    [
        (lambda l: [*l[:3], l[3].replace('"weights":"', '"weights":"0', 1), *l[4:]], 4),
        (lambda l: [*l[:3], *l[4:]], 4),
        (lambda l: [*l[:2], l[3], l[2], *l[4:]], 3),
        (lambda l: [*l[:3], "{}\n", *l[3:]], 4),
        (lambda l: [*l[:3], "not json\n", *l[3:]], 4),
        (lambda l: [l[0].replace('"every":1', '"every":2'), *l[1:]], 1),
    ],
)
def test_an_edited_line_shows(path, change, line):
    train(path)
    rewrite(path, change)
    for use in (read, Writer):
        with pytest.raises(LedgerError, match=f"run.jsonl, line {line}: the chain is broken"):
            use(path)


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_torn_last_line_is_cut(path, cut):
    train(path)
    whole = open(path, "rb").read()
    last = whole.rindex(b"\n", 0, -1) + 1
    with open(path, "wb") as file:
        file.write(whole[: last + cut] if cut > 0 else whole[:cut])
    assert read(path).last == 4
    ledger, _ = train(path)
    assert (ledger.confirmed, ledger.recorded) == (4, 1)
    assert open(path, "rb").read() == whole


def test_an_empty_or_torn_beginning_starts_anew(path):
    for start in (b"", b'{"ledger":2,"ev'):
        with open(path, "wb") as file:
            file.write(start)
        assert train(path)[0].recorded == 5


def test_other_files_are_refused(path):
    for text, told in (("hello\nworld\n", "line 1: the chain is broken"), ('{"a":1,"chain":"x"}\n', "line 1: the chain is broken")):
        with open(path, "w") as file:
            file.write(text)
        with pytest.raises(LedgerError, match=told):
            Writer(path)
        assert open(path).read() == text


@pytest.mark.parametrize("number", [1, 9])
def test_other_formats_are_refused(path, number):
    line = {"ledger": number}
    with open(path, "w") as file:
        file.write(json.dumps({**line, "chain": ledger_file.chained("", line)}) + "\n")
    kept = open(path).read()
    for use in (read, Writer, train):
        with pytest.raises(LedgerError, match=f"run.jsonl is a ledger of format {number}; this release reads 2"):
            use(path)
    assert open(path).read() == kept


def test_one_writer_at_a_time(path):
    writer = Writer(path)
    with pytest.raises(LedgerError, match="is being written by another process"):
        Writer(path)
    writer.close()
    Writer(path).close()


def test_a_full_disk_leaves_whole_lines(path, monkeypatch):
    writer = Writer(path)
    writer.append({"ledger": ledger_file.FORMAT})
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:5]))
    with pytest.raises(OSError, match="No space"):
        writer.append({"step": 1})
    monkeypatch.undo()
    writer.append({"step": 1})
    writer.close()
    assert read(path).last == 1


# --- diff


def test_diff_names_the_first_step_and_tensor(tmp_path, capsys):
    def flip(step, model):
        if step == 3:
            model[2].bias.data.view(torch.int32)[0] ^= 1 << 20

    one, other, fewer = (str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    train(one), train(other, before_step=flip), train(fewer, steps=4)
    assert list(differences(read(one), read(one))) == []
    lines = list(differences(read(one), read(other)))
    assert lines[0] == "first difference: step 3, loss" and lines[1] == "equal up to step 2"
    assert any(line.startswith("gradients: ") and "2.bias" in line for line in lines)
    assert cli.main(["diff", one, one]) == 0
    tensors = sum(len(read(one).tensors(step, group)) for step in range(1, 6) for group in ledger_file.GROUPS)
    assert capsys.readouterr().out == f"equal: 5 steps (1 to 5), hashes of {tensors} tensors\n"
    assert cli.main(["diff", one, other]) == 1 and capsys.readouterr().out.startswith("first difference: step 3, loss\n")
    assert cli.main(["diff", one, fewer]) == 1 and capsys.readouterr().out == "equal up to step 4, where one ends; the other has 5\n"


def test_diff_tells_what_was_equal(tmp_path, capsys):
    sampled, totals = str(tmp_path / "s"), str(tmp_path / "t")
    train(sampled, steps=6, every=3), train(totals, steps=6, tensors=False)
    for one, other, told in ((sampled, totals, "2 steps (3 to 6), hashes of "), (totals, totals, "6 steps (1 to 6), hashes of groups only")):
        assert cli.main(["diff", one, other]) == 0
        assert capsys.readouterr().out.startswith(f"equal: {told}")


def test_diff_without_a_loss_names_the_tensor_nearest_the_cause(tmp_path):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    train(a), train(b, momentum=0.5)
    lines = list(differences(read(a), read(b)))
    assert lines[0] == "first difference: step 1, optimizer groups.0.momentum"


def test_diff_names_no_tensor_where_one_side_kept_totals(tmp_path):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    train(a), train(b, momentum=0.5, tensors=False)
    for one, other in ((a, b), (b, a)):
        lines = list(differences(read(one), read(other)))
        assert lines[0] == "first difference: step 1, optimizer (tensor by tensor hashes were not kept)"
        assert lines[1].startswith("optimizer: ") and " -> " in lines[1]


def test_losses_differ_by_their_sign_alone(tmp_path):
    def record(name, *losses):
        path = str(tmp_path / name)
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        with carbon_compile.ledger(path, observe=False) as ledger:
            for loss in losses:
                ledger.step(loss, optimizer=optimizer)
        return read(path)

    lines = list(differences(record("a", 1.0, 0.0), record("b", 1.0, -0.0)))
    assert lines == ["first difference: step 2, loss", "equal up to step 1", "loss: 0.0 -> -0.0"]
    assert list(differences(record("c", [0.0, -0.0]), record("d", [0.0, 0.0])))[0] == "first difference: step 1, loss"
    with pytest.raises(LedgerError, match="step 1 is not what .*c recorded: loss differs first"):
        record("c", [-0.0, -0.0])


def test_diff_of_wrong_files_ends_in_one_line(path, tmp_path, capsys):
    train(path)
    (tmp_path / "c.json").write_text("{}")
    assert cli.main(["diff", path, str(tmp_path / "c.json")]) == 2
    assert "run.jsonl is a ledger and" in capsys.readouterr().err
    rewrite(path, lambda l: [*l[:2], *l[3:]])
    assert cli.main(["diff", path, path]) == 2
    assert capsys.readouterr().err == f"carbon-compile diff: {path}, line 3: the chain is broken: this line was edited, or one before it is missing\n"
    assert cli.main(["diff", path, str(tmp_path / "none")]) == 2
    assert cli.main(["diff", path, path, "--step", "3"]) == 2
    assert "--step goes with --replay" in capsys.readouterr().err


def test_a_caught_difference_ends_the_ledger(path):
    train(path)
    before = open(path, "rb").read()
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(LedgerError, match="step 1 is not what"), carbon_compile.ledger(path, model):
        for _ in range(8):  # more steps than the file has
            model(torch.randn(6, 3)).square().mean().backward()
            with contextlib.suppress(LedgerError):
                optimizer.step()
        optimizer.step()
    assert open(path, "rb").read() == before

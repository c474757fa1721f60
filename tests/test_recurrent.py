"""Recurrent layers: one bit pattern eager and compiled, for any neighbours and any cut of the sequence, close to float64."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, unpack_sequence

import carbon_compile
from carbon_compile import runlog
from carbon_compile.backend import carbon
from carbon_compile.bits import assert_bitwise

from .definition import check_accuracy, check_compiled, defined, eager_engine, forward_and_backward

LAYERS = {
    "lstm": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "proj_size": 3}),
    "gru": (nn.GRU, {"num_layers": 2, "batch_first": True, "bidirectional": True}),
    "rnn": (nn.RNN, {"nonlinearity": "relu", "bias": False}),
    "tanh": (nn.RNN, {"num_layers": 2}),
}
STEPS, ROWS, INPUTS, HIDDEN = 4, 3, 5, 6


def made(kind, **how):
    torch.manual_seed(0)
    layer, options = LAYERS[kind]
    return layer(INPUTS, HIDDEN, **{**options, **how})


def flat(module, *, given=False):
    """(a function of the input and the parameters, state included where it is given; its arguments), for `forward_and_backward`."""
    names = [name for name, _ in module.named_parameters()]
    x = torch.randn(ROWS, STEPS, INPUTS) if getattr(module, "batch_first", False) else torch.randn(STEPS, ROWS, INPUTS)
    directions = (2 if module.bidirectional else 1) * module.num_layers
    widths = [module.proj_size or HIDDEN] + [HIDDEN] * isinstance(module, nn.LSTM) if given else []
    state = [torch.randn(directions, ROWS, width) for width in widths]

    def function(x, *rest):
        hx = None if not given else rest[0] if len(state) == 1 else tuple(rest[: len(state)])
        y, last = torch.func.functional_call(module, dict(zip(names, rest[len(state) :], strict=True)), (x, hx))
        return (y, *(last if isinstance(last, tuple) else (last,)))

    return function, [t.detach().clone().requires_grad_() for t in (x, *state, *module.parameters())]


def eager(function, inputs):
    return forward_and_backward(function, inputs, under=carbon_compile.enable)


@pytest.mark.parametrize("given", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_are_close_to_float64(kind, given):
    function, inputs = flat(made(kind), given=given)
    check_accuracy(function, inputs, eager(function, inputs), 3e-6)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_compiled_layer_is_the_eager_one(kind):
    """Of a module as its user has it."""
    module, x = made(kind), torch.randn(2, 2, INPUTS, requires_grad=True)
    with eager_engine():
        compiled = forward_and_backward(lambda x, *_: outputs(torch.compile(module, backend=carbon, fullgraph=True)(x)), [x])
    assert_bitwise(compiled, eager(lambda x: outputs(module(x)), [x]))


def outputs(result):
    y, last = result
    return (y, *last) if isinstance(last, tuple) else (y, last)


def test_sizes_that_change_and_empty_ones():
    module = made("lstm", num_layers=1)
    compiled = torch.compile(module, backend=carbon)
    with torch.no_grad(), eager_engine():
        for steps, rows in ((2, 2), (2, 5), (3, 4), (2, 0)):
            x = torch.randn(steps, rows, INPUTS)
            assert_bitwise(outputs(compiled(x)), eager(lambda x: outputs(module(x)), [x])[0])
    with carbon_compile.enable(), pytest.raises(RuntimeError, match="sequence length"):
        module(torch.randn(0, 2, INPUTS))


def test_states_have_their_shapes_while_dynamo_traces():
    module = made("lstm", bidirectional=False)

    def last(x):
        h, c = module(x)[1]
        return torch.full((), float(h.dim() + c.dim())) + h[-1].sum()

    x = torch.randn(2, ROWS, INPUTS)
    with eager_engine():
        expected = eager(last, [x])[0][0].detach()
        assert_bitwise(torch.compile(last, backend=carbon, fullgraph=True)(x).detach(), expected)
    assert expected > 4


def test_kernels_are_the_definition():
    runlog.LOG.reset()  # of what other tests compiled in this process
    module = nn.RNN(INPUTS, HIDDEN, nonlinearity="relu")
    check_compiled(lambda x: outputs(module(x)), [torch.randn(2, ROWS, INPUTS, requires_grad=True)])
    certificate = carbon_compile.certificate()
    assert certificate.held, certificate.reasons


@pytest.mark.parametrize("kind", LAYERS)
def test_rows_do_not_depend_on_their_neighbours(kind):
    function, inputs = flat(made(kind, batch_first=False), given=True)
    chosen = torch.tensor([2, 0])
    states = sum(t.dim() == 3 for t in inputs)
    some = [t[:, chosen].detach().requires_grad_() for t in inputs[:states]] + inputs[states:]
    whole, part = eager(unweighted(function), inputs), eager(unweighted(function), some)
    assert_bitwise([t[:, chosen] for t in whole[0]], part[0])
    assert_bitwise([t[:, chosen] for t in whole[1][:states]], part[1][:states])


def unweighted(function):
    """Gradients that come in don't depend on the batch: the outputs, each through an element's own square."""

    def squares(*inputs):
        found = function(*inputs)
        for t in found:
            t.register_hook(lambda g, t=t: t.detach())
        return found

    return squares


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_a_sequence_may_be_cut(kind):
    module = made(kind, bidirectional=False, batch_first=False)
    x = torch.randn(5, ROWS, INPUTS)
    with carbon_compile.enable(), torch.no_grad():
        whole, last = module(x)
        first, state = module(x[:2])
        second, end = module(x[2:], state)
        assert_bitwise([whole, last], [torch.cat([first, second]), end])
        alone, _ = module(x[:, 0])  # no batch
        assert_bitwise(alone, whole[:, 0])


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn", "tanh"])
def test_a_layer_is_its_cell_at_every_step(kind):
    layer = made(kind, num_layers=1, bidirectional=False, batch_first=False, **({"proj_size": 0} if kind == "lstm" else {}))
    cell = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}.get(kind, nn.RNNCell)(INPUTS, HIDDEN, **({} if kind in ("lstm", "gru") else {"nonlinearity": layer.nonlinearity}), bias=layer.bias)
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in layer.state_dict().items()})
    x = torch.randn(4, ROWS, INPUTS)

    def stepped():
        state, found = None, []
        for part in x:
            state = cell(part, state)
            found.append(state[0] if kind == "lstm" else state)
        return torch.stack(found)

    for dtype in (torch.float32, torch.bfloat16):
        layer.to(dtype), cell.to(dtype)
        x = x.to(dtype)
        with carbon_compile.enable(), torch.no_grad():
            assert_bitwise(stepped(), layer(x)[0])
    layer.float(), cell.float()
    x = x.float()
    with eager_engine():
        assert_bitwise(torch.compile(stepped, backend=carbon, fullgraph=True)().detach(), torch.compile(layer, backend=carbon, fullgraph=True)(x)[0].detach())


def test_dropout_between_layers_draws_as_section_7_says():
    layer = nn.GRU(INPUTS, HIDDEN, num_layers=3, dropout=0.4)
    x = torch.randn(4, ROWS, INPUTS)
    singles = [nn.GRU(INPUTS if i == 0 else HIDDEN, HIDDEN) for i in range(3)]
    for i, single in enumerate(singles):
        single.load_state_dict({f"{name[:-1]}0": value for name, value in layer.state_dict().items() if name.endswith(str(i))})
    with carbon_compile.enable(seed=3):
        whole = layer(x)[0]
    with carbon_compile.enable(seed=3):
        y = singles[0](x)[0]
        for single in singles[1:]:
            y = single(F.dropout(y, 0.4))[0]
    assert_bitwise(whole.detach(), y.detach())
    torch.manual_seed(3)
    with eager_engine():
        assert_bitwise(torch.compile(layer, backend=carbon, fullgraph=True)(x)[0].detach(), whole.detach())
    layer.eval()
    with carbon_compile.enable():
        assert_bitwise(layer(x)[0].detach(), layer(x)[0].detach())


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_low_precision_rounds_what_is_handed_on(kind):
    function, inputs = flat(made(kind))

    def narrow(*given):
        with torch.autocast("cpu", torch.bfloat16):
            return function(*given)

    results = eager(narrow, inputs)
    assert {t.dtype for t in results[0]} == {torch.bfloat16} and {t.dtype for t in results[1]} == {torch.float32}
    check_accuracy(function, inputs, results, 5e-2)
    x = inputs[0]
    module = made(kind)

    def whole(x):
        with torch.autocast("cpu", torch.bfloat16):
            return outputs(module(x))

    assert_bitwise(defined(whole, [x]), eager(whole, [x]))


@pytest.mark.parametrize("kind", LAYERS)
def test_packed_sequences_are_the_sequences_alone(kind):
    module, lengths = made(kind, batch_first=False), [2, 4, 1, 4]
    x = torch.randn(STEPS, 4, INPUTS, requires_grad=True)
    with carbon_compile.enable():
        packed, last = module(pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False))
        padded, found = pad_packed_sequence(packed, padding_value=7.0, total_length=5)
        alone = [module(x[:n, i : i + 1]) for i, n in enumerate(lengths)]
        padded.square().sum().backward()
    assert found.tolist() == lengths and padded.shape[0] == 5
    for i, (n, (y, state)) in enumerate(zip(lengths, alone, strict=True)):
        assert_bitwise(padded[:n, i].detach(), y[:, 0].detach())
        assert (padded[n:, i] == 7.0).all() and (x.grad[n:, i] == 0).all() and (x.grad[:n, i] != 0).any()
        for one, other in zip(outputs((y, last))[1:], outputs((y, state))[1:], strict=True):
            assert_bitwise(one[:, i].detach(), other[:, 0].detach())
    torch.testing.assert_close(unpack_sequence(module(pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False))[0])[0], padded[:2, 0], rtol=1e-4, atol=1e-5)
    with carbon_compile.enable(), pytest.raises(RuntimeError, match="must be decreasing"):
        pack_padded_sequence(x, torch.tensor(lengths))


def test_what_is_refused_says_why():
    module, x = nn.LSTM(INPUTS, HIDDEN), torch.randn(STEPS, 2, INPUTS)

    def packed(x, lengths):
        return module(pack_padded_sequence(x, lengths))[1]

    with pytest.raises(carbon_compile.Refused, match="CB107.*packed sequence") as refused:
        torch.compile(packed, backend=carbon)(x, torch.tensor([4, 2]))
    assert refused.value.report.refused[0].source_line == "return module(pack_padded_sequence(x, lengths))[1]"
    with carbon_compile.enable():
        with pytest.raises(carbon_compile.Refused, match="CB201"):
            module.double()(x.double())
        with pytest.raises(RuntimeError, match="a recurrent layer's input is torch.float32, and a state or weight is torch.float64"):
            torch.lstm(x, (x[:1, :, :1],) * 2, [p.detach() for p in module.parameters()], True, 1, 0.0, False, False, False)


def test_a_step_with_a_layer_can_be_replayed():
    from carbon_compile.replay import capture

    module, x = made("gru"), torch.randn(ROWS, STEPS, INPUTS)
    graph, inputs = capture(lambda x: module(x)[0].sum(), x)
    assert any(node.target is torch.gru or node.target == torch.gru for node in graph.graph.nodes) and len(inputs) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_on_cuda_is_the_layer_on_the_cpu(kind):
    for compiled in (False, True):
        found = []
        for device in ("cpu", "cuda"):
            module, x = made(kind).to(device), flat(made(kind))[1][0].detach()
            torch.compiler.reset()
            run = torch.compile(module, backend=carbon, fullgraph=True) if compiled else module
            leaf = x.to(device).requires_grad_()
            found.append(forward_and_backward(lambda x, run=run: outputs(run(x)), [leaf], under=contextlib.nullcontext if compiled else carbon_compile.enable))
        assert_bitwise(found[0], [[t.cpu() for t in part] for part in found[1]])


@pytest.mark.parametrize("cell, told", [(nn.LSTMCell, "hidden0"), (nn.GRUCell, "hidden0"), (nn.RNNCell, "hidden0")])
def test_cells_refuse_states_of_other_shapes(cell, told):
    """Which would broadcast."""
    module, x = cell(INPUTS, HIDDEN), torch.randn(ROWS, INPUTS)
    state = (lambda h: (h, torch.zeros(ROWS, HIDDEN))) if cell is nn.LSTMCell else (lambda h: h)
    with carbon_compile.enable():
        with pytest.raises(RuntimeError, match=f"batch size 3 doesn't match {told} batch size 1"):
            module(x, state(torch.zeros(1, HIDDEN)))
        with pytest.raises(RuntimeError, match=f"{told} has inconsistent hidden_size: got 1, expected {HIDDEN}"):
            module(x, state(torch.zeros(ROWS, 1)))
        with pytest.raises(RuntimeError, match="inconsistent input_size"):
            module(torch.randn(ROWS, 2))

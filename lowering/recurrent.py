"""Recurrent layers and cells (contract section 4): products, sigmoid and tanh, one step after the other.

A layer is its cell at every step, so cutting a sequence and handing the state on gives the same bits.
The products of all inputs with the input's weight are one product. In low precision a cell computes in
binary32 from its products on, and rounds what it hands on: h, and c of an LSTM.
"""

import torch

from .matmul import mm
from .random import dropout
from .registry import Refusal, composite


def _product(x, weight, bias, dtype=torch.float32):
    """x [N, K] times weight [M, K] transposed, plus bias [M], in binary32 before it is rounded to `dtype`.

    weight: in binary32, so that the gradients of all steps add up there.
    """
    return mm(x, weight.to(x.dtype).t(), bias, dtype)


# --- cells: (inputs' part [N, gates M], state's part, state) -> new state, in binary32


def _lstm(x, h, state):
    """c' = sigmoid(f) c + sigmoid(i) tanh(g); h' = sigmoid(o) tanh(c'), of a c' that isn't rounded yet."""
    i, f, g, o = (x + h).chunk(4, 1)
    c = torch.sigmoid(f) * state[1].float() + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(x, h, state):
    """n = tanh(x_n + sigmoid(r) h_n); h' = n + sigmoid(z) (h - n)."""
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, 1), h.chunk(3, 1)
    n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
    return (n + torch.sigmoid(xz + hz) * (state[0].float() - n),)


def _tanh(x, h, state):
    return (torch.tanh(x + h),)


def _relu(x, h, state):
    return (torch.relu(x + h),)


class _Weights:
    """Weights and biases of one cell in binary32: w_ih [G, I], w_hh [G, H], then b_ih and b_hh [G], then w_hr [P, H]."""

    def __init__(self, given, biases):
        given = [None if t is None else t.float() for t in given]
        self.w_ih, self.w_hh, *rest = given
        self.b_ih, self.b_hh = rest[:2] if biases else (None, None)
        self.w_hr = rest[-1] if len(rest) % 2 else None

    def of_inputs(self, x):
        """x [..., I] -> [..., G] in binary32."""
        return _product(x.reshape(-1, x.shape[-1]), self.w_ih, self.b_ih).reshape(*x.shape[:-1], self.w_ih.shape[0])

    def step(self, cell, x, state):
        """The new state from the inputs' part x [N, G], as tensors of the state's type."""
        dtype = state[0].dtype
        h, *rest = (s.to(dtype) for s in cell(x, _product(state[0], self.w_hh, self.b_hh), state))
        return (h if self.w_hr is None else _product(h, self.w_hr, None, dtype), *rest)


def _check(x, state, weights):
    for other in (*state, *weights):
        if other is not None and other.dtype is not x.dtype:
            raise RuntimeError(f"a recurrent layer's input is {x.dtype}, and a state or weight is {other.dtype}: convert one, or use torch.autocast")


# --- cells of their own ---------------------------------------------------------------------------------


def _cell(cell, x, state, weights):
    _check(x, state, weights)
    (rows, features), (_, expected), (_, hidden) = x.shape, weights[0].shape, weights[1].shape
    if features != expected:
        raise RuntimeError(f"input has inconsistent input_size: got {features} expected {expected}")
    for i, each in enumerate(state):
        if each.shape[0] != rows:
            raise RuntimeError(f"Input batch size {rows} doesn't match hidden{i} batch size {each.shape[0]}")
        if each.shape[1] != hidden:
            raise RuntimeError(f"hidden{i} has inconsistent hidden_size: got {each.shape[1]}, expected {hidden}")
    weights = _Weights(weights, biases=weights[2] is not None)
    return weights.step(cell, weights.of_inputs(x), state)


@composite(torch.lstm_cell, section="4")
def lstm_cell(x, hx, w_ih, w_hh, b_ih=None, b_hh=None):
    """(h, c) [N, H] from x [N, I] and hx = (h, c), as of nn.LSTMCell."""
    return _cell(_lstm, x, tuple(hx), (w_ih, w_hh, b_ih, b_hh))


def _single(function, cell):
    @composite(function, section="4")
    def one(x, hx, w_ih, w_hh, b_ih=None, b_hh=None):
        return _cell(cell, x, (hx,), (w_ih, w_hh, b_ih, b_hh))[0]

    one.__doc__ = "h [N, H] from x [N, I] and hx [N, H]."
    return one


gru_cell, rnn_tanh_cell, rnn_relu_cell = _single(torch.gru_cell, _gru), _single(torch.rnn_tanh_cell, _tanh), _single(torch.rnn_relu_cell, _relu)


# --- layers ---------------------------------------------------------------------------------------------


def _padded(weights, cell, x, state, reverse):
    """(h of every step [T, N, H], last state) of one direction of one layer; x [T, N, I]."""
    parts, found = weights.of_inputs(x).unbind(0), []
    for part in reversed(parts) if reverse else parts:
        state = weights.step(cell, part, state)
        found.append(state[0])
    return torch.stack(found[::-1] if reverse else found), state


def _packed(sizes):
    """`_padded` for the rows of a PackedSequence: [sum(sizes), I], of which `sizes` belong to each step."""

    def run(weights, cell, x, state, reverse):
        parts, found, done = weights.of_inputs(x).split(sizes), [], []
        if not reverse:  # sequences end
            for part, n in zip(parts, sizes, strict=True):
                if n < state[0].shape[0]:
                    done.append(tuple(s[n:] for s in state))
                    state = tuple(s[:n] for s in state)
                state = weights.step(cell, part, state)
                found.append(state[0])
            ended = [*done, state][::-1]
            return torch.cat(found), tuple(map(torch.cat, zip(*ended, strict=True)))
        start, state = state, tuple(s[:0] for s in state)
        for part, n in zip(parts[::-1], sizes[::-1], strict=True):  # sequences begin
            have = state[0].shape[0]
            if n > have:
                state = tuple(torch.cat([s, first[have:n]]) for s, first in zip(state, start, strict=True))
            state = weights.step(cell, part, state)
            found.append(state[0])
        return torch.cat(found[::-1]), state

    return run


def _layers(cell, run, x, state, params, biases, layers, p, train, bidirectional):
    """(output, states [layers * directions, N, H]) of stacked layers, with dropout between them."""
    directions = 2 if bidirectional else 1
    each = len(params) // (layers * directions)
    _check(x, state, params)
    last = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            weights = _Weights(params[place * each : (place + 1) * each], biases)
            output, new = run(weights, cell, x, tuple(s[place] for s in state), reverse=direction == 1)
            outputs.append(output)
            last.append(new)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if layer < layers - 1:
            x = dropout(x, p, train)
    return x, tuple(map(torch.stack, zip(*last, strict=True)))


def _layer(cell, x, second, third, *rest):
    """A call of torch.lstm, torch.gru, torch.rnn_tanh or torch.rnn_relu, whose two forms differ in the second argument:
    (x, state, weights, biases, layers, p, train, bidirectional, batch_first), or (rows, sizes, state, weights, ...) of a
    PackedSequence, without the last."""
    if isinstance(third, torch.Tensor) or isinstance(rest[0], (list, tuple)):
        params, *options = rest
        run, state, batch_first = _packed(_known(second)), third, False
    else:
        params, (*options, batch_first) = third, rest
        run, state = _padded, second
        if x.shape[1 if batch_first else 0] == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    state = (state,) if isinstance(state, torch.Tensor) else tuple(state)
    x = x.transpose(0, 1) if batch_first else x
    output, last = _layers(cell, run, x, state, params, *options)
    return (output.transpose(0, 1) if batch_first else output, *last)


def _define(function, cell):
    @composite(function, section="4")
    def layer(*args):
        return _layer(cell, *args)

    layer.__doc__ = f"`{function.__name__}`: see `_layer`."
    return layer


def _known(sizes):
    """The rows of each step as a list: in a graph that is being traced, only the data knows them."""
    if type(sizes) is not torch.Tensor:
        raise Refusal("CB107", "the lengths of packed sequences are known to the data only, not to the compiler")
    return sizes.tolist()


lstm, gru, rnn_tanh, rnn_relu = _define(torch.lstm, _lstm), _define(torch.gru, _gru), _define(torch.rnn_tanh, _tanh), _define(torch.rnn_relu, _relu)


# --- packed sequences: rows move, and nothing is computed -------------------------------------------------


@composite(torch._pack_padded_sequence, section="1")
def pack_padded_sequence(x, lengths, batch_first):
    """(rows [sum(lengths), ...], batch sizes [max(lengths)]) of x [T, N, ...] and decreasing lengths [N] on the CPU."""
    rows = x.transpose(0, 1) if batch_first else x
    each = _known(lengths)
    if len(each) != rows.shape[1]:
        raise RuntimeError(f"Expected `len(lengths)` to be equal to batch_size, but got {len(each)} (batch_size={rows.shape[1]})")
    if sorted(each, reverse=True) != each or each[-1] <= 0 or each[0] > rows.shape[0]:
        raise RuntimeError(f"`lengths` must be decreasing (or enforce_sorted=False), above 0 and at most {rows.shape[0]}; got {each}")
    sizes = [sum(n > t for n in each) for t in range(each[0])]
    return torch.cat([rows[t, :n] for t, n in enumerate(sizes)]), torch.tensor(sizes)


@composite(torch._pad_packed_sequence, section="1")
def pad_packed_sequence(rows, sizes, batch_first, value, total):
    """(x [T, N, ...], lengths [N]) of packed rows; T is `total` where that is positive."""
    each = _known(sizes)
    steps = [_filled(part, each[0] - len(part), value) for part in rows.split(each)]
    if 0 < total < len(steps):
        raise RuntimeError(f"Expected total_length to be at least the length of the longest sequence in input, but got total_length={total} and max sequence length being {len(steps)}")
    steps += [_filled(rows[:0], each[0], value)] * max(0, total - len(steps))
    x = torch.stack(steps)
    return x.transpose(0, 1) if batch_first else x, torch.tensor([sum(n > i for n in each) for i in range(each[0])])


def _filled(part, missing, value):
    return part if missing == 0 else torch.cat([part, part.new_full((missing, *part.shape[1:]), value)])

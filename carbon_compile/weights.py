"""Digits of weights that are kept between calls: `options={"weights": "kept"}`.

A product by a weight quantises it at every call, although the digits depend on nothing but the weight. In
a graph without a backward pass `hoist` takes them out: each weight that is an input, behind views and
casts, gets a further input that holds its digits (`templates.kept`), and `KeptWeights` hands these over,
made anew wherever the weight is not what they were made from.

What is compared at a call is where and how the weight lies (storage, address, sizes, strides, type) and
autograd's count of in-place changes. Writes that neither shows are the caller's to tell, by `weights_changed`. Digits of a
weight are shared by all graphs that read it in the same way, and live as long as it and one of these
graphs. They stay where they are when they are made anew, so that CUDA graphs go on reading them.
"""

import operator
import threading
import weakref
from typing import NamedTuple

import torch

from . import host
from .lowering import matmul, policy
from .templates import kept


class Recipe(NamedTuple):
    """What is done to an input before it is a product's second operand: `steps` are (operator, further
    arguments, keywords), each on the result before it; then digits of a [k, n] for this window."""

    steps: tuple
    window: int
    k: int
    n: int

    def operand(self, weight):
        for function, arguments, keywords in self.steps:
            weight = function(weight, *_thawed(arguments), **dict(keywords))
        return weight


class Slot(NamedTuple):
    """A weight's place among a graph's inputs, its device, and what is kept of it."""

    index: int
    recipe: Recipe
    device: torch.device


# ---- the graph ----

_STEPS = {
    "aten.permute.default", "aten.t.default", "aten.transpose.int", "aten.view.default", "aten._unsafe_view.default",
    "aten.reshape.default", "aten.alias.default", "aten.detach.default", "aten.slice.Tensor", "aten.select.int",
    "aten.narrow.default", "aten.unsqueeze.default", "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims",
    "aten.split.Tensor", "aten.split_with_sizes.default", "aten.unbind.int", "aten.clone.default", "carbon.cast.default",
}  # fmt: skip


def hoist(gm, example_inputs, fixed):
    """Let a final graph read digits of its weights as further inputs, in place.

    fixed: the numbers of the inputs that are parameters or buffers. Returns the slots of the new inputs, in
    their order, and the fake tensors that stand for them.
    """
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    weights = {inputs[i]: i for i in fixed} if example_inputs else {}
    for node in gm.graph.nodes:
        for changed in _changed_by(node):
            weights.pop(changed, None)
    slots, nodes = {}, []
    for node in list(gm.graph.nodes):
        if node.target is not matmul.MM_KERNEL or node.args[4] != "weight":
            continue
        a, b, bias, window, _, dtype = node.args
        slot = _slot(b, window, weights)
        if slot is None:
            continue
        window = slot.recipe.window
        if slot not in slots:
            slots[slot] = _new_input(gm.graph, inputs[-1] if not nodes else nodes[-1], slot, len(nodes))
            slots[slot].meta["kept"] = b.meta["val"], window  # for precompilation
            nodes.append(slots[slot])
        with gm.graph.inserting_before(node):
            product = gm.graph.call_function(matmul.MM_KEPT, (a, slots[slot], bias, slot.recipe.n, window, dtype))
        product.meta = dict(node.meta)
        node.replace_all_uses_with(product)
        gm.graph.erase_node(node)
        _erase_unused(gm.graph, b)
    if nodes:
        gm.recompile()
    return tuple(slots), [node.meta["val"] for node in nodes]


def _changed_by(node):
    """What an operator writes to in place."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function":
        return ()
    if schema is None:  # getitem and arithmetic of sizes change nothing, and others are not known
        return () if getattr(node.target, "__module__", "") in ("_operator", "builtins", "math") else node.all_input_nodes
    return node.all_input_nodes if schema.is_mutable else ()


def _slot(node, window, weights):
    """Of a second operand, where its digits can be kept; None elsewhere."""
    k, n = node.meta["val"].shape
    device = node.meta["val"].device
    if not (isinstance(k, int) and isinstance(n, int) and k > 1 and n > 0):
        return None
    steps = []
    while node not in weights:
        step = _step(node)
        if step is None:
            return None
        steps.append(step)
        node = node.args[0]
    return Slot(weights[node], Recipe(tuple(reversed(steps)), policy.window_for(window, "weight", k), k, n), device)


def _step(node):
    if node.op != "call_function" or str(node.target) not in _STEPS and node.target is not operator.getitem:
        return None
    if not node.args or node.all_input_nodes != [node.args[0]]:
        return None
    return node.target, _frozen(node.args[1:]), tuple(sorted(node.kwargs.items()))


def _frozen(value):
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


def _thawed(value):
    return [_thawed(item) for item in value] if isinstance(value, tuple) else value


def _new_input(graph, after, slot, number):
    size = kept.layout(slot.recipe.k, slot.recipe.n, slot.recipe.window).size
    with graph.inserting_after(after):
        node = graph.placeholder(f"kept_{number}")
    node.meta["val"] = host.fake_like(graph, size, torch.uint8, slot.device)
    return node


def _erase_unused(graph, node):
    while node.op == "call_function" and not node.users:
        before = node.args[0]
        graph.erase_node(node)
        node = before


# ---- the digits ----


_storage_number = host.storage_number


class _Digits:
    """Digits of one weight by one recipe: `buffer`, and what the weight was when they were made."""

    __slots__ = (
        "recipe", "lock", "weight", "buffer", "version", "stream", "written", "address", "storage", "held", "dtype", "shape", "strides", "__weakref__",
    )  # fmt: skip

    def __init__(self, weight, recipe):
        self.recipe, self.lock = recipe, threading.Lock()
        self.buffer = self.version = self.stream = self.written = None
        self.address = self.storage = self.held = self.dtype = self.shape = self.strides = None
        mine = weakref.ref(self)
        self.weight = weakref.ref(weight, lambda _: _release(mine()))

    def write(self, weight, version):
        """Make them anew, unless another thread has, and return them. `version` is the count of changes, None
        where nobody counts."""
        with self.lock:
            if version is not None and self.describes(weight, version):
                self.follow(self.buffer)
                return self.buffer
            self.version = None  # whatever happens now
            self.buffer = made = _made(weight, self.recipe, self.buffer)
            storage = weight.untyped_storage()
            self.address, self.storage, self.held = weight.data_ptr(), host.storage_number(storage), host.hold_number(storage)
            self.dtype, self.shape, self.strides = weight.dtype, weight.shape, weight.stride()
            if made.is_cuda:
                self.stream, self.written = host.raw_stream(made.device.index), torch.cuda.current_stream(made.device).record_event()
            self.version = version
            return made

    def describes(self, weight, version):
        """Whether they are a weight's whose count of changes is `version`. Dynamo guards types and sizes, but 2.11
        not always strides, and other graphs may have made them."""
        return (
            version == self.version and weight.data_ptr() == self.address and _storage_number(weight.untyped_storage()) == self.storage
            and weight.stride() == self.strides and weight.shape == self.shape and weight.dtype is self.dtype
        )  # fmt: skip

    def follow(self, buffer):
        """Let the current stream wait for another, on which they were made, and their memory not be given away
        before it is done."""
        written = self.written
        if written is not None:
            stream = torch.cuda.current_stream(buffer.device)
            stream.wait_event(written)
            buffer.record_stream(stream)


def _release(digits):
    if digits is not None:
        digits.version = digits.buffer = digits.held = None


def _made(weight, recipe, buffer=None):
    """Digits of a weight, in `buffer` if there is one. The modes of whoever calls see nothing of it."""
    with host.without_modes(), torch.inference_mode(False), torch.no_grad():
        if buffer is not None and buffer.device != weight.device:
            buffer = None
        return kept.weight_digits(recipe.operand(weight), recipe.window, buffer)


_DIGITS = weakref.WeakValueDictionary()  # by the identity of a weight, and recipe
_SHARING = threading.Lock()


def _digits_of(weight, recipe):
    """The digits that all graphs share."""
    with _SHARING:
        found = _DIGITS.get((id(weight), recipe))
        if found is None or found.weight() is not weight:
            found = _DIGITS[id(weight), recipe] = _Digits(weight, recipe)
        return found


def weights_changed(*, free=False):
    """Tell that weights may have changed where nobody can see it, so that kept digits are made anew.

    For writes that autograd does not count: through `parameter.data` or another tensor of the same memory, by
    NCCL, by a CUDA graph of your own, by kernels of your own or of an optimizer from elsewhere. PyTorch's
    optimizers, the fused ones too, `copy_`, `load_state_dict` and other operators are noticed without it.
    Digits stay in memory, at their addresses, unless `free`: then they are given back, and CUDA graphs that
    read them are recorded anew.
    """
    with _SHARING:
        every = list(_DIGITS.values())
    for digits in every:
        with digits.lock:
            digits.version = None
            if free:
                digits.buffer = digits.written = digits.stream = None


class KeptWeights:
    """The further inputs of one compiled graph, `slots`."""

    def __init__(self, slots):
        self._slots = [(slot.index, slot.recipe, slot.device.index, {}) for slot in slots]
        self._devices = sorted({slot.device.index for slot in slots if slot.device.type == "cuda"})
        host.count_fused_updates()

    def __len__(self):
        return len(self._slots)

    def around(self, compiled):
        """`compiled`, a function of a list of inputs, as one of the inputs that the user knows."""

        def run(inputs):
            inputs.extend(self.digits(inputs))
            return compiled(inputs)

        run._boxed_call = True
        return run

    def digits(self, inputs):
        """Of each slot, digits of what its input holds now."""
        if self._devices and torch.cuda.is_current_stream_capturing():
            # The graph's owner replays it without a word: it makes the digits itself, each time.
            return [_made(inputs[index], recipe) for index, recipe, _, _ in self._slots]
        streams = {index: host.raw_stream(index) for index in self._devices}
        found = []
        for index, recipe, device, known in self._slots:
            weight = inputs[index]
            digits = known.get(id(weight))
            if digits is None or digits.weight() is not weight:
                digits = self._meet(weight, recipe, known)
            try:
                version = weight._version
            except RuntimeError:  # nobody counts the changes of a tensor made in inference mode
                version = None
            buffer = digits.buffer
            if version is None or buffer is None or not digits.describes(weight, version):
                buffer = digits.write(weight, version)
            elif digits.stream != streams.get(device):
                digits.follow(buffer)
            found.append(buffer)
        return found

    @staticmethod
    def _meet(weight, recipe, known):
        for key in [key for key, digits in list(known.items()) if digits.weight() is None]:
            known.pop(key, None)
        digits = known[id(weight)] = _digits_of(weight, recipe)
        return digits



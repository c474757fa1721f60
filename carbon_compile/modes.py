"""The eager front end: the compiler's rules, applied call by call instead of to a graph.

`EagerComposites` sees functions above autocast and autograd and puts carbon's composites in their
place; `EagerRules` sees the operators below autograd, forward and backward, and runs each as its rule
says. Both read the tables that the compiler reads (lowering/registry.py), so eager and compiled bits
are the same bits. What has no rule is refused at the user's line.

PyTorch's threads of autograd take the modes of the thread that started a backward pass with them.
"""

import contextlib
import functools
import sys
import types
from dataclasses import replace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import dynamo, escapes, host
from .diagnostics import Diagnostic, Refused, Report
from .judge import dtype_misfit, refusal_code
from .location import user_frame
from .lowering import composites, partial, policy, registry
from .lowering import random as draws
from .runlog import LOG
from .verify import is_carbon

# Collectives that move elements, or wait.
_MOVES = "broadcast_ allgather_ _allgather_base_ allgather_coalesced_ alltoall_ alltoall_base_ gather_ scatter_ send recv_ recv_any_source_ barrier monitored_barrier_".split()

# What graphs don't hold: storages, memory and zeros, no element is computed.
BOOKKEEPING = """
zero_.default _has_compatible_shallow_copy_type.default
set_.source_Storage_storage_offset set_.source_Storage set_.source_Tensor_storage_offset set_.source_Tensor set_.default
detach_.default as_strided_.default squeeze_.default squeeze_.dim squeeze_.dims unsqueeze_.default t_.default transpose_.default
swapaxes_.default swapdims_.default lift.default is_same_size.default is_pinned.default _pin_memory.default record_stream.default
_is_all_true.default _is_any_true.default is_set_to.default _debug_has_internal_overlap.default _efficientzerotensor.default
_cudnn_rnn_flatten_weight.default _reshape_copy.default _reshape_alias_copy.default _lazy_clone.default _has_same_storage_numel.default _shape_as_tensor.default
"""
_KEPT = {op for op in (registry.overload(f"aten.{name}") for name in BOOKKEEPING.split()) if op is not None}

_COPIES = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default, torch.ops.aten.cat.default, torch.ops.aten.stack.default}
_OVERWRITES = {torch.ops.aten.copy_.default, torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor}
_RESIZE = torch.ops.aten.resize_.default
_FRESH = {
    op
    for name in "empty.memory_format empty_like.default new_empty.default empty_strided.default new_empty_strided.default empty_permuted.default resize_.default".split()
    if (op := registry.overload(f"aten.{name}")) is not None
}

# What only looks at tensors, or copies them whole: nothing that is computed there comes back.
_LOOKS = {
    f
    for name in ("__repr__", "__format__", "__deepcopy__", "__reduce_ex__", "__dir__", "storage", "untyped_storage")
    if (f := getattr(torch.Tensor, name, None)) is not None
}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BACKWARD = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
# What PyTorch's own Python writes with other operators, above autograd, wherever it traces for a compiler.
_UNROLLED = composites.resolve_all(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
    "upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d softshrink hardshrink "
    "multi_margin_loss multilabel_margin_loss native_batch_norm"
)
_ACCESSOR = type(torch.Tensor.shape.__get__)
_GRADIENT = torch.Tensor.grad.__get__
_FUNCTIONAL_MODULES = ("torch.nn.functional", "torch.functional")


class Session:
    """What is in force while eager code keeps the contract: options, and whether it still does.

    Threads that were started meanwhile keep their modes when it ends; `on` tells these to stand aside.
    """

    def __init__(self, options):
        self.on = True
        self._choose(options)

    def _choose(self, options):
        self.options, self.findings = options, options.refusals()
        self._policies, self._decided = {}, {}

    @contextlib.contextmanager
    def using(self, options):
        """Other options for a while."""
        before = self.options
        self._choose(options)
        try:
            yield
        finally:
            self._choose(before)

    def check_innermost(self):
        """RuntimeError where a mode was entered after this session's and not left."""
        mode = host.innermost_modes()
        if not (isinstance(mode[0], EagerComposites) and isinstance(mode[1], EagerRules)):
            raise RuntimeError("another mode was entered after carbon_compile.enable(): leave that one first")

    def policy(self):
        """The policy of this moment: matmul precision, options, and the autocast around."""
        key = (policy.matmul_precision(), host.autocast_dtype())
        found = self._policies.get(key)
        if found is None:
            found = self._policies[key] = self.options.policy().with_autocast(key[1])
        return found

    def refuse(self, code, detail, op, backward=False):
        """Raise Refused with the user's line, or return where the user allowed it."""
        place, called_from = user_frame(dynamo.python_stack(sys._getframe()))
        file, line, source = place or (None, None, "")
        direction = "backward" if backward else "forward"
        found = Diagnostic(code, detail, op, file, line, source, direction=direction, called_from=called_from)
        known = replace(found, detail="")
        if known in self._decided:
            return
        report = Report([found], self.findings)
        if report.refused:
            raise Refused(report)
        self._decided[known] = True
        escapes.announce(report)
        LOG.note(report)


# --- above autograd ----------------------------------------------------------------------------------


class EagerComposites(TorchFunctionMode):
    """Runs carbon's composites in place of functions, after the casts of the one autocast list."""

    def __init__(self, session):
        super().__init__()
        self.session = session
        self.entered = set()

    def __torch_function__(self, function, types_, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.session.on:
            return function(*args, **kwargs)
        if type(function) is _ACCESSOR:
            result = function(*args, **kwargs)
            if function == _GRADIENT and isinstance(args[0], torch.nn.Parameter):
                partial.is_gradient(result)
            return result
        if function in _LOOKS and type(args[0]) in _PLAIN:
            with host.without_modes():
                return function(*args, **kwargs)
        if function in _BACKWARD:
            return self._backward(function, args, kwargs)
        if function is torch.addcdiv and len(args) == 3 and kwargs.keys() == {"value"}:
            function, args, kwargs = _addcdiv, (*args, kwargs["value"]), {}
        if function in _UNROLLED:
            with host.unrolling():
                return self._run(function, args, kwargs)
        return self._run(function, args, kwargs)

    def _run(self, function, args, kwargs):
        current = self.session.policy()
        replacement = registry.COMPOSITES.get(function)
        if replacement is None and self._chooses(function):
            return self._body(function, args, kwargs)
        if not current.autocast and replacement is None:
            return function(*args, **kwargs)
        with host.autocast_ignored():
            if current.autocast:
                args, kwargs = composites.cast_arguments(current, function, args, kwargs)
            if replacement is not None:
                done, result = self._composite(function, replacement, current, args, kwargs)
                if done:
                    return result
            return function(*args, **kwargs)

    def _composite(self, function, replacement, current, args, kwargs):
        for found in escapes.wrappers():  # its reducer is C++ that no mode sees
            self.session.refuse(found.code, "", found.op)
        out = kwargs.get("out")
        if "out" in kwargs:
            kwargs = {k: v for k, v in kwargs.items() if k != "out"}
        try:
            # Arguments are cast once; layers that are cut have a cast list of their own.
            with policy.using(current), composites.Composites(current.with_autocast(None)):
                result = replacement(*args, **kwargs)
        except registry.Refusal as refusal:
            self.session.refuse(refusal.code, refusal.reason, composites.resolve_name(function))
            return False, None
        return True, result if out is None else _into(out, result, args)

    def _chooses(self, function):
        return isinstance(function, types.FunctionType) and function.__module__ in _FUNCTIONAL_MODULES and function not in self.entered

    def _body(self, function, args, kwargs):
        """A function that picks among others (F.max_pool2d, torch.unique) is met again from them."""
        self.entered.add(function)
        try:
            with self:
                return composites.body(function)(*args, **kwargs)
        finally:
            self.entered.discard(function)

    def _backward(self, function, args, kwargs):
        """Gradients follow their forward pass, whatever autocast surrounds them."""
        roots = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        hooks = [r.grad_fn.register_prehook(self._check_thread) for r in roots if isinstance(r, torch.Tensor) and r.is_cuda and r.grad_fn is not None]
        try:
            with host.autocast_ignored(), self:  # checkpoints are recomputed, and users' functions run, meanwhile
                result = composites.body(function)(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        if function is torch.autograd.grad:
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            for x, gradient in zip([inputs] if isinstance(inputs, torch.Tensor) else inputs, result, strict=False):
                if isinstance(x, torch.nn.Parameter):
                    partial.is_gradient(gradient)
        return result

    def _check_thread(self, gradients):
        """A GPU's gradients are computed in a thread of autograd's own: fail if it lost the modes."""
        if self.session.on and host.dispatch_mode(EagerRules) is None:
            raise Refused(Report([Diagnostic("CB607", "autograd's thread runs outside carbon", "the backward pass", direction="backward")]))


def _addcdiv(x, a, b, value):
    """As Dynamo writes it down before any backend sees it, which decides the order of its derivative."""
    return torch.add(x, torch.mul(torch.div(a, b), value))


def _allclose(a, b, *rest, **options):
    return bool(torch.isclose(a, b, *rest, **options).all())


def _into(out, result, args):
    """What PyTorch does with `out=`: takes the result's shape, and no gradient."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in [out, *composites.floats_of(args)]):
        raise RuntimeError("functions with out=... arguments don't support automatic differentiation, but one of the arguments requires grad.")
    with torch.no_grad():
        _write(out, result.detach())
    return out


# --- below autograd ----------------------------------------------------------------------------------


class Rules(TorchDispatchMode):
    """Runs every operator as its rule says; raises registry.Refusal where there is none.

    generator: where random keys come from; None is PyTorch's default CPU generator.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls):
        """Whether PyTorch wraps `__torch_dispatch__` to hide it from Dynamo, which never meets it."""
        return False

    def __init__(self, generator=None):
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(self, op, types_, args=(), kwargs=None):
        if any(host.unwraps_itself(kind) for kind in types_):
            return NotImplemented  # a DTensor runs the operator on its parts, which come back here
        return plan(op)(self, args, kwargs or {})

    def expanding(self, generator):
        """The mode under which a rule's own operators run."""
        return self if generator is None else Rules(generator)


class EagerRules(Rules):
    """The outermost `Rules`: refuses at the user's line, or runs what the user allowed."""

    def __init__(self, session):
        super().__init__()
        self.session = session
        self.inside = Rules()

    def __torch_dispatch__(self, op, types_, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(host.unwraps_itself(kind) for kind in types_):
            return NotImplemented
        with host.no_functions():
            if not self.session.on:
                return op(*args, **kwargs)
            LOG.eager += 1
            try:
                return plan(op)(self, args, kwargs)
            except registry.Refusal as refusal:
                self.session.refuse(refusal.code, refusal.reason, str(op).removesuffix(".default"), host.in_backward())
                return op(*args, **kwargs)

    def expanding(self, generator):
        return self.inside if generator is None else Rules(generator)


def computes_nothing(op):
    """A custom operator without tensors, in or out: an extension that asks for its library's version."""
    values = [*op._schema.arguments, *op._schema.returns] if isinstance(op, torch._ops.OpOverload) else [None]
    return op.namespace not in ("aten", "prims") and all(v is not None and "Tensor" not in str(v.type) for v in values)


@functools.cache
def plan(op):
    """How to run an operator: a function of (mode, arguments, keywords)."""
    if op is draws.KEY:
        return _key
    if op is torch.ops.aten.allclose.default:
        return functools.partial(_by, _allclose)
    if op in _FRESH:
        return functools.partial(_filled, op)
    if str(op) == "carbon.mm.default":
        return functools.partial(_product, op)
    if op in _COPIES:
        return functools.partial(_copied, _plan(op))
    if op in _OVERWRITES:
        return functools.partial(_overwritten, _plan(op))
    return _plan(op)


def _plan(op):
    if op in _KEPT or op in registry.TEMPLATES or op.namespace == "profiler" or _moves_over_ranks(op):
        return lambda mode, args, kwargs: op(*args, **kwargs)
    rule = registry.load().get(op)
    if rule is None and (is_carbon(op) or computes_nothing(op)):
        return lambda mode, args, kwargs: op(*args, **kwargs)
    if rule is None and isinstance(op, torch._ops.OpOverload):
        functional = functional_form(op)
        rule = registry.RULES.get(functional)
        if rule is None and op._can_decompose():
            return functools.partial(_by, op.decompose)
        if rule is not None and rule.verdict != "refuse":
            return functools.partial(_mutating, op, functional, rule)
    if rule is None or rule.verdict == "refuse":
        return functools.partial(_refused, op, rule)
    return functools.partial(_kept if rule.function is None else _ruled, op, rule)


def _key(mode, args, kwargs):
    if torch.device(kwargs["device"]).type == "meta":
        return torch.empty(2, dtype=torch.int64, device="meta")
    return draws.draw_keys(1, generator=mode.generator, **kwargs)[0]


def _product(op, mode, args, kwargs):
    result = op(*args, **kwargs)
    if args[2] is None and args[4] == "weight":
        partial.note(result)
    return result


def _copied(plan, mode, args, kwargs):
    result = plan(mode, args, kwargs)
    partial.note_copy(result, args[0] if isinstance(args[0], (list, tuple)) else args[:1])
    return result


def _overwritten(plan, mode, args, kwargs):
    result = plan(mode, args, kwargs)
    partial.overwritten(*args[:2])
    return result


def _filled(op, mode, args, kwargs):
    """Memory that nothing has written yet reads as NaN, or as the largest integer: the same on every run."""
    old = args[0].numel() if op is _RESIZE else 0
    result = op(*args, **kwargs)
    if result.numel() > old and result.dtype in _TYPES and result.layout is torch.strided and not result.is_meta:
        fresh = result if old == 0 else result.as_strided((result.numel() - old,), (1,), result.storage_offset() + old)
        fresh.fill_(float("nan") if result.is_floating_point() else True if result.dtype is torch.bool else torch.iinfo(result.dtype).max)
    return result


def _refused(op, rule, mode, args, kwargs):
    if _on_meta(args, kwargs):
        return op(*args, **kwargs)
    if op.namespace == "c10d":
        raise registry.Refusal("CB501", "")
    call = _Call(op, args, kwargs)
    raise registry.Refusal(refusal_code(call, rule.code if rule else "CB101"), rule.reason if rule else "")


def _kept(op, rule, mode, args, kwargs):
    result = op(*args, **kwargs)
    _check_types(op, rule, args, kwargs, result)
    return result


def _ruled(op, rule, mode, args, kwargs):
    if _on_meta(args, kwargs):
        return op(*args, **kwargs)
    _check_types(op, rule, args, kwargs, None)
    result = _expanded(rule, mode, args, kwargs)
    if result is NotImplemented:
        _check_exact(op, rule, args, kwargs)
        return op(*args, **kwargs)
    return _detached(op, result, args)


def _expanded(rule, mode, args, kwargs):
    """The rule's result, its own operators under rules as well."""
    generator = kwargs.get("generator") or mode.generator
    if generator is not None and generator.device.type == "cpu":
        kwargs = {k: v for k, v in kwargs.items() if k != "generator"}
    else:
        generator = None
    with host.under(mode.expanding(generator)):
        return rule.function(*args, **kwargs)


def _moves_over_ranks(op):
    return op.namespace == "c10d" and op._opname in _MOVES


def _by(function, mode, args, kwargs):
    with host.under(mode.expanding(None)):
        return function(*args, **kwargs)


def _mutating(op, functional, rule, mode, args, kwargs):
    """An in-place or out= overload: its functional form, written to where it belongs."""
    if _on_meta(args, kwargs):
        return op(*args, **kwargs)
    schema = op._schema
    outs = {a.name for a in schema.arguments if a.is_out}
    inputs = {k: v for k, v in kwargs.items() if k not in outs}
    if outs and isinstance(out := kwargs[min(outs)], torch.Tensor):
        wanted = {a.name for a in functional._schema.arguments} - {a.name for a in schema.arguments}
        inputs |= {k: getattr(out, k) for k in ("dtype", "device") if k in wanted}
    _check_types(functional, rule, args, inputs, None)
    result = NotImplemented if rule.function is None else _expanded(rule, mode, args, inputs | _defaults(op, functional, args, inputs))
    if result is NotImplemented:
        if rule.function is not None:
            _check_exact(functional, rule, args, inputs)
        return op(*args, **kwargs)
    named = {a.name: v for a, v in zip(schema.arguments, args)} | kwargs  # noqa: B905  (defaults are left out)
    targets = [named[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    _write(targets if len(targets) > 1 else targets[0], result)
    if not schema.returns:
        return None
    return targets[0] if len(schema.returns) == 1 else tuple(targets)


def _write(target, result):
    """Copy a result, or a list of results, into the tensors that are to hold it."""
    if isinstance(target, (list, tuple)):
        for t, r in zip(target, result, strict=True):
            _write(t, r)
        return
    if target is None or target is result:
        return
    if not torch.can_cast(result.dtype, target.dtype):
        raise RuntimeError(f"result type {_spoken(result.dtype)} can't be cast to the desired output type {_spoken(target.dtype)}")
    with host.without_modes():
        if target.shape != result.shape:
            target.resize_(result.shape)
        target.copy_(result)
    partial.note_copy(target, [result])


def _spoken(dtype):
    return {"float32": "Float", "float64": "Double", "float16": "Half", "int64": "Long", "int32": "Int"}.get(str(dtype)[6:], str(dtype)[6:])


def _defaults(op, functional, args, kwargs):
    """Arguments that the caller left out, and that only the functional form insists on."""
    needed = {a.name for a in functional._schema.arguments if not a.has_default_value()}
    return {a.name: a.default_value for a in op._schema.arguments[len(args) :] if a.name in needed and a.name not in kwargs and not a.is_out}


@functools.cache
def functional_form(op):
    """The functional overload of an in-place or out= overload, or None."""
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.is_mutable or op.namespace != "aten":
        return None
    wanted = [str(a.type) for a in op._schema.arguments if not a.is_out]
    outs = len(wanted) < len(op._schema.arguments)
    base = op._schema.name.removeprefix("aten::")
    plain = base.rstrip("_") if not base.startswith("__") else base.replace("__i", "__", 1)
    for name in (plain, f"{plain}_functional"):
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            candidate = getattr(packet, overload)
            if not candidate._schema.is_mutable and _takes(candidate, wanted, outs):
                return candidate
    return None


_TYPED = ("dtype", "layout", "device", "pin_memory")  # what an `out` tensor says instead


def _takes(candidate, wanted, outs):
    arguments = candidate._schema.arguments
    return [str(a.type) for a in arguments if not (outs and a.name in _TYPED)] == wanted or [str(a.type) for a in arguments] == wanted


# --- what a call may do --------------------------------------------------------------------------------

_TYPES = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64}
_DEVICES = ("cpu", "cuda", "meta")


def _check_types(op, rule, args, kwargs, result):
    """Refuse types and devices that the contract doesn't know, unless the call only moves elements."""
    for value in (result, *args):
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                raise registry.Refusal("CB108", str(value.layout).removeprefix("torch."))
            if value.dtype not in _TYPES:
                misfit = dtype_misfit(_Call(op, args, kwargs, result), rule.verdict)
                if misfit is not None:
                    raise registry.Refusal(*misfit)
            elif value.device.type not in _DEVICES:
                raise registry.Refusal("CB304", f"device {value.device.type!r}")
    dtype = kwargs.get("dtype")
    if dtype is not None and dtype not in _TYPES and any(t.dtype is not dtype for t in _held(args)):
        raise registry.Refusal("CB204" if dtype.is_complex else "CB205" if dtype.is_floating_point else "CB208", str(dtype).removeprefix("torch."))


def _check_exact(op, rule, args, kwargs):
    """A call that its rule leaves alone holds integers only, or moves floats of one type."""
    floats = {t.dtype for t in _held((args, kwargs)) if t.is_floating_point() or t.is_complex()}
    if floats and not rule.moves:
        raise registry.Refusal("CB901", "")


def _on_meta(args, kwargs):
    """Tensors without elements have no bits to keep."""
    for value in args:
        if isinstance(value, torch.Tensor):
            return value.is_meta
    return "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "meta"


def _detached(op, result, args):
    """The result, copied where a rule handed one of its arguments back: PyTorch promises new memory."""
    if isinstance(result, torch.Tensor):
        if op._schema.returns and op._schema.returns[0].alias_info is not None:
            return result
        memory = result.untyped_storage()._cdata
        for value in args:
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == memory:
                return result.clone()
        return result
    if isinstance(result, (list, tuple)):
        return [_detached(op, r, args) for r in result] if isinstance(result, list) else tuple(_detached(op, r, args) for r in result)
    return result


def _held(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [t for item in tree for t in _held(item)]


class _Held:
    """A tensor as FX shows one: what judging reads."""

    def __init__(self, value):
        self.meta = {"val": value}


class _Call:
    """An operator's call in the shape of an FX node, for the judgements that the compiler makes."""

    op = "call_function"

    def __init__(self, op, args, kwargs, result=None):
        self.target = op
        self.all_input_nodes = [_Held(t) for t in _held((args, kwargs))]
        self.args, self.kwargs = tuple(self.all_input_nodes), {}
        self.meta = {"val": result}


# --- leaving and entering ----------------------------------------------------------------------------------


class Modes:
    """Both modes of a session, on the stacks of one thread."""

    def __init__(self, session):
        self.functions, self.rules = EagerComposites(session), EagerRules(session)

    def __enter__(self):
        self.rules.__enter__()
        self.functions.__enter__()
        return self

    def __exit__(self, *error):
        self.functions.__exit__(*error)
        self.rules.__exit__(*error)


def in_force():
    """Whether eager code of this thread keeps the contract."""
    mode = host.dispatch_mode(EagerRules)
    return mode is not None and mode.session.on


def suspended():
    """Compiled code, and its compilation, run without the modes: the compiler applies the rules there."""
    return host.without(EagerComposites, EagerRules)

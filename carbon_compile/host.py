"""Everything that touches private PyTorch interfaces, each with the versions it was checked on.

Checked on 2.11.0 and 2.13.0 unless a line says otherwise.
"""

import contextlib
import dataclasses
import functools
import gc
import logging
import operator
import os
import re
import sys
import threading
import types
import weakref
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch.fx.node import _get_qualified_name as qualified_name  # noqa: F401


def compile_fx(gm, inputs, *, inner, decompositions, config, recomputable=()):
    """Inductor's whole pipeline with our inner compiler, decompositions and config.

    `inner(gm, inputs, **kwargs)` is called once a graph; 2.13 passes more keywords than 2.11. Results of
    the operators `recomputable` need not be kept for the backward graph.
    """
    from torch._inductor.compile_fx import compile_fx as compile_graph

    with _recomputed(recomputable), _rare_collections(), _fake_results_are_remembered():
        return compile_graph(gm, inputs, inner_compile=inner, decompositions=decompositions, config_patches=config)


@contextlib.contextmanager
def _recomputed(operators):
    """Let the partition into forward and backward compute these operators again and count on their fusion.

    It knows ATen's cheap operators by a list. What is not on it is always kept: a GELU kept four results of
    the size of its input, a cross-entropy its exponentials in binary32.
    """
    from torch._functorch import partitioners

    usual = partitioners.get_default_op_list
    cheap = {*operators, torch.ops.aten.detach}  # Inductor's decompositions leave no detach, so the list doesn't need it
    # A constant is one node for the whole graph. As a fusible operation it would forbid all its users but the
    # first to be computed again, since they lie far apart; as none it would be kept, and read from memory by
    # every kernel. As a view it is made again wherever it is wanted.
    constants = {torch.ops.aten.full}

    def get_default_op_list():
        found = usual()
        return dataclasses.replace(
            found,
            fusible_ops=(found.fusible_ops | cheap) - constants,
            recomputable_ops=found.recomputable_ops | cheap,
            view_ops=found.view_ops | constants,
        )

    with mock.patch.object(partitioners, "get_default_op_list", get_default_op_list):
        yield


@contextlib.contextmanager
def _fake_results_are_remembered():
    """Let PyTorch's cache of fake results keep those of carbon's operators, as it keeps ATen's. It can't know
    that theirs, too, depend on their arguments' metadata alone."""
    from torch._subclasses import fake_tensor

    check = fake_tensor.FakeTensorMode._validate_cache_key

    def _validate_cache_key(mode, function, args, kwargs):
        try:
            check(mode, function, args, kwargs)
        except fake_tensor._BypassDispatchCache as bypass:
            if bypass.reason != "non-builtin" or function.namespace != "carbon":
                raise

    with mock.patch.object(fake_tensor.FakeTensorMode, "_validate_cache_key", _validate_cache_key):
        yield


def compile_fx_inner(gm, inputs, **kwargs):
    from torch._inductor.compile_fx import compile_fx_inner as compile_inner

    with _vector_bitcasts(), _loops_wait_for_stores(), _rows_stay_in_registers(), _rows_leave_caches(), _fast_compilation():
        return compile_inner(gm, inputs, **kwargs)


@contextlib.contextmanager
def _fast_compilation():
    """What costs Inductor much time on graphs of many small operations, done faster, to the same code."""
    with contextlib.ExitStack() as stack:
        for faster in (
            _rare_collections,
            _one_dtype_handler,
            _lean_loop_bodies,
            _equal_ranges_need_no_algebra,
            _known_sizes_need_no_algebra,
            _known_strides_need_no_algebra,
            _no_symbols_where_sizes_are_known,
            _sets_of_dictionaries,
            _dependencies_keep_their_hash,
            _no_second_propagation,
            _equal_kernels_are_written_once,
        ):
            stack.enter_context(faster())
        yield


_collecting = {"lock": threading.Lock(), "compilations": 0, "usual": None}


@contextlib.contextmanager
def _rare_collections():
    """Python looks for cycles of garbage after each 100000 new objects, not after 700. A compilation makes
    millions that live, and went through them for a tenth of its time."""
    with _collecting["lock"]:
        _collecting["compilations"] += 1
        if _collecting["compilations"] == 1:
            _collecting["usual"] = usual = gc.get_threshold()
            if usual[0]:  # 0: no collections at all
                gc.set_threshold(max(usual[0], 100_000), *usual[1:])
    try:
        yield
    finally:
        with _collecting["lock"]:
            _collecting["compilations"] -= 1
            if _collecting["compilations"] == 0:
                gc.set_threshold(*_collecting["usual"])


@contextlib.contextmanager
def _lean_loop_bodies():
    """Run the inside of a loop without torch.fx's interpreter, whose provenance and progress bar for every
    one of its operations cost as much as the operations."""
    from torch._inductor.loop_body import InterpreterShim
    from torch._inductor.virtualized import V

    def run(interpreter, *inputs, initial_env=None):
        inputs = iter(inputs)
        values = interpreter.env = {} if initial_env is None else initial_env

        def value(argument):
            if isinstance(argument, torch.fx.Node):
                return values[argument]
            if isinstance(argument, (tuple, list, dict, slice)):
                return torch.fx.node.map_arg(argument, values.__getitem__)
            return argument

        with V.set_interpreter_handler(interpreter):
            for node in interpreter.graph.nodes:
                if node in values:
                    continue
                interpreter.current_node = node
                if node.op == "placeholder":
                    values[node] = next(inputs)
                    continue
                if node.op == "get_attr":
                    values[node] = interpreter.submodules[node.target]
                    continue
                arguments = [value(argument) for argument in node.args]
                if node.op == "output":
                    values[node] = arguments[0]
                    return arguments[0]
                if node.op == "call_method":
                    function = getattr(arguments.pop(0), node.target)
                else:
                    function = interpreter.submodules[node.target] if node.op == "call_module" else node.target
                values[node] = function(*arguments, **{name: value(argument) for name, argument in node.kwargs.items()})

    with mock.patch.object(InterpreterShim, "run", run):
        yield


@contextlib.contextmanager
def _equal_ranges_need_no_algebra():
    """The intersection of equal ranges is that range: Inductor asks for it whenever an operation recurs in a
    kernel, and SymPy takes its time."""
    from torch.utils._sympy.value_ranges import ValueRanges

    intersection = ValueRanges.tighten

    def tighten(one, other):
        return one if one.lower is other.lower and one.upper is other.upper else intersection(one, other)

    with mock.patch.object(ValueRanges, "tighten", tighten):
        yield


@contextlib.contextmanager
def _known_sizes_need_no_algebra():
    """Two integers compare as such, without an expression of SymPy's."""
    import sympy
    from torch._inductor.sizevars import SizeVarAllocator

    def faster(name, compare):
        algebra = getattr(SizeVarAllocator, name)

        def known(sizevars, left, right):
            if isinstance(left, (int, sympy.Integer)) and isinstance(right, (int, sympy.Integer)):
                return compare(int(left), int(right))
            return algebra(sizevars, left, right)

        return mock.patch.object(SizeVarAllocator, name, known)

    with contextlib.ExitStack() as stack:
        for name, compare in (("equals", operator.eq), ("leq", operator.le), ("geq", operator.ge), ("lt", operator.lt), ("gt", operator.gt)):
            stack.enter_context(faster(f"statically_known_{name}", compare))
        yield


@contextlib.contextmanager
def _known_strides_need_no_algebra():
    """Where an index holds a variable as a multiple alone, that multiple is the stride. To learn it, kernels for
    CPUs had SymPy simplify every index twice: 3 of the 47 s that the compiled functions of a test of pooling took."""
    import sympy
    from torch._inductor.codegen import cpp

    algebra = cpp.stride_at_vec_range

    def stride_at_vec_range(index, var, vec_length=None):
        stride = sympy.S.Zero
        for term in sympy.Add.make_args(index):
            if term == var:
                stride = sympy.S.One
            elif isinstance(term, sympy.Mul) and len(term.args) == 2 and isinstance(term.args[0], sympy.Integer) and term.args[1] == var:
                stride = term.args[0]
            elif term.has(var):
                return algebra(index, var, vec_length)
        return stride

    with mock.patch.object(cpp, "stride_at_vec_range", stride_at_vec_range):
        yield


@contextlib.contextmanager
def _sets_of_dictionaries():
    """Union and intersection of ordered sets through the dictionaries that they are, in the same order."""
    from torch.utils._ordered_set import OrderedSet

    either, both = OrderedSet.__or__, OrderedSet.__and__

    def union(one, other):
        return OrderedSet._from_dict(one._dict | other._dict) if isinstance(other, OrderedSet) else either(one, other)

    def intersection(one, other):
        if not isinstance(other, OrderedSet):
            return both(one, other)
        shorter, longer = (one._dict, other._dict) if len(one._dict) < len(other._dict) else (other._dict, one._dict)
        return OrderedSet._from_dict({element: None for element in shorter if element in longer})

    with mock.patch.object(OrderedSet, "__or__", union), mock.patch.object(OrderedSet, "__and__", intersection):
        yield


@contextlib.contextmanager
def _dependencies_keep_their_hash():
    """Fusion asks thousands of times whether two kernels share a dependency; its hash is one of expressions."""
    from torch._inductor.dependencies import MemoryDep

    compute = MemoryDep.__hash__

    def kept(dependency):
        known = dependency.__dict__.get("_hash")
        if known is None:
            known = dependency.__dict__["_hash"] = compute(dependency)
        return known

    with mock.patch.object(MemoryDep, "__hash__", kept):
        yield


@contextlib.contextmanager
def _no_second_propagation():
    """Inductor computes every fake result anew. Those of a graph that we traced are there, and are right
    where its inputs have the layouts that it was traced with."""
    from torch._guards import detect_fake_mode
    from torch._inductor import compile_fx

    propagate = compile_fx.fake_tensor_prop

    def alike(value, traced):
        if not isinstance(value, torch.Tensor) or type(value) is not type(traced):
            return False
        layouts = [(t.dtype, t.device, tuple(t.shape), t.stride(), t.storage_offset()) for t in (value, traced)]
        return layouts[0] == layouts[1] and all(isinstance(n, int) for numbers in layouts[0][2:4] for n in numbers)

    def fake_tensor_prop(gm, example_inputs, force_allow_non_fake_inputs=False):
        mode = detect_fake_mode(example_inputs)
        inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        traced = all("val" in node.meta for node in gm.graph.nodes if node.op != "output")
        if mode is not None and traced and len(inputs) == len(example_inputs) and all(map(alike, example_inputs, (node.meta["val"] for node in inputs))):
            return mode
        return propagate(gm, example_inputs, force_allow_non_fake_inputs)

    with mock.patch.object(compile_fx, "fake_tensor_prop", fake_tensor_prop):
        yield


@contextlib.contextmanager
def _no_symbols_where_sizes_are_known():
    """In a graph without symbolic sizes, don't search every operation for them."""
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    search = Scheduler.get_graph_partition_symbol_inputs

    def symbols(scheduler, partition, input_nodes):
        return search(scheduler, partition, input_nodes) if V.graph.sizevars.shape_env.var_to_range else OrderedSet()

    with mock.patch.object(Scheduler, "get_graph_partition_symbol_inputs", symbols):
        yield


@contextlib.contextmanager
def _equal_kernels_are_written_once():
    """Reuse the source of a kernel that differs from an earlier one of its graph in the names of buffers only.

    The layers of a network are alike, and Inductor writes each one's kernels out in full before it finds
    the same text. All that the text depends on is in `_kernel_identity`; kernels that read anything else
    are written the usual way.
    """
    from torch._inductor.codegen.simd import SIMDScheduling
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.scheduler import SchedulerNode
    from torch._inductor.virtualized import V

    write_body, write_kernel = SIMDScheduling.codegen_node_schedule_with_kernel, TritonKernel.codegen_kernel
    written, reused, fresh = {}, weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()  # by identity; by kernel

    def codegen_node_schedule_with_kernel(scheduling, node_schedule, kernel):
        if type(kernel) is not TritonKernel:
            return write_body(scheduling, node_schedule, kernel)
        with V.set_kernel_handler(kernel):
            for node in node_schedule:
                if isinstance(node, SchedulerNode):
                    node.decide_inplace_update()
            names = _Names()
            identity = _kernel_identity(node_schedule, kernel, names)
            found = written.get(identity)
            if found is not None:
                found.restore(kernel, names)
                kernel.remove_kernel_local_buffers()
                reused[kernel] = found
                return
        if identity is not None:
            remove = kernel.remove_kernel_local_buffers

            def remember_and_remove():
                found = _Written.of(kernel, names)
                if found is not None:
                    fresh[kernel] = identity, found
                remove()

            kernel.remove_kernel_local_buffers = remember_and_remove
        with mock.patch.object(SchedulerNode, "decide_inplace_update", lambda node: None):  # it is decided
            write_body(scheduling, node_schedule, kernel)

    def codegen_kernel(kernel, name=None):
        found = reused.get(kernel) if name is None else None
        if found is not None:
            kernel.triton_meta, kernel.inductor_meta = found.meta
            return found.source
        source = write_kernel(kernel, name)
        if name is None and kernel in fresh:
            identity, found = fresh.pop(kernel)
            found.source, found.meta = source, (kernel.triton_meta, kernel.inductor_meta)
            written[identity] = found
        return source

    with (
        mock.patch.object(SIMDScheduling, "codegen_node_schedule_with_kernel", codegen_node_schedule_with_kernel),
        mock.patch.object(TritonKernel, "codegen_kernel", codegen_kernel),
    ):
        yield


class _Names(dict):
    """Numbers of buffers, in the order in which a kernel first names them."""

    def number(self, name):
        return self.setdefault(name, len(self))


@dataclasses.dataclass
class _Written:
    """What writing a kernel's body left in it, with buffers by number, and the source that it came to."""

    numbers: dict
    sets: dict
    counts: dict
    source: str = ""
    meta: tuple = ()

    # Of TritonKernel and its arguments: buffers by the names that they have within, sets of buffers, counts.
    _ARGUMENTS = ("input_buffers", "output_buffers")
    _SETS = ("store_buffer_names", "must_keep_buffers", "mutations")
    _COUNTS = ("num_load", "num_store", "num_reduction", "atomic_add_found", "min_elem_per_thread")

    @classmethod
    def of(cls, kernel, names):
        """None where the kernel has arguments that aren't buffers, or buffers that its identity doesn't name."""
        arguments = kernel.args
        if arguments.sizevars or arguments.workspace_args:
            return None
        try:
            numbers = {kind: [(names[name], inner) for name, inner in getattr(arguments, kind).items()] for kind in cls._ARGUMENTS}
            sets = {kind: [names[name] for name in getattr(kernel, kind)] for kind in cls._SETS}
        except KeyError:
            return None
        return cls(numbers, sets, {kind: getattr(kernel, kind) for kind in cls._COUNTS})

    def restore(self, kernel, names):
        outer = list(names)
        for kind, numbers in self.numbers.items():
            getattr(kernel.args, kind).update((outer[number], inner) for number, inner in numbers)
        for kind, numbers in self.sets.items():
            getattr(kernel, kind).update(outer[number] for number in numbers)
        for kind, count in self.counts.items():
            setattr(kernel, kind, count)


def _kernel_identity(node_schedule, kernel, names):
    """All that a kernel's source is made of, with buffers by number; None where it may be more than this knows.

    In place updates were decided before. `names` receives the buffers.
    """
    from torch._inductor import config
    from torch._inductor.scheduler import SchedulerNode
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    graph, scheduler = V.graph, V.graph.scheduler
    if graph.sizevars.shape_env.var_to_range or getattr(config.triton, "enable_pdl", False) or kernel.args.workspace_args:
        return None
    together = OrderedSet(node.get_name() for node in node_schedule if isinstance(node, SchedulerNode))
    parts = [kernel.numels, kernel.tiling_scores, kernel.persistent_reduction, kernel.cooperative_reduction, kernel.no_x_dim]
    parts += [vars(kernel.fixed_config) if kernel.fixed_config else None, kernel.features.numel, kernel.features.reduction_numel]
    text, algebra = [repr(parts), str(graph.get_current_device_or_throw())], []
    for node in node_schedule:
        if not isinstance(node, SchedulerNode):
            text.append(repr(node))  # a loop ends or begins
            continue
        if not _body_identity(node._body, names, text, algebra):
            return None
        data = getattr(node.node, "data", None)
        patches = getattr(node.node, "get_config_patches", dict)()
        text.append(f"{node._sizes} {node.group} {getattr(data, 'reduction_hint', None)} {patches}")
        for output in node.get_outputs():
            others = [names.number(name) for name in (*output.get_mutations(), *output.get_aliases())]
            removable = scheduler.can_buffer_be_removed_through_fusion(output.get_name(), together)
            text.append(f"{names.number(output.get_name())} {others} {removable}")
    for name in list(names):
        names.number(scheduler.mutation_real_name.get(name, name))
    for name in names:
        buffer = graph.try_get_buffer(name)
        if buffer is None or not buffer.has_tensor_output():
            return None
        layout = buffer.get_layout()
        kinds = [name in kind for kind in (graph.graph_inputs, graph.constants, graph.unaligned_buffers, graph.removed_buffers, graph.inplaced_to_remove)]
        real = names[scheduler.mutation_real_name.get(name, name)]
        text.append(f"{layout.dtype} {layout.device} {layout.size} {layout.stride} {layout.offset} {type(layout).__name__} {kinds} {real}")
    for outer, place in kernel.args.inplace_buffers.items():
        others = [names.get(name) for name in place.other_names]
        if outer not in names or None in others:
            return None
        text.append(f"{names[outer]} {place.inner_name} {others}")
    text.append(repr([names.get(name) for pair in kernel.inplace_update_buffers.items() for name in pair]))
    return graph, "\n".join(text), tuple(algebra)


def _body_identity(body, names, text, algebra):
    """Append the operations of a loop's body, its index expressions and ranges; False where it holds more."""
    from torch._inductor.virtualized import V

    if body.indirect_vars or body.has_partial_accumulate or set(body.submodules) != {"get_index", *body.subblocks}:
        return False
    algebra += [*body.iter_vars, None, *body.reduce_vars, None]
    for pair in (*body.var_ranges.items(), *body.indexing_exprs.items()):
        algebra += pair
    graph = V.graph

    def describe(value):
        if isinstance(value, torch.fx.Node):
            return f"%{position[value]}"
        if isinstance(value, str):
            buffer = value in graph.name_to_buffer or value in graph.graph_inputs or value in graph.constants
            return f"@{names.number(value)}" if buffer else repr(value)
        if isinstance(value, (tuple, list)):
            return f"({','.join(map(describe, value))})"
        if isinstance(value, dict):
            return f"{{{','.join(f'{k}:{describe(v)}' for k, v in value.items())}}}"
        return repr(value)

    for name, block in (("", body.root_block), *body.subblocks.items()):
        text.append(name)
        position = {}
        for node in block.graph.nodes:
            position[node] = len(position)
            text.append(f"{node.op} {node.target} {describe(node.args)} {describe(node.kwargs) if node.kwargs else ''}")
    return True


def quick_player(handler):
    """A faster way for one of Inductor's handlers to compute a Program of ours, to the same result, or None.

    It is `player(program, handler, inputs)`, and may return NotImplemented.
    """
    return _quick_players().get(type(handler))


@functools.cache
def _quick_players():
    from torch._inductor.dependencies import RecordLoadStore
    from torch._inductor.index_propagation import IndexPropagation
    from torch._inductor.ops_handler import OpCounterCSE

    return {RecordLoadStore: _play_for_dependencies, OpCounterCSE: _play_for_counting, IndexPropagation: _play_for_tracing}


def _play_for_dependencies(program, handler, inputs):
    """Only loads and stores count, and a program has none."""
    return "program"


def _play_for_counting(program, handler, inputs):
    """Operations count once each, as the text that they have."""
    from torch._inductor.ops_handler import MockHandler

    if type(handler.parent_handler) is not MockHandler or not all(isinstance(value, str) for value in inputs):
        return NotImplemented
    texts = program.__dict__.get("texts")
    if texts is None:
        texts = program.texts = []
        for name, operands, constants, keywords in program.calls:
            text = getattr(handler.parent_handler, name)(*["\0"] * len(operands), *constants, **keywords)
            texts.append(text.replace("%", "%%").replace("\0", "%s"))
        program.names = {name for name, *_ in program.calls}
    handler._used_ops.update(program.names)
    known, values = handler.var_names, list(inputs)
    for text, (_, operands, _, _) in zip(texts, program.calls, strict=True):
        text %= tuple([values[place] for place in operands])
        variable = known.get(text)
        if variable is None:
            variable = known[text] = f"tmp{handler.op_count}"
            handler.op_count += 1
        values.append(variable)
    return values[program.result]


def _play_for_tracing(program, handler, inputs):
    """Write the nodes of a loop's body. Constants are written where they are used, as Inductor does."""
    from torch._inductor.index_propagation import IndexPropVar, SymPyOps, TypedExpr, dtype_to_type
    from torch._inductor.loop_body import CaptureIndexing, CountOps

    counts = handler._inner
    if type(counts) is not CountOps or type(counts._inner) is not CaptureIndexing:
        return NotImplemented
    if not all(type(value) is IndexPropVar and not value.is_symbolic for value in inputs):
        return NotImplemented
    constants = program.__dict__.get("constants")
    if constants is None:
        constants = program.constants = {}
        for place, (name, operands, given, _) in enumerate(program.calls, program.inputs):
            if name == "constant":
                constants[place] = (dtype_to_type(given[1])(TypedExpr(*given).expr), given[1])
            elif all(operand in constants for operand in operands) and hasattr(SymPyOps, name):
                program.constants = None  # Inductor would compute it now
                break
        constants = program.constants
    if constants is None or program.result in constants:
        return NotImplemented
    tracer = counts._inner.tracer
    graph, operations, counted = tracer.graph, counts._inner._inner.node, counts._counts
    values = [getattr(value.value, "node", None) for value in inputs]
    if None in values:
        return NotImplemented

    def write(name, arguments, keywords):
        counted[name] += 1
        return graph.create_node("call_method", name, (operations, *arguments), keywords)

    for place, (name, operands, given, keywords) in enumerate(program.calls, program.inputs):
        if place in constants:
            values.append(None)
            continue
        arguments = [write("constant", constants[operand], {}) if operand in constants else values[operand] for operand in operands]
        values.append(write(name, (*arguments, *given), keywords))
    return IndexPropVar(tracer.proxy(values[program.result]))


@contextlib.contextmanager
def _loops_wait_for_stores():
    """A barrier behind each part of a looped reduction that may store.

    A later loop may read that memory again, and a thread then meets what another wrote: Triton chooses
    which thread holds an element by the widest access, so the loops differ where one of them stores a
    narrower type. So does the layer norm of float32 that ends in bfloat16: without the barrier a GPT-2 of
    width 256 gave other bits on an H200 (2.11.0) than on a CPU.
    """
    from torch._inductor.codegen.triton import TritonKernel

    body_of = TritonKernel.codegen_body

    @functools.wraps(body_of)
    def codegen_body(kernel):
        loops = any(tree.is_loop and tree.is_reduction and tree.numel != 1 for tree in kernel.range_trees)
        stores = bool(kernel.stores)
        body_of(kernel)
        if loops and stores:
            kernel.body.writeline("tl.debug_barrier()")

    with mock.patch.object(TritonKernel, "codegen_body", codegen_body):
        yield


# Of a row that a kernel holds in registers.
LONGEST_ROW = 4096


@contextlib.contextmanager
def _rows_stay_in_registers():
    """Rows that Inductor reads in a loop from 1024 elements are held in registers up to 4096.

    A sum of ours goes over its row twice, for the maximum and for the terms, where Inductor's own goes
    once: a loop would read memory twice.

    A thread gets 64 elements of a row: warps wait for one another at each of a layer norm's seven reductions,
    and each computes for itself what a row has one of. With elementary functions, and with more operands, it
    gets 16, since registers are short. 4096 x 4096 in bfloat16 took, with 64, 32 and 16 elements (H100, us):
    layer norm 31, 33, 35; softmax 64, 46, 42. A sum alone of 4-byte rows gets 32 (H200, float32, us: 22.8, with 64 23.8).

    The factors by which digits are made of a bfloat16 row are no further operand here: such a layer norm has the
    registers that it has without, and less than three quarters of the instructions that it has with 16 elements.

    What all rows share, a norm's weight and bias, is loaded where it is first used, and not before the first
    reduction: it would take two thirds of a layer norm's registers meanwhile, and of the rows that a
    multiprocessor has at work.
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codegen.triton import (
        FixedTritonConfig,
        IndexingOptions,
        TritonKernel,
        TritonSymbols,
    )
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V
    from torch.utils._sympy.symbol import symbol_is_type

    from .lowering.elementary import PROGRAMS, RESTRICTED

    persistent, kernel_kwargs = InductorChoices.should_use_persistent_reduction, InductorChoices.triton_kernel_kwargs
    load_buffer = TritonKernel.get_load_buffer

    def contiguous_rows(features):
        # Of masked rows, whose masks have other strides, some reductions have no hint: that doesn't make a loop better.
        hints = {features.reduction_hint(node) for node in features.reduction_nodes()}
        return ReductionHint.INNER in hints and hints <= {ReductionHint.INNER, ReductionHint.DEFAULT} and V.graph.sizevars.statically_known_leq(features.reduction_numel, LONGEST_ROW)

    def made_by(buffer, operator):
        made = V.graph.name_to_buffer.get(buffer)
        return made is not None and any(getattr(origin.target, "_opname", "") == operator for origin in made.get_origins())

    def should_use_persistent_reduction(features, cooperative_reduction):
        return persistent(features, cooperative_reduction) or contiguous_rows(features)

    def triton_kernel_kwargs(self, kernel_cls, features, groups, kwargs):
        kwargs = kernel_kwargs(self, kernel_cls, features, groups, kwargs)
        free = kernel_cls is TritonKernel and len(groups) == 1 and len(groups[0]) == 2 and not any(name.startswith("override") for name in kwargs)
        length = features.reduction_numel
        if not free or not length.is_Integer or length <= 1024 or not contiguous_rows(features):
            return kwargs
        block = 1 << (int(length) - 1).bit_length()
        nodes = features.scheduler_nodes()
        read = {dep.name for node in nodes for dep in node.read_writes.reads}
        written = {dep.name for node in nodes for dep in node.read_writes.writes}
        elementary = any(getattr(origin.target, "_opname", "") in {**PROGRAMS, **RESTRICTED} for node in nodes for origin in node.node.get_origins())
        narrowest = min(V.graph.get_dtype(name).itemsize for name in read | written)
        alone = narrowest >= 4 and all(node.is_reduction() or node.group[1][0] == features.numel for node in nodes)
        operands = [name for name in read - written if not made_by(name, "weight_factors")]
        most = block // (512 if elementary or len(operands) > 3 else 1024 if alone else 2048)  # elements a warp
        # Where all warps' vectors together divide the row, those behind its end are no instructions at all.
        width = 32 * 16 // narrowest
        warps = next((n for n in (most, most // 2, most // 4) if n and length % (n * width) == 0), most)
        return {**kwargs, "fixed_config": FixedTritonConfig({"XBLOCK": 1, "num_warps": warps, "num_stages": 1})}

    def get_load_buffer(kernel, indexing):
        buffer = load_buffer(kernel, indexing)
        if buffer is kernel.loads and kernel.persistent_reduction and isinstance(indexing, IndexingOptions):
            symbols = indexing.index.free_symbols
            if symbols and all(symbol_is_type(symbol, TritonSymbols.reduction_types) for symbol in symbols):
                return kernel.compute
        return buffer

    with (
        mock.patch.object(TritonKernel, "get_load_buffer", get_load_buffer),
        mock.patch.object(InductorChoices, "should_use_persistent_reduction", staticmethod(should_use_persistent_reduction)),
        mock.patch.object(InductorChoices, "triton_kernel_kwargs", triton_kernel_kwargs),
        # One row a program drops a dimension, which 2.11 can't do where something is gathered.
        mock.patch.object(TritonKernel, "want_no_x_dim", lambda kernel: False),
    ):
        yield


_ROW_LOAD = re.compile(r"^(\s*\w+ = tl\.load\(.*\br0_.*\), (?:None|\w+(?: & \w+)*))((?:, other=[^,]+)?\)(?:\.to\(tl\.\w+\))?)$", re.MULTILINE)
_ROW_STORE = re.compile(r"tl\.store\((\w+) \+ \(.*\br0_")
_FIRST = ", eviction_policy='evict_first'"


@contextlib.contextmanager
def _rows_leave_caches():
    """Rows that a kernel reads once, into registers, are the first to leave the L2 cache: unless it writes rows of float32.

    2.13 lets all of them leave first, 2.11 none. With and without (H200, 2.11, us): sums of 16384 x 3072 in float32
    53.9, 57.8, in bfloat16 36.6, 41.1; of 4096 x 4096 in float32 layer norm 42.5, 40.8, softmax backward 56.9, 54.3;
    in bfloat16 32.4, 32.7 and 32.7, 32.9.
    """
    from torch._inductor.codegen.triton import TritonKernel

    write = TritonKernel.codegen_kernel

    @functools.wraps(write)
    def codegen_kernel(kernel, name=None):
        source = write(kernel, name)
        if not kernel.persistent_reduction:
            return source
        if any(f"'{pointer}': '*fp32'" in source for pointer in _ROW_STORE.findall(source)):
            return source.replace(_FIRST, "")
        return _ROW_LOAD.sub(rf"\1{_FIRST}\2", source)

    with mock.patch.object(TritonKernel, "codegen_kernel", codegen_kernel):
        yield


def never_large(result):
    """Inductor stores a pointwise result of many operations, lest its readers compute it several times. Not
    this one."""
    from torch._inductor.ir import Pointwise

    node = getattr(getattr(result, "data", None), "data", None)
    if isinstance(node, Pointwise):
        object.__setattr__(node, "has_large_inner_fn", lambda threshold=None: False)


@contextlib.contextmanager
def _one_dtype_handler():
    """Fill Inductor's table of result types once a compilation. It is a singleton, but its `__init__`
    fills it anew for every operation of every kernel: a sixth of the time that long programs took.
    """
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    DtypePropagationOpsHandler()
    with mock.patch.object(DtypePropagationOpsHandler, "__init__", lambda self: None):
        yield


@contextlib.contextmanager
def _vector_bitcasts():
    """Reinterpret bits in vector registers. Inductor's C++ code spills each vector to memory and loops
    over its lanes instead, which its compiler unrolls: most of the time that a bfloat16 kernel takes to
    compile, and much of the time that it takes to run.
    """
    from torch._inductor.codegen.cpp import DTYPE_TO_CPP, CppVecOverrides
    from torch._inductor.virtualized import V

    by_lane = CppVecOverrides.to_dtype_bitcast

    def to_dtype_bitcast(x, dtype, src_dtype):
        if x.dtype.itemsize != dtype.itemsize:
            return by_lane(x, dtype, src_dtype)
        vectors, kind = V.kernel._get_num_vectors(dtype), DTYPE_TO_CPP[dtype]
        result = f"at::vec::Vectorized<{kind}>" if vectors == 1 else f"at::vec::VectorizedN<{kind},{vectors}>"
        copy = f"static_assert(sizeof(y) == sizeof({x})); std::memcpy(static_cast<void*>(&y), static_cast<const void*>(&{x}), sizeof(y));"
        return f"[&]() {{ {result} y; {copy} return y; }}()"

    with mock.patch.object(CppVecOverrides, "to_dtype_bitcast", staticmethod(to_dtype_bitcast)):
        yield


def compile_processes(device):
    """Inductor's pool of processes that compile Triton kernels, or None where it has none.

    What they compile for a CUDA device goes where Inductor keeps its kernels. Inductor sets the variable
    too, but only when it first compiles in this process: that would be while our kernels are under way.
    """
    from torch._inductor import async_compile, config
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    if async_compile.get_compile_threads() <= 1 or config.worker_start_method != "subprocess":
        return None
    os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(device.index or 0))
    return async_compile.AsyncCompile.process_pool()


def inductor_settings():
    """The names of this PyTorch's Inductor settings."""
    from torch._inductor import config

    return list(config.get_config_copy())


def known_config(patches):
    """The patches that this PyTorch's Inductor knows; an unknown key would raise in `config.patch`."""
    known = set(inductor_settings())
    return {k: v for k, v in patches.items() if k in known}


def custom_graph_pass():
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


def functorch_config():
    from torch._functorch import config

    return config


@contextlib.contextmanager
def no_autocast():
    """Switch every device's autocast off: the lists were applied before."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def retrace(function, fakes, decompositions):
    """make_fx over fake tensors and symbolic sizes that already belong to one fake mode."""
    from torch._guards import detect_fake_mode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = detect_fake_mode(fakes)
    with mode or contextlib.nullcontext():
        return make_fx(function, decomposition_table=decompositions, record_module_stack=False)(*fakes)


@contextlib.contextmanager
def dry_run(fakes, decompositions):
    """Fake tensors compute with these decompositions, and nothing is traced."""
    from torch._guards import detect_fake_mode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Decomposed(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            rule = decompositions.get(function)
            if rule is not None:
                with self:  # what a rule calls has rules too
                    result = rule(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            return function(*args, **kwargs)

    with detect_fake_mode(fakes) or contextlib.nullcontext(), Decomposed(), no_autocast(), torch.no_grad():
        yield


def described(tree):
    """What a call on fake tensors can depend on, as text: types, sizes, strides and constants."""

    def describe(value):
        if isinstance(value, torch.Tensor):
            return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
        return f"{type(value).__name__} {value}"

    leaves, structure = pytree.tree_flatten(tree)
    return f"{structure} {[describe(leaf) for leaf in leaves]}"


@contextlib.contextmanager
def new_targets(targets):
    """Adds the target of every node that is traced meanwhile to a set."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    nodes = () if mode is None else mode.tracer.graph.nodes
    before = len(nodes)
    yield
    targets.update(node.target for node in list(nodes)[before:])


def real_tensors():
    """Tensors are computed, not faked, also while a compile's fake mode is active."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def fake_result(operator, args, kwargs):
    """What an operator gives for fake tensors among its arguments."""
    from torch._guards import detect_fake_mode

    with detect_fake_mode((args, kwargs)):
        return operator(*args, **kwargs)


def size_hint(n):
    """The size that a symbolic size had in the call being compiled; None where only the data knows."""
    return n.node.hint if isinstance(n, torch.SymInt) else n


def unless_known_false(condition):
    """The condition on symbolic sizes, guarded; True where only the data knows."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(condition)


def data_dependent(value):
    """Whether a node's fake value has a size that only the data knows."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols([v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]))


# Inductor writes this string behind `-ffp-contract=`, and nothing else lets a flag through. It always
# passes -fno-signed-zeros, which lets a C++ compiler drop `x + 0.0` and turn -0.0 into +0.0.
# Integers wrap in every program of ours, as they do in PyTorch; to a C++ compiler that is an error.
STRICT_CPP = "off -fsigned-zeros -fwrapv"


def inductor_decompositions():
    """Inductor's table of decompositions, by overload."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def inductor_lowerings():
    """The overloads that Inductor lowers itself."""
    from torch._inductor.lowering import lowerings

    return lowerings


def call_directly(overload, name):
    """Let the Python that Inductor writes call `name`, an expression, where it would call `overload`.

    The operation stays one that Inductor does not look into. Code in C++ still calls it.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings, make_fallback

    if overload in lowerings:
        return
    make_fallback(overload, warn=False)
    plain = lowerings[overload]

    @functools.wraps(plain)
    def lower(*args, **kwargs):
        result = plain(*args, **kwargs)
        for node in pytree.tree_leaves(result):
            node = node.data.data
            while isinstance(node, ir.MultiOutput):
                node = node.inputs[0]
            node.python_kernel_name = name
        return result

    lowerings[overload] = lower


def watched():
    """Whether a mode wants to see the calls of operations, or of tensors' methods."""
    return _len_torch_dispatch_stack() or _is_torch_function_mode_enabled()


_len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
_is_torch_function_mode_enabled = torch._C._is_torch_function_mode_enabled


# --- what keeping digits of weights needs (see weights.py) -------------------------------------------


def from_fsdp(gm):
    """Whether an input of a Dynamo graph belongs to an FSDP module. Those gather weights into memory that they
    free and use again, and hide it from autograd's count of changes."""
    sources = [getattr(node, "_dynamo_source", None) for node in gm.graph.nodes if node.op == "placeholder"]
    return any(source is not None and source.guard_source.is_fsdp_module() for source in sources)


def fake_like(graph, size, dtype, device):
    """A fake vector in the fake mode of a graph's inputs."""
    from torch._subclasses.fake_tensor import FakeTensor

    values = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    with next(value.fake_mode for value in values if isinstance(value, FakeTensor)):
        return torch.empty(size, dtype=dtype, device=device)


# Of a tensor's `untyped_storage()`: a number that no other storage has while `hold_number` of it is kept.
storage_number = operator.attrgetter("_cdata")


def hold_number(storage):
    """Keeps the storage's number from being used again, not its memory."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(storage)


def raw_stream(index):
    """The number of the current stream of a CUDA device."""
    return torch._C._cuda_getCurrentRawStream(index)


@functools.cache
def count_fused_updates():
    """Let the kernels of fused optimizers tell autograd's count of changes, as every other operator does that
    writes to a tensor; theirs don't. Once for the process."""
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"):
        plain = getattr(torch, name, None)
        if plain is not None:
            setattr(torch, name, _counting(plain))


def _counting(update):
    @functools.wraps(update)
    def counted(parameters, *args, **kwargs):
        result = update(parameters, *args, **kwargs)
        if not torch.compiler.is_compiling():
            local = [getattr(parameter, "_local_tensor", parameter) for parameter in parameters]
            torch.autograd.graph.increment_version([x for x in local if not x.is_inference()])
        return result

    return counted


def empty_cuda():
    """A function (size, strides, dtype) that gives fresh memory on the current CUDA device, without the
    dispatcher where PyTorch has such a one for Inductor."""

    def empty(size, strides, dtype):
        return torch.empty_strided(size, strides, dtype=dtype, device="cuda")

    return getattr(torch._C._dynamo.guards, "_empty_strided_cuda", empty)


def guard_on(holds, description):
    """Let the region in compilation be compiled anew when `holds()` is no longer true.

    Does nothing outside a Dynamo compilation.
    """
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard, TracingContext

    context = TracingContext.try_get()
    if context is None:
        return

    def create(builder, guard):
        builder.guard_manager.root.add_lambda_guard(lambda _: holds(), [description], guard.user_stack)

    context.guards_context.dynamo_guards.add(Guard(GlobalStateSource(), create))


def trace_artifact(name, payload):
    """A JSON artifact for tlparse, made by `payload()` when TORCH_TRACE is set."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=payload)


def cache_dir():
    """Inductor's cache directory: our records live and die with it."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir as directory

    return directory()


@contextlib.contextmanager
def autograd_cache(enabled):
    """Let AOTAutograd's cache be used, or make this one compilation a cold one."""
    from torch._functorch import config

    if enabled:
        yield
    else:
        with config.patch(enable_autograd_cache=False):
            yield


def cacheable(function, version):
    """The config patch that lets AOTAutograd cache graphs which call `function`."""
    return {"unsafe_marked_cacheable_functions": {f"{function.__module__}.{function.__name__}": version}}


@contextlib.contextmanager
def fake_mode():
    """A fake tensor mode with symbolic sizes, for tracing without running."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    yield FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


@contextlib.contextmanager
def pretend_cuda():
    """Fake tensors may be on CUDA where there is no GPU. In a build with CUDA that has gradients forward;
    without, a tensor there that requires one ends the process."""
    with (
        mock.patch.object(torch.cuda, "_lazy_init", lambda: None),
        mock.patch.object(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True),
        mock.patch("torch.amp.autocast_mode.torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
    ):
        yield


@contextlib.contextmanager
def quiet():
    """No log of what PyTorch meets on the way, unless TORCH_LOGS asks: the report says it better."""
    before = logging.root.manager.disable
    if not os.environ.get("TORCH_LOGS"):
        logging.disable(max(before, logging.ERROR))
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def strict_recompiles():
    """Exceeding the recompile limit raises; no error is turned into an eager run."""
    from torch._dynamo import config

    with config.patch(fail_on_recompile_limit_hit=True, suppress_errors=False):
        yield


@contextlib.contextmanager
def recompiles_allowed(n):
    """Dynamo may compile one function at least `n` times."""
    from torch._dynamo import config

    limits = {"recompile_limit": max(n, config.recompile_limit), "accumulated_recompile_limit": max(n, config.accumulated_recompile_limit)}
    with config.patch(limits):
        yield


def trace_only(gm, inputs, judge):
    """AOTAutograd's trace of `gm` and no more: `judge(graph module)` gets the joint graph, or the inference
    graph where nothing needs a gradient."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config

    class Traced(Exception):
        pass

    def stop(graph, *rest, **kwargs):
        judge(graph)
        raise Traced

    with config.patch(enable_autograd_cache=False), contextlib.suppress(Traced):
        aot_autograd(fw_compiler=stop, bw_compiler=stop, partition_fn=stop, decompositions={})(gm, inputs)


def of_its_own(method):
    """A bound method whose compiled code, and limit of recompilations, it shares with no other object's."""
    function = method.__func__
    copy = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(copy, method.__self__)


def tracing_for(backend):
    """A question for code that Dynamo traces: is it traced for `backend`? Dynamo asks once and keeps the
    answer as a constant, which is sound because compiled code belongs to one backend."""

    def tracing():
        from torch._dynamo.symbolic_convert import InstructionTranslator

        seen = InstructionTranslator.current_tx().output.compiler_fn
        while seen is not None and seen is not backend:
            seen = getattr(seen, "_torchdynamo_orig_backend", None) or getattr(seen, "compiler_fn", None)
        return seen is backend

    tracing._dynamo_marked_constant = True
    return tracing


def cudnn_choices():
    """cuDNN's benchmark and deterministic flags."""
    return {"benchmark": torch._C._get_cudnn_benchmark(), "deterministic": torch._C._get_cudnn_deterministic()}


def set_cudnn_choices(*, benchmark, deterministic):
    """Set them also where `torch.backends` is frozen, as PyTorch's own test tools freeze it."""
    torch._C._set_cudnn_benchmark(benchmark)
    torch._C._set_cudnn_deterministic(deterministic)


# --- what the eager modes need (see modes.py) --------------------------------------------------------


def autocast_dtype():
    """The type of the autocast in force on any device, or None."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def autocast_ignored():
    """A context in which PyTorch's own autocast casts nothing."""
    return torch._C._DisableAutocast()


def unrolling():
    """A context in which operators with a decomposition in Python above autograd take it, as in a trace."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


@contextlib.contextmanager
def lstm_states():
    """A trace gives the last states of an LSTM the shapes they have: 2.11 removes the wrong dimension, except
    where oneDNN would run the layer."""
    from torch._decomp import decompositions

    plain = decompositions.one_layer_lstm

    @functools.wraps(plain)
    def one_layer_lstm(inp, hidden, *rest, **keywords):
        output, last = plain(inp, hidden, *rest, **keywords)
        return output, tuple(state.reshape(before.shape) for state, before in zip(last, hidden, strict=True))

    with mock.patch.object(decompositions, "one_layer_lstm", one_layer_lstm):
        yield


def no_functions():
    """A context in which no function mode sees anything."""
    return torch._C.DisableTorchFunction()


@contextlib.contextmanager
def without_modes():
    """No mode, neither of functions nor of operators, sees anything."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


class under:
    """Operators meet `mode` once more; a lean `with mode`, for code that the mode itself runs.

    A mode's own `__enter__` sets flags of the process, which threads of autograd would mix up.
    """

    def __init__(self, mode):
        self.mode = mode

    def __enter__(self):
        torch._C._push_on_torch_dispatch_stack(self.mode)

    def __exit__(self, *error):
        torch._C._pop_torch_dispatch_stack(None)


def dispatch_mode(kind):
    """The innermost dispatch mode of a class in this thread, or None."""
    for i in range(torch._C._len_torch_dispatch_stack() - 1, -1, -1):
        mode = torch._C._get_dispatch_stack_at(i)
        if isinstance(mode, kind):
            return mode
    return None


def _top_function_mode():
    depth = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(depth - 1) if depth else None


def _top_dispatch_mode():
    depth = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None


def innermost_modes():
    """The innermost function mode and dispatch mode of this thread, each None where there is none."""
    return _top_function_mode(), _top_dispatch_mode()


@contextlib.contextmanager
def without(function_kind, dispatch_kind):
    """Leave the modes of these classes while they are the innermost ones; come back to them afterwards."""
    left = []
    try:
        for kind, top in ((function_kind, _top_function_mode), (dispatch_kind, _top_dispatch_mode)):
            while isinstance(mode := top(), kind):
                mode.__exit__(None, None, None)
                left.append(mode)
        yield
    finally:
        for mode in reversed(left):
            mode.__enter__()


def in_backward():
    """Whether autograd is running a node in this thread."""
    return torch._C._current_autograd_node() is not None


def same_types(tensors):
    """A function of as many values: whether all are tensors of the same classes, dtypes, devices, sizes,
    strides and views (conjugate, negative) as these, asked under the same modes. A tenth of a microsecond each.

    It keeps none of the tensors.
    """
    from torch._C._dynamo.guards import TensorGuards

    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def unscale(gradients, factor):
    """Multiply gradients by `factor` in place; whether all were finite. Waits for the device.

    It is what torch.amp.GradScaler calls: one rounding an element, and a flag that is only ever set.
    """
    kinds, flags = {}, {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    with torch.no_grad():
        for (device, _), members in kinds.items():
            flag = flags.setdefault(device, torch.zeros((), device=device))
            torch._amp_foreach_non_finite_check_and_unscale_(members, flag, torch.full((), factor, device=device))
    return not any(flag.item() for flag in flags.values())


@contextlib.contextmanager
def as_if_stepped(optimizer):
    """Learning-rate schedulers don't warn that the optimizer hasn't stepped before them."""
    before = vars(optimizer).get("_opt_called", False)
    optimizer._opt_called = True
    try:
        yield
    finally:
        optimizer._opt_called = before


def optimizer_hooks():
    """How many hooks stand behind the steps of all optimizers."""
    from torch.optim.optimizer import _global_optimizer_post_hooks

    return len(_global_optimizer_post_hooks)


def strided(tensor, mesh, dim, parts):
    """A DTensor of which each rank holds its chunk of each of `parts` equal parts of a dimension."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    pieces = [part.chunk(mesh.size(), dim)[mesh.get_local_rank()] for part in tensor.chunk(parts, dim)]
    placement = _StridedShard(dim, split_factor=parts)
    return DTensor.from_local(torch.cat(pieces, dim), mesh, [placement], run_check=False, shape=tensor.shape, stride=tensor.stride())


def full_tensor(tensor):
    """The whole of a DTensor, on every rank; 2.11 can't put together what `strided` cut."""
    from torch.distributed.tensor.placement_types import _StridedShard

    placement, mesh = tensor.placements[0], tensor.device_mesh
    if mesh.ndim > 1 or not isinstance(placement, _StridedShard):
        return tensor.full_tensor()
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(tensor.to_local().detach().contiguous(), mesh.size(), mesh.get_group().group_name)
    ranks = torch.ops._c10d_functional.wait_tensor(gathered).chunk(mesh.size(), 0)
    parts = zip(*(rank.chunk(placement.split_factor, placement.dim) for rank in ranks), strict=True)
    return torch.cat([torch.cat(part, placement.dim) for part in parts], placement.dim)


def communication_hooks(ddp):
    """The communication hooks of a DistributedDataParallel module."""
    return [hook for hook, _ in ddp._comm_hooks]


def replicates_shards(module):
    """Whether an FSDP2 module is HSDP: sharded over one dimension of its mesh, replicated over another."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # 2.11 has one
    groups = [state._fsdp_param_group] if groups is None else groups
    return any(group is not None and isinstance(group.mesh_info, HSDPMeshInfo) for group in groups)


def handle_dtensors(op, handler):
    """Let `handler(op, args, kwargs)` run an operator that is given DTensors."""
    from torch.distributed.tensor import DTensor

    DTensor._op_dispatcher._custom_op_handlers[op] = handler


def before_partial_sums(check):
    """Call `check(tensor, reduce_op)` before DTensor adds the parts that ranks computed each for itself.

    Not for `_MaskPartial`: of an embedding cut by rows, all parts but one are zero.
    """
    from torch.distributed.tensor import placement_types

    def checked(method):
        @functools.wraps(method)
        def reduce(self, tensor, *args, **kwargs):
            check(tensor, self.reduce_op)
            return method(self, tensor, *args, **kwargs)

        return reduce

    for name in ("_reduce_value", "_reduce_shard_value"):
        setattr(placement_types.Partial, name, checked(getattr(placement_types.Partial, name)))


def unwraps_itself(kind):
    """Whether a tensor class is DTensor, which turns an operator into operators on this rank's parts."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)

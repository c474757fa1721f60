"""Triton's interpreter, made to run with the NumPy of today, to widen as devices do, and to take half the time."""


def patch():
    """NumPy 2.4 no longer makes an integer of a one-element array, which the bounds of a loop are.

    And the interpreter takes most subnormal bfloat16 numbers for zero, or for half of what they are.
    """
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    plain, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def with_index(tensor, scope):
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(data, source, target, rounding_mode):
        if source == tl.bfloat16 and target == tl.float32:
            return (np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16).reshape(data.shape)
        return convert(data, source, target, rounding_mode)

    interpreter._patch_lang_tensor, interpreter._convert_float = with_index, widened
    if not hasattr(interpreter._interpreter, "fma_fp32"):  # Triton 3.6 rounds twice

        def fma(self, x, y, z):
            exact = x.data.astype(np.longdouble) * y.data + z.data  # of binary32, but for 2^-40 of all ties
            return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

        interpreter.InterpreterBuilder.create_fma = fma
    _spare(interpreter, tl)


def _spare(interpreter, tl):
    """What the interpreter does again for every call and operation, and changes no result, is done once."""
    import dataclasses

    # It replaced the language's functions at each launch, and searched the language for more at each call of
    # a device function. Here they are replaced for good, once for each module that has kernels.
    replace, replaced, nothing = interpreter._patch_lang, {}, interpreter._LangPatchScope()

    def _patch_lang(function):
        names = function.__globals__
        if id(names) not in replaced:
            replace(function)
            replaced[id(names)] = names
        return nothing  # to restore

    interpreter._patch_lang = _patch_lang

    # Sums of integers were also computed in int64 for an assertion that only `debug` has.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    # A table of all types was built to look one of them up.
    look_up, found = interpreter._get_np_dtype, {}

    def _get_np_dtype(dtype):
        scalar = dtype.scalar
        if isinstance(scalar, tl.pointer_type):
            return look_up(scalar)
        if scalar.name not in found:
            found[scalar.name] = look_up(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = _get_np_dtype

"""Triton's interpreter, made to run with the NumPy of today, and to widen as devices do."""


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

"""Triton's interpreter, made to run with the NumPy of today."""


def patch():
    """NumPy 2.4 no longer makes an integer of a one-element array, which the bounds of a loop are."""
    from triton.runtime import interpreter

    plain = interpreter._patch_lang_tensor

    def with_index(tensor, scope):
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = with_index

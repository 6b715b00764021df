"""Less bookkeeping in Triton's interpreter, which takes nine tenths of the kernel tests' time.

All of this uses names that Triton may change: what is not found is left as it is.
"""

import dataclasses
import functools
import inspect


def speed_up(interpreter):
    patch_triton_once_per_launch(interpreter)
    leave_out_what_the_interpreter_discards(interpreter)
    make_every_shape_once(interpreter.tl.core)
    leave_equal_shapes_alone(interpreter)


def patch_triton_once_per_launch(interpreter):
    """Triton's interpreter patches `triton.language` at every call of a device function; once per launch is enough.

    This saves a third of the kernel tests' time, and uses names that Triton may change: then it is left out.
    """
    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope")):
        return
    prepare, language = interpreter._patch_lang, interpreter.tl

    @functools.cache
    def languages(function):
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return [module for module in modules if module in (language, language.core)]

    def prepare_once(function):
        if any(language.core.is_builtin(module.load) for module in languages(function)):
            return prepare(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = prepare_once


def leave_out_what_the_interpreter_discards(interpreter):
    """Skip results that Triton's interpreter discards; they took a third of the kernel tests' time.

    It computes for every sum and product of integers whether it overflows, but asserts that in debug mode only. It also
    makes a table of all dtypes to look one up. Names are as above.
    """
    options = getattr(getattr(interpreter, "interpreter_builder", None), "options", None)
    if getattr(options, "debug", True) is False and hasattr(options, "sanitize_overflow"):
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if look_up := getattr(interpreter, "_get_np_dtype", None):
        found = {}

        def look_up_once(dtype):
            if dtype.name not in found:
                found[dtype.name] = look_up(dtype)
            return found[dtype.name]

        interpreter._get_np_dtype = look_up_once


def make_every_shape_once(core):
    """Keep one object per shape; a shape is wrapped, checked and printed for every tensor and type that is made.

    A few hundred shapes are made a million times, which takes a quarter of the kernel tests' time. Shapes are never
    changed, so those that are equal may be one object.
    """
    names = ("block_type", "tensor", "tuple", "constexpr")
    if not all(hasattr(core, name) for name in names):
        return
    make_type, make_tensor, constexpr = core.block_type.__init__, core.tensor.__init__, core.constexpr
    of_types, of_tensors = {}, {}

    def block_type(self, element_ty, shape):
        key = tuple([size.value if type(size) is constexpr else size for size in shape])
        if key not in of_types:
            make_type(self, element_ty, shape)
            of_types[key] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, shown = of_types[key]
        self.name = f"<{shown}, {element_ty}>"

    def tensor(self, handle, type):
        key = tuple(type.shape) if type.is_block() else ()
        if key not in of_tensors:
            make_tensor(self, handle, type)
            of_tensors[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[key]

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def leave_equal_shapes_alone(interpreter):
    """Skip the broadcast of operands of one shape, and the search for compile-time constants in other values."""
    core, semantic = interpreter.tl.core, type(getattr(interpreter, "interpreter_semantic", None))
    if not hasattr(semantic, "broadcast_impl_value") or not hasattr(core, "_unwrap_if_constexpr"):
        return
    broadcast, unwrap, constexpr = semantic.broadcast_impl_value, core._unwrap_if_constexpr, core.constexpr
    plain = frozenset([int, float, bool, str, type(None), core.tensor])

    def broadcast_unless_equal(self, left, right):
        if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
            return left, right
        return broadcast(self, left, right)

    def unwrap_unless_plain(value):
        kind = type(value)
        if kind is constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    semantic.broadcast_impl_value, core._unwrap_if_constexpr = broadcast_unless_equal, unwrap_unless_plain

"""Interned layouts."""

from container.codec import request as module
from container.codec.request import Layouts
from model_handlers.tensor import FP32, INT32

ROW = ("X", FP32, (1, 2))


def test_layouts_that_look_alike_are_one():
    """Equal names, types, shapes and requested outputs give the very same object, with all of them in it."""
    layouts = Layouts()
    layout = layouts.intern((ROW,), ("Y",))
    assert layouts.intern((("X", FP32, (1, 2)),), ("Y",)) is layout
    assert (layout.inputs, layout.outputs) == ((ROW,), ("Y",))
    assert len(layouts) == 1


def test_whatever_differs_makes_a_layout_of_its_own():
    """Name, type, shape, order, number of inputs and requested outputs."""
    layouts = Layouts()
    forms = [
        ((ROW,), ()),
        ((ROW,), ("Y",)),
        ((("Z", FP32, (1, 2)),), ()),
        ((("X", INT32, (1, 2)),), ()),
        ((("X", FP32, (2, 1)),), ()),
        ((ROW, ("Z", FP32, ())), ()),
        ((("Z", FP32, ()), ROW), ()),
        ((), ()),
    ]
    assert len({id(layouts.intern(*form)) for form in forms}) == len(layouts) == len(forms)


def test_few_layouts_are_remembered(monkeypatch):
    """Ever new shapes do not grow them; a layout that was forgotten is made again."""
    monkeypatch.setattr(module, "_MAX_LAYOUTS", 4)
    layouts = Layouts()
    for size in range(20):
        assert layouts.intern((("X", FP32, (size,)),), ()).inputs == (("X", FP32, (size,)),)
        assert len(layouts) <= 4


def test_layouts_of_long_or_many_names_take_no_more_memory_than_short_ones(monkeypatch):
    """Clients choose them; one that is too heavy is made anew each time."""
    monkeypatch.setattr(module, "_MAX_BYTES", 5000)
    layouts = Layouts()
    for number in range(20):
        layouts.intern((("X" * 1000, FP32, (number,)),), ())
        layouts.intern((ROW,), tuple(f"Y{number}" for _ in range(10)))
        assert len(layouts) <= 4
    heavy = (("X" * 5000, FP32, ()),)
    assert layouts.intern(heavy, ()) is not layouts.intern(heavy, ())

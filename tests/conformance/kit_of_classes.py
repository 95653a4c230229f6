"""The kit of caches at seven specs, one of each class of codec: what `make check` runs of it.

Without joint heads, whose codec learns for as long as all the others take together.
"""

from matrix import SOME_SHAPES, class_specs, facts, kit_classes

from kvpact.testing import example_specs


def chosen(spec):
    found = facts(spec)
    return not found.joint and (found.k_groups or not found.bias)


for fitted in (False, True):
    specs = [spec for spec in class_specs(example_specs(fitted=fitted)) if chosen(spec)]
    kits = kit_classes(__name__, "Cache", fitted=fitted)
    for name, kit in kits:
        if kit.spec in specs:
            kit.shapes = SOME_SHAPES
            globals()[name] = kit

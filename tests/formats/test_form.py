"""A form refuses what is none, and tells kernels of nothing that they can't do."""

import pytest
import torch
from closeness import WHOLE_BOUND, error

import kvpact
from kvpact import CacheGeometry
from kvpact.errors import RegistrationError
from kvpact.formats.form import Form, Levels, Side
from kvpact.methods.rules import FormCodec, rule

GRID = Levels("grid", 4)
SCALE, ZERO = Side("scale", "mul"), Side("zero", "add")
BLOCKS = Side("scale", "mul", channels=16)
TILE_SCALE, TILE_ZERO = Side("scale", "mul", tokens=32), Side("zero", "add", tokens=32)
BOOK = Levels("book", 2, (-3.0, -1.0, 1.0, 3.0))
UNEVEN = Levels("book", 2, (5.0, 0.0, -2.5, 1.0))
MEAN = Side("mean", "add", tokens=32)


@pytest.mark.parametrize(("levels", "sides", "rule", "said"), [
    (Levels("grid", 9), (SCALE,), "absmax", "2 to 8"),
    (Levels("grid", 1), (SCALE,), "absmax", "2 to 8"),
    (Levels("grid", 4, zero_code=16), (SCALE,), "absmax", "a code"),
    (Levels("grid", 4, zero_code=8), (SCALE, ZERO), "minmax", "zero_code"),
    (Levels("book", 4, (-3.0, -1.0, 1.0, 3.0)), (SCALE,), "ls", "2\\*\\*bits"),
    (Levels("book", 2, (-3.0, -1.0, 1.0, 4.0)), (SCALE,), "ls", "symmetric"),
    (Levels("book", 2, (3.0, 1.0, -1.0, -3.0)), (SCALE,), "ls", "ascending"),
    (Levels("float", 8, number="e3m4"), (SCALE,), "absmax", "e3m4"),
    (Levels("raw", 16, number="e4m3"), (), "cast", "fp16, bf16 or fp32"),
    (Levels("points", 4), (SCALE,), "absmax", "one of"),
    (GRID, (Side("scale", "times"),), "absmax", "'mul' or 'add'"),
    (GRID, (Side("scale", "mul", tokens=20),), "absmax", "multiple of 32"),
    (GRID, (Side("scale", "mul", channels=16, tokens=32),), "absmax", "multiple of 32"),
    (GRID, (SCALE, Side("scale", "add")), "minmax", "different names"),
    (GRID, (BLOCKS, ZERO), "minmax", "equally wide"),
    (GRID, (TILE_SCALE, Side("zero", "add", tokens=64)), "minmax", "equally many"),
    (GRID, (TILE_SCALE, ZERO), "minmax", "with sides"),
    (GRID, (TILE_SCALE,), "absmax", "with sides"),
    (GRID, (ZERO, SCALE), "minmax", "with sides"),
    (GRID, (Side("size", "mul"),), "absmax", "with sides"),
    (GRID, (SCALE, ZERO), "balance", "with sides"),
    (BOOK, (BLOCKS,), "ls", "one scale per token"),
    (Levels("float", 8, number="e4m3"), (BLOCKS,), "absmax", "one scale per token"),
    (BOOK, (MEAN, SCALE), "ls", "with sides"),
    (BOOK, (SCALE,), "minmax", "for one of: grid"),
])  # fmt: skip
def test_forms_that_are_none_are_refused_by_name(levels, sides, rule, said):
    with pytest.raises(RegistrationError, match=said):
        Form(64, "token", levels, sides, rule)


def test_a_rule_that_nobody_registered_is_refused():
    with pytest.raises(RegistrationError, match="no rule 'nosuch'"):
        FormCodec(Form(64, "token", GRID, (SCALE,), "nosuch"))
    with pytest.raises(RegistrationError, match="has a rule named 'absmax'"):
        rule("absmax")(lambda form, y, frozen: {})


@rule("anything")
def anything(form, y, frozen):
    """Choose codes and sides without regard to the tokens."""
    generator, found = torch.Generator().manual_seed(form.dim), {}
    top = 1 << form.levels.bits
    found["codes"] = torch.randint(0, top, y.shape, generator=generator).to(torch.uint8)
    for side in form.sides:
        width = form.dim if side.tokens > 1 else -(-form.dim // (side.channels or form.dim))
        shape = (*y.shape[:2], y.shape[2] // side.tokens, width)
        found[side.name] = (torch.rand(shape, generator=generator) + 0.5).half()
    return found


ORDERS = {
    "mul": (SCALE,), "mul in blocks": (BLOCKS,), "mul add": (SCALE, ZERO), "add mul": (ZERO, SCALE),
    "add": (ZERO,), "two muls": (SCALE, Side("more", "mul")), "tile": (TILE_SCALE, TILE_ZERO),
    "tile, add first": (TILE_ZERO, TILE_SCALE),
    "tile, then a token": (TILE_SCALE, TILE_ZERO, Side("more", "mul")),
    "a token, then a tile": (SCALE, ZERO, Side("more", "mul", tokens=32)),
    "scale and mean": (SCALE, MEAN), "mean and scale": (MEAN, SCALE),
    "a tile's scale, a token's zero": (TILE_SCALE, ZERO), "blocks and a mean": (BLOCKS, MEAN),
}  # fmt: skip
NATIVE = {
    "token": {"mul", "mul in blocks", "mul add", "tile", "tile, then a token", "scale and mean"},
    "channel": {"mul", "mul in blocks", "mul add", "a token, then a tile"},
}


@pytest.mark.parametrize("levels", [GRID, BOOK, UNEVEN], ids=["grid", "book", "uneven"])
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("side", ["token", "channel"])
def test_every_order_of_sides_is_native_as_in_torch_or_not_native(side, name, levels):
    """The other side of the cache is exact, so that its error is this side's alone."""
    from kvpact.methods.none import Exact

    made = FormCodec(Form(32, side, levels, ORDERS[name], "anything"), max_abs=1e4)
    native = name in NATIVE[side] and not (name == "scale and mean" and levels is GRID)
    assert (made.form.kind != "") == native
    assert made.form.encoder == ""

    class Any(Exact):
        def key_codec(self, dim, dtype):
            return made if side == "token" else super().key_codec(dim, dtype)

        def value_codec(self, dim, dtype):
            return made if side == "channel" else super().key_codec(dim, dtype)

    spec = kvpact.Spec(Any(), Any())
    generator, outputs = torch.Generator().manual_seed(1), []
    k, v = torch.randn(2, 1, 2, 96, 32, generator=generator)
    q, new = torch.randn(1, 4, 1, 32, generator=generator), torch.randn(1, 2, 1, 32)
    for backend in ("auto", "torch"):
        cache = kvpact.create_cache(spec, CacheGeometry(1, 2, 32), backend=backend)
        cache.prefill(0, k, v)
        outputs.append(cache.attend(0, k=new, v=new, q=q))
    assert error(outputs[1], outputs[0]) <= WHOLE_BOUND

"""The bytes of slots: fields, bit order, sizes, version."""

from kvpact.formats.base import FORMAT_VERSION, Field, Order
from kvpact.formats.fields import CodesField, GroupField, TokenField
from kvpact.units import TILE

__all__ = ["FORMAT_VERSION", "TILE", "CodesField", "Field", "GroupField", "Order", "TokenField"]

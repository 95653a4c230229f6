"""Integrations with engines; each module is imported only where that engine is used."""

from kvpact.callable_package import let_tell

let_tell(__name__)

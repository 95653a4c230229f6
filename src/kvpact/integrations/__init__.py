"""Integrations with engines; each module is imported only where that engine is used."""

"""K or V of one layer: packed segments, the exact tail, sinks, and the codecs that pack."""

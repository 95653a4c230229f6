"""Calibrations: what methods learn of a model from texts, as one checked file."""

from kvpact.calibration.base import Calibration, LayerCalibration, LayerTokens, calibrate_layer

__all__ = ["Calibration", "LayerCalibration", "LayerTokens", "calibrate_layer"]

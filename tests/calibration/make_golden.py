"""Write the golden calibration, `python tests/calibration/make_golden.py`; no test runs this."""

from pathlib import Path

import torch

from kvpact import Calibration, parse_spec
from kvpact.calibration.base import LayerCalibration
from kvpact.key_rotation import KeyRotation
from kvpact.methods.fitted import Calibrating
from kvpact.testing import random_tokens

PATH = Path(__file__).parent / "golden-v1.safetensors"

if __name__ == "__main__":
    if PATH.exists():
        raise SystemExit(f"{PATH} is there; later versions get a file of their own")
    k = random_tokens(1, 2, 512, 16) * torch.linspace(3, 0.2, 16)
    known = Calibrating(k, torch.ones(1, 2, 512, 16), None, KeyRotation.of(torch.ones(4) / 7))
    codec = parse_spec("pca:bits=2").key.key_codec(16, torch.float32).calibrated(k, known)
    x = (torch.arange(3 * 2 * 16).view(1, 2, 3, 16) * 37 % 101 / 25 - 2).float()
    codes = codec.encode(x)["codes"].flatten()
    states = {"pca/1": codec.state()}, {"codes": {"codes": codes}}
    layer = LayerCalibration(2, 16, 16, *states)
    Calibration({0: layer}, "golden", 512).save(PATH)

"""The lint rule about tensors that depend on torch's defaults finds them."""

import pytest
from lint_factories import main, offences

WRONG = {
    "torch.empty(3)": "torch.empty without dtype and device",
    "torch.zeros(2, dtype=torch.int8)": "torch.zeros without device",
    "torch.arange(n, device=x.device)": "torch.arange without dtype",
    "torch.cat([torch.tensor([1.0])])": "torch.tensor without dtype and device",
    "torch.FloatTensor(3)": "torch.FloatTensor takes no dtype",
    "from torch import Tensor, ones": "torch.ones is imported by name",
}


@pytest.mark.parametrize("source", WRONG)
def test_what_lacks_dtype_or_device_is_found(source, tmp_path):
    (tmp_path / "module.py").write_text(f"import torch\n{source}\n", "utf-8")
    assert main([str(tmp_path)]) == 1
    [(line, what)] = offences(f"\n{source}")
    assert line == 2 and what.startswith(WRONG[source])


def test_what_names_both_or_takes_them_from_a_tensor_is_not():
    good = "torch.full((), 1.0, dtype=x.dtype, device='cpu')\nx.new_zeros(3)\ntorch.ones_like(x)\n"
    assert list(offences(good + "tl.zeros((3,))\nnp.empty(3)\ntorch.stack([x])")) == []

"""The pages of a sequence as segments to write to: one by one, and by their addresses."""

import torch

from kvpact.cache.pages import PageSource


def make():
    codes = torch.arange(5 * 2 * 3 * 4, dtype=torch.uint8).reshape(5, 2, 3, 4)
    scale = torch.arange(5 * 2 * 3, dtype=torch.float16).reshape(5, 2, 3)
    fields = {"codes": codes, "scale": scale}
    return fields, PageSource(fields, (4, 0, 2), 3)


def test_they_are_the_pages_in_the_sequences_order():
    fields, source = make()
    for index, page in enumerate((4, 0)):
        segment = source.segment(index)
        assert segment.keys() == fields.keys()
        for name, tensor in segment.items():
            assert torch.equal(tensor, fields[name][page : page + 1])
            assert tensor.data_ptr() == fields[name][page].data_ptr()


def test_their_addresses_are_those_of_the_pages():
    fields, source = make()
    for name, tensor in fields.items():
        where = source.where(name)
        assert where.segments.tolist() == [tensor[page].data_ptr() for page in (4, 0, 2)]
        assert where.head == tensor.stride(1) * tensor.element_size()
        assert where.address == where.segments.ctypes.data


def test_fields_with_gaps_have_no_place():
    codes = torch.zeros(5, 2, 3, 8, dtype=torch.uint8)[..., ::2]
    assert PageSource({"codes": codes}, (1, 3), 3).where("codes") is None

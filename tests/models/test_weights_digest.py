"""WeightsDigest: any change of any element is seen, and the order of tensors is not."""

from __future__ import annotations

import pytest
import torch

from octavo.checkpoint.digest import WeightsDigest

SHAPES = [(3,), (512,), (4097, 3), (64, 300)]


def digest(tensors: dict[str, torch.Tensor]) -> str:
    made = WeightsDigest()
    for name, tensor in tensors.items():
        made.add(name, tensor)
    return made.hexdigest()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_bit_of_any_element_changes_it(dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = {str(shape): torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES}
    before = digest(tensors)
    assert digest(dict(reversed(tensors.items()))) == before
    for tensor in tensors.values():
        words = tensor.view(-1).view(torch.uint8)
        for place in [0, 5, len(words) // 2, len(words) - 1, *torch.randint(len(words), (8,), generator=generator)]:
            words[place] ^= 1
            assert digest(tensors) != before
            words[place] ^= 1
    assert digest(tensors) == before


def test_changes_of_several_elements_do_not_hide_each_other():
    """Places behind the first piece, which is hashed as it is."""
    whole = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    before = digest({"a": whole})
    for name, own in {"float32": whole.clone(), "bfloat16": whole.bfloat16()}.items():
        same, narrow = digest({"a": own}), own.clone()
        narrow[20:, 1::2].neg_()
        assert digest({"a": narrow}) != same, f"signs of every second {name}"
        narrow = own.clone()
        narrow[21, 3] *= -1
        narrow[21, 11] *= -1
        assert digest({"a": narrow}) != same, f"two signs of {name}"
        narrow = own.clone()
        narrow[30, :8], narrow[30, 8:16] = own[30, 8:16], own[30, :8]
        assert digest({"a": narrow}) != same, f"{name}s that changed places"
    assert digest({"a": whole}) == before


def test_names_shapes_and_types_count_and_places_in_memory_do_not():
    whole = torch.arange(4000, dtype=torch.float32)
    seen = {digest(own) for own in ({"a": whole}, {"b": whole}, {"a": whole.view(2, -1)}, {"a": whole.int()}, {})}
    assert len(seen) == 5
    shifted = torch.cat([torch.zeros(1), whole])[1:]
    assert shifted.storage_offset() % 2 and digest({"a": shifted}) == digest({"a": whole.clone()})

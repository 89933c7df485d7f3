"""Safetensors files: what is read, and every kind of broken or hostile file refused before its data is
touched."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo.checkpoint.safetensors import INDEX_NAME, MAX_DIMENSIONS, Checkpoint

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(path: Path, header: Any, data: bytes = b"\0" * 8, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        Checkpoint(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_reads_what_safetensors_wrote(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.randn(3, 5, dtype=dtype), "b": torch.randn((), dtype=dtype)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint.entries) == set(tensors)
    for name, tensor in tensors.items():
        for out_dtype in (dtype, torch.float32):
            out = torch.empty(tensor.shape, dtype=out_dtype)
            checkpoint.read(name, out)
            assert torch.equal(out, tensor.to(out_dtype))
    checkpoint.check_unchanged()
    checkpoint.close()


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        pytest.param({"a": F32}, b"\0" * 8, 2**63, "header length 9223372036854775808 does not fit", id="length 2^63"),
        pytest.param({"a": F32}, b"\0" * 8, 0, "header length 0 does not fit", id="length 0"),
        pytest.param({"a": F32}, b"", 10**6, "header length 1000000 does not fit", id="short file"),
        pytest.param({"a": F32}, b"\0" * 7, None, "tensors end at byte", id="data cut off"),
        pytest.param({"a": F32}, b"\0" * 9, None, "tensors end at byte", id="trailing bytes"),
        pytest.param({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, b"\0" * 12, None, "overlaps", id="overlap"),
        pytest.param({"a": F32, "b": {**F32, "data_offsets": [9, 17]}}, b"\0" * 17, None, "a gap", id="gap"),
        pytest.param({"a": {**F32, "shape": [0, 2**40]}}, b"\0" * 8, None, "is 0 bytes, not 8", id="shape 0 x 2^40"),
        pytest.param({"a": {**F32, "shape": [2**41]}}, b"\0" * 8, None, "must be natural", id="shape 2^41"),
        pytest.param({"a": {**F32, "shape": [3]}}, b"\0" * 8, None, "12 bytes, not 8", id="shape and size differ"),
        pytest.param({"a": {**F32, "shape": [True]}}, b"\0" * 8, None, "must be natural", id="shape of booleans"),
        pytest.param({"a": {**F32, "dtype": "Q4"}}, b"\0" * 8, None, "unknown dtype 'Q4'", id="unknown dtype"),
        pytest.param({"a": {**F32, "data_offsets": [-8, 0]}}, b"\0" * 8, None, "data_offsets", id="negative offset"),
        pytest.param(
            {"a": {**F32, "shape": [2] + [1] * 16}}, b"\0" * 8, None, "17 sizes: a tensor has at", id="17 sizes"
        ),
        pytest.param({"a": {**F32, "shape": [2**31] * 99999}}, b"\0" * 8, None, "99999 sizes: a", id="99999 sizes"),
        pytest.param({"a" * 99999: F32}, b"\0" * 9, None, "tensors end at byte", id="long name"),
        pytest.param({"a" * 99999: {}}, b"\0" * 8, None, "must have dtype, shape", id="long name, no fields"),
        pytest.param({"a": {**F32, "dtype": "Q" * 99999}}, b"\0" * 8, None, "unknown dtype", id="long dtype"),
        pytest.param({"a": {**F32, "data_offsets": [8] * 99999}}, b"\0" * 8, None, "two numbers", id="99999 offsets"),
        pytest.param({"\udc80": F32}, b"\0" * 8, None, "holds a lone surrogate", id="surrogate in a name"),
        pytest.param(b'{"\xed\xb2\x80": 1}', b"\0" * 8, None, "header is not valid", id="surrogate as bytes"),
        pytest.param(b"[%s]" % (b"9" * 41), b"", None, "an integer has 41 digits, the limit is 40", id="long integer"),
        pytest.param(b"[%s1]" % (b"1," * (8 << 20)), b"", None, "values, the limit is 8388608", id="many values"),
        pytest.param(b"[%s1]" % (b"[]," * (1 << 20)), b"", None, "and objects, the limit is 1048576", id="many lists"),
        pytest.param({"a": {"dtype": "F32"}}, b"\0" * 8, None, "must have dtype, shape", id="fields missing"),
        pytest.param([1], b"\0" * 8, None, "not a JSON object", id="not an object"),
        pytest.param(b"{nonsense", b"\0" * 8, None, "header is not valid", id="not JSON"),
        pytest.param(b"\xff\xfe{}", b"\0" * 8, None, "header is not valid", id="not UTF-8"),
        pytest.param(b"[" * 99999, b"\0" * 8, None, "header is not valid", id="deep"),
        pytest.param(
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": {}}',
            b"\0" * 8,
            None,
            "key 'a' comes twice",
            id="duplicate key",
        ),
    ],
)
def test_bad_headers_are_refused(tmp_path: Path, header: Any, data: bytes, length: int | None, message: str) -> None:
    write(tmp_path / "model.safetensors", header, data, length)
    found = refusal(tmp_path)
    assert message in found
    assert "model.safetensors: header" in found
    assert len(found) < 1000 and found.isprintable()


def test_a_tensor_without_elements_lies_anywhere(tmp_path: Path) -> None:
    """Between two that touch, whatever the order of the header."""
    empty = {"dtype": "F32", "shape": [0, 64], "data_offsets": [8, 8]}
    write(tmp_path / "model.safetensors", {"b": {**F32, "data_offsets": [8, 16]}, "none": empty, "a": F32}, b"\0" * 16)
    checkpoint = Checkpoint(tmp_path)
    assert {name: entry.size for name, entry in checkpoint.entries.items()} == {"a": 8, "none": 0, "b": 8}
    checkpoint.close()


def test_a_shape_of_as_many_sizes_as_are_allowed_is_read(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": {**F32, "shape": [2] + [1] * (MAX_DIMENSIONS - 1)}})
    checkpoint = Checkpoint(tmp_path)
    assert len(checkpoint.entries["a"].shape) == MAX_DIMENSIONS
    checkpoint.close()


def test_a_stack_of_more_experts_than_there_may_be_is_left_whole(tmp_path: Path) -> None:
    """A name for each of 2**38 would never end; a sparse file can say so in a few bytes."""
    write(
        tmp_path / "model.safetensors", {"m.0.all": {"dtype": "U8", "shape": [2**38, 1, 1], "data_offsets": [0, 2**38]}}
    )
    with open(tmp_path / "model.safetensors", "r+b") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        file.truncate(8 + length + 2**38)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.unstack({"m.*.all": ["m.*.*.one"]})
    assert list(checkpoint.entries) == ["m.0.all"]
    checkpoint.close()


def test_a_path_with_nul_is_refused_by_name() -> None:
    assert "'/models/a\\x00b': no such folder: no path has a NUL in it" in refusal(Path("/models/a\0b"))


def test_only_safetensors_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    assert "only safetensors is loaded, found pytorch_model.bin" in refusal(tmp_path)


def index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "", "..", "passwd"])
def test_shard_names_are_plain_file_names(tmp_path: Path, name: str) -> None:
    index(tmp_path, {"a": name})
    assert "shard name not allowed" in refusal(tmp_path)


def test_shards_stay_in_the_folder(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    write(tmp_path / "outside.safetensors", {"a": F32})
    (snapshot / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    assert "out of the folder" in refusal(snapshot)


def test_links_into_the_blobs_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write(blobs / "123", {"a": F32})
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    checkpoint = Checkpoint(snapshot)
    assert list(checkpoint.entries) == ["a"]
    checkpoint.close()


def test_missing_shard(tmp_path: Path) -> None:
    index(tmp_path, {"a": "model-1.safetensors"})
    assert "missing shard 'model-1.safetensors'" in refusal(tmp_path)


def test_a_link_that_leads_nowhere_or_in_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    assert "model.safetensors" in refusal(tmp_path)


def test_one_tensor_in_two_shards(tmp_path: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        write(tmp_path / name, {"a": F32})
    assert "'a' is in two shards: x.safetensors and y.safetensors" in refusal(tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": F32})
    index(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    assert "tensor 'b' is not in x.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 1}])
def test_bad_indexes_are_refused(tmp_path: Path, weight_map: Any) -> None:
    index(tmp_path, weight_map)
    assert "weight_map" in refusal(tmp_path)


@pytest.mark.parametrize("place", ["tensor", "shard"])
def test_a_lone_surrogate_in_an_index_is_refused_with_its_file(tmp_path: Path, place: str) -> None:
    index(tmp_path, {"\ud800": "a.safetensors"} if place == "tensor" else {"a": "\ud800.safetensors"})
    found = refusal(tmp_path)
    assert f"{INDEX_NAME}: not valid JSON: it holds a lone surrogate" in found and "\\ud800" in found


@pytest.mark.parametrize("name", ["x" * 99999 + ".safetensors", "x" * 99999])
def test_an_index_is_quoted_in_part(tmp_path: Path, name: str) -> None:
    index(tmp_path, {"a": name})
    assert len(refusal(tmp_path)) < 1000


def test_a_fifo_is_refused_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    assert "not a regular file" in refusal(tmp_path)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1000)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 200)
    with pytest.raises(ValueError, match="changed while it was read"):
        checkpoint.read("a", torch.empty(1000))
    with pytest.raises(ValueError, match="changed while it was read"):
        checkpoint.check_unchanged()
    checkpoint.close()


def test_files_are_closed_after_a_refusal(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"a": F32})
    write(tmp_path / "b.safetensors", {"b": F32}, data=b"")
    refusal(tmp_path)
    opened = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if path.startswith(str(tmp_path))]

"""Finding a model: bundled, in a folder, on a hub, or a refusal that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.checkpoint.hub import BUNDLED, find_model


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert find_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_models_need_no_network(name: str) -> None:
    assert find_model(name).parts[-3:] == ("octavo", "assets", name)


@pytest.mark.parametrize("name", ["./no-such", "/no/such/folder", "~/no-such", "a/b/c", "models/x/", "", "a b"])
def test_a_path_that_does_not_exist_says_so(name: str) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        find_model(name)


@pytest.mark.parametrize("name", ["octavo-tny", "octavo_tiny", "octavo-tiny-hybird"])
def test_a_misspelt_bundled_name_is_not_asked_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **given: pytest.fail("the hub was asked"))
    with pytest.raises(ValueError, match=r"no such folder; did you mean octavo-tiny(-hybrid)?\?"):
        find_model(name)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ValueError, match="is a file: give the folder"):
        find_model(str(file))


def test_a_download_goes_where_it_shall(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked: list[object] = []
    monkeypatch.setattr(
        hub, "snapshot_download", lambda name, **given: asked.append(given["cache_dir"]) or str(tmp_path)
    )
    assert find_model("a/b", None, str(tmp_path / "cache")) == find_model("a/b") == tmp_path
    assert asked == [str(tmp_path / "cache"), None]


def test_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"give a model folder, or download .* HF_HOME") as error:
        find_model("some-organisation/some-model")
    assert "\n" not in str(error.value)

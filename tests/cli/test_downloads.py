import urllib.error

import pytest

import bsam
from bsam import cli
from bsam.cli import downloads

TRAIN = ("train", "--method", "bsam", "--epochs", "1", "--device", "cpu", "--data", "cifar10", "--download")


def test_a_download_without_internet_says_where_to_put_what(tmp_path, refused, monkeypatch):
    def offline(*_, **__):
        raise urllib.error.URLError("Temporary failure in name resolution")

    monkeypatch.setattr("torch.hub.urlopen", offline)
    error = refused(*TRAIN, "--data-dir", tmp_path / "data", "--out", tmp_path / "out")
    assert "cifar-10" in error
    assert "name resolution" in error
    assert f"unpack it in {tmp_path / 'data'}" in error


def test_a_download_goes_where_the_data_is_read_from(tmp_path, monkeypatch):
    asked = []

    def download(name, folder, progress):
        asked.append((name, folder))
        assert not progress  # not on a terminal

    monkeypatch.setattr(downloads, "download", download)
    assert cli.main([*TRAIN, "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert asked == [("cifar10", tmp_path)]


@pytest.mark.parametrize(
    "folder", ["cifar-10-batches-py", "."], ids=["the other layout", "the folder of the files itself"]
)
def test_a_download_is_not_asked_for_what_is_there(folder, tmp_path, refused, monkeypatch):
    monkeypatch.setattr("torch.hub.urlopen", lambda *_, **__: pytest.fail("asked for"))
    (tmp_path / folder).mkdir(exist_ok=True)
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        (tmp_path / folder / name).touch()
    error = refused(*TRAIN, "--data-dir", tmp_path, "--out", tmp_path / "out")
    assert "is not the published file" in error  # found, and read
    assert not (tmp_path / "cifar-10-batches-bin").exists()


def test_several_data_sets_are_downloaded_once_each_and_digits_not_at_all(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(downloads, "download", lambda name, folder, progress: asked.append((name, folder)))
    downloads.download_all(["digits", "cifar10", "fashion_mnist", "cifar10"], tmp_path)
    assert asked == [("cifar10", tmp_path), ("fashion_mnist", tmp_path)]
    downloads.download_all(["digits"], None)
    with pytest.raises(bsam.BsamError, match="say with --data-dir in which folder"):
        downloads.download_all(["digits", "cifar10"], None)

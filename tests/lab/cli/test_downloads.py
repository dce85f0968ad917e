import urllib.error

import pytest

from bsam.lab import data

TRAIN = ("train", "--method", "bsam", "--epochs", "1", "--device", "cpu", "--data", "cifar10", "--download")


def test_a_download_without_internet_says_where_to_put_the_files(tmp_path, error_of, monkeypatch):
    def offline(*_, **__):
        raise urllib.error.URLError("Temporary failure in name resolution")

    monkeypatch.setattr("torch.hub.urlopen", offline)
    error = error_of(*TRAIN, "--data-dir", tmp_path / "data", "--out", tmp_path / "out")
    assert "name resolution" in error
    assert str(tmp_path / "data") in error


@pytest.mark.parametrize("folder", ["cifar-10-batches-py", "."])
def test_files_that_are_there_are_not_downloaded(folder, tmp_path, error_of, monkeypatch):
    monkeypatch.setattr("torch.hub.urlopen", lambda *_, **__: pytest.fail("downloaded"))
    (tmp_path / folder).mkdir(exist_ok=True)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (tmp_path / folder / name).touch()
    assert "is not the published file" in error_of(*TRAIN, "--data-dir", tmp_path, "--out", tmp_path / "out")


def test_each_data_set_is_downloaded_once_and_digits_not_at_all(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(data, "download", lambda name, folder, progress: asked.append((name, folder)))
    data.download_all(["digits", "cifar10", "fashion_mnist", "cifar10"], tmp_path)
    assert asked == [("cifar10", tmp_path), ("fashion_mnist", tmp_path)]
    data.download_all(["digits"], None)

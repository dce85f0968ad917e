"""The benchmark of augmentation beside a training."""

import json


def test_every_augmentation_is_timed_alone_and_beside_a_training(augmentation, tmp_path, capsys):
    out = tmp_path / "augmentation.json"
    sizes = ["--size", "16", "--batch", "4", "--steps", "2", "--rounds", "1"]
    augmentation.main(["--device", "cpu", "--model", "resnet8", *sizes, "--out", str(out)])
    (result,) = json.loads(out.read_text())["results"]
    assert (result["steps"], result["batch"]) == (2, 4)
    for numbers in ("alone_images_per_second", "epoch_seconds", "over_none"):
        assert list(result[numbers]) == list(augmentation.AUGMENTATIONS)
        assert all(spread["median"] > 0 for spread in result[numbers].values())
    assert result["over_none"]["none"]["median"] == 1
    assert len(capsys.readouterr().out.splitlines()) == len(augmentation.AUGMENTATIONS)

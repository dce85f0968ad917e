"""``bsam weights``; what it writes is tested with the conversion."""

import sys

import pytest

from bsam import cli


def test_without_timm_the_extra_is_named(refused, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "timm", None)
    said = refused("weights", "convert", tmp_path / "a.tgz", tmp_path / "a.safetensors")
    assert "needs timm, which is not installed: pip install -c constraints.txt '.[timm]'" in said


def test_wrong_arguments_are_refused_in_a_sentence(refused, tmp_path, capsys):
    said = refused("weights", "convert", tmp_path, tmp_path / "a.safetensors")
    assert f"{tmp_path} has no model.json" in said
    with pytest.raises(SystemExit):
        cli.main(["weights"])
    assert "required: action" in capsys.readouterr().err

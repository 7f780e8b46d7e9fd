"""checkpoint.formats.format: the names of formats are what the command line takes."""

from __future__ import annotations

from quintnet_compiler.checkpoint.formats.format import Format


def test_formats_are_texts() -> None:
    assert [*Format] == ["quintnet", "dcp", "safetensors"] and Format("dcp") is Format.DCP

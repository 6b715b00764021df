"""Atomic writes: complete under their name, or not there."""

import pytest

from saccade.files import atomic_write


def test_an_interrupted_write_leaves_nothing(tmp_path):
    with pytest.raises(TypeError), atomic_write(tmp_path / "deep" / "file") as temporary:
        _ = temporary.write_bytes(b"half"), temporary.write_bytes("no bytes")
    with pytest.raises(TypeError), atomic_write(tmp_path / "deep" / "folder") as temporary:
        _ = temporary.mkdir(), (temporary / "half").write_bytes("no bytes")
    assert list((tmp_path / "deep").iterdir()) == []


@pytest.mark.parametrize("sync", [False, True])
def test_a_finished_write_replaces_the_file(tmp_path, sync):
    for content in ("old", "new"):
        with atomic_write(tmp_path / "file", sync=sync) as temporary:
            temporary.write_text(content)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "new")]

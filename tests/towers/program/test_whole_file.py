"""A file gets its name once it is whole."""

from towers.program import whole_file


def test_a_link_stays(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    with whole_file.opened(str(link)) as file:
        file.write("after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    assert sorted(tmp_path.iterdir()) == [link, target]

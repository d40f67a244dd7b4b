"""Programs in processes that have TensorFlow imported already."""

from tests import warm


def test_the_environment_is_this_test_s(monkeypatch):
    monkeypatch.setenv("TOWERS_WARM", "here")
    done = warm.run("tests.environ")
    assert done.stdout == "here\n", done.stderr

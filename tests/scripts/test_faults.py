"""The kinds of bad record that scripts/faults/records.py makes."""

import pytest

from scripts.faults import records
from towers.input_pipeline import open_source
from towers.input_pipeline.records import quarantine


@pytest.mark.quick_one_in(7)
@pytest.mark.parametrize("kind", records.KINDS)
def test_a_bad_record_is_one(kind, tmp_path):
    make, where = records.KINDS[kind]
    spec, path = make(tmp_path / "data")
    options = {} if spec.startswith("folder:") else {"num_classes": 3}
    source = open_source(spec, skip_bad=True, **options)
    (bad,) = quarantine.inspect(source, ["train"], 1).bad["train"]
    assert f"{path}{where}" in str(bad)

"""Where a run continues: in its data, and past the batches that are done."""

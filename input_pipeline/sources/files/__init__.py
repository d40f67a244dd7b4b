"""Files of records: how their names, or a fraction, sort them into splits."""

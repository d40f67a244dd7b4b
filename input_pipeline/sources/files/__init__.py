"""Files of records: names, or a fraction, sort them into splits."""

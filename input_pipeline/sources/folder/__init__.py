"""A source of folders of pictures."""

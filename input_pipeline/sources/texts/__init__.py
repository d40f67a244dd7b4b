"""Sources of text: files in rows of tokens, and words with tags."""

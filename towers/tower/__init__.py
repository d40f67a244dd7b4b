"""What a model's step needs beside its graph: preprocessing, variables, sentences."""

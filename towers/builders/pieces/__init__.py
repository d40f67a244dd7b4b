"""The pieces that builders are put together of."""

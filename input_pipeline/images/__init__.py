"""What becomes of an image on its way into a batch."""

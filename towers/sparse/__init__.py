"""Makes layers block-sparse, and changes which blocks they have while they train."""

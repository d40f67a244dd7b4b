"""Which hosts train together: who they are, and how they meet."""

"""The tower: a model's computation on one device."""

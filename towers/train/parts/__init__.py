"""What a job is put together of: data, devices, model and optimizer, from settings."""

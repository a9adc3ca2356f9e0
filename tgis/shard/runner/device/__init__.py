"""Model runner for GPUs: rows and sampling are on the device, and the host runs one step ahead."""

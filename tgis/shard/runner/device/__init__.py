"""The model runner of GPUs: rows and sampling are on the device, and the host runs a step ahead."""

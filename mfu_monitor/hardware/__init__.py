"""Dense peaks of devices: a data table, the lookup by device name, measurement."""

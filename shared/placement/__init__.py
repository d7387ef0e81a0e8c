"""Where experts are: which are on the device, how that changes, and what fits."""

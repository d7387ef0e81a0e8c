"""Which experts are on the device, and which way each route takes: policy alone, values in, decisions out.

Nothing here knows a device, a process or a clock. The gpu_worker and `strata simulate` use the very same
code.
"""

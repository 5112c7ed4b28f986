"""The run on simulated time (SimPy), its statistics, its reports and the ``twin`` command."""

"""The command ``tierstore``: conversion, plans, measurements, reports."""

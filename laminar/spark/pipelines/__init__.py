"""Spark jobs on whole topics: ``laminar pipeline NAME``, or the functions of these modules.

A job's function takes a SparkSession and the cluster's options, and returns plain values; none prints. Each
job has a module of its own: `archive`, `replay`, `audit`, `compare`, `stats`. ``docs/spark.md`` says what
each promises.
"""

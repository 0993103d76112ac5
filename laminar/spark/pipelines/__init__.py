"""Spark jobs on whole topics: ``laminar pipeline NAME``, or the functions of these modules.

Each function takes a SparkSession and the cluster's options, and returns plain values; none prints. A module
holds one job. ``docs/spark.md`` says what each promises.
"""

"""Work on topics that outgrows one machine, as Spark jobs: ``laminar pipeline NAME``, or these functions.

Each takes a SparkSession and where the cluster is, and returns what it found as plain values; none prints.
A module is one job. ``docs/spark.md`` tells what each promises.
"""

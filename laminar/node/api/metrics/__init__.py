"""Metrics of a node: their names, how they are collected, and their text."""

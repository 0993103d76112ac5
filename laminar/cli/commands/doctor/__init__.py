"""`laminar doctor`: checks of this machine and of the cluster, and a file of bundles for those who help."""

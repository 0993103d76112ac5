"""`laminar doctor`: checks of this machine and of the cluster, and a file to send to support."""

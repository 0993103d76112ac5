"""Who asks: tokens, the principals that they prove, and what these may do (docs/security.md)."""

"""Access control: tokens and certificates, the principals that they prove, their grants and limits.

docs/security.md describes it.
"""

"""The JSON documents of requests and answers, as structs that handlers and OpenAPI share.

Each member has its limits and, if needed, a description. A member of a request that has a default may be left
out; a member of an answer is always there, unless its type has `UnsetType`.
"""

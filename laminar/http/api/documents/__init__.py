"""The JSON documents of requests and answers, as structs that handlers and OpenAPI share.

Limits and descriptions stand beside the members. A member of a request that has a default may be left out;
every member of an answer is always there, unless its type has `UnsetType`.
"""

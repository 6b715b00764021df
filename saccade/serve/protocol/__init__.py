"""Bodies of requests and answers, one file per endpoint.

Types are strict, and unknown fields are refused by name, except in earlier messages, to which clients add fields.
"""

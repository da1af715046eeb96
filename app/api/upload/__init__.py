"""Uploads: an HTTP request with a file in its body -> the bytes of that file.

kinds    what routes expect, and whether a request's head is one of such a body
sinks    where the body goes: one buffer, or the parts of a multipart form
receive  reads the body within its limits, and notices clients that leave
turns    of requests that touch one unfinished upload, the latest goes on
"""

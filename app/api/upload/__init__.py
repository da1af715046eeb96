"""Uploads: an HTTP request with a file in its body -> the bytes of that file.

plan     what a request's head allows and says: media type, length, limits
sinks    where the body goes: one buffer, chunks, or the one part of a multipart form
receive  reads the body within its limits, and notices clients that leave
turns    of requests that touch one unfinished upload, the latest goes on
"""

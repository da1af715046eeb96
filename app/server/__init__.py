"""The application as a process: uvicorn for one machine, Ray Serve for several.

process        uvicorn with a drain before it stops, and exit codes
connection     time limits of a connection, and how it closes
http_protocol  limits on heads and trailers; refuses what is malformed
ray_serve      one replica of the application per device; needs the extra ``ray``
log_format     log lines as JSON or text, without anything that may identify a patient
log_writer     writes them from a thread of its own, and drops what cannot be written
"""

from app.server.process import serve

__all__ = ["serve"]

"""The application as a process: uvicorn for one machine, Ray Serve for several.

process        uvicorn with a drain before it stops, a header timeout, and exit codes
http_protocol  receives large bodies directly into the application's buffer
ray_serve      one replica of the application per device; needs the extra ``ray``
log_format     log lines as JSON or text, without anything that may identify a patient
"""

from app.server.process import serve

__all__ = ["serve"]

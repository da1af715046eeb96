"""A context of OpenGL in software, so that napari opens its window without a display."""

import ctypes
import os
from typing import Final

SURFACELESS: Final = 0x31DD
"""``EGL_PLATFORM_SURFACELESS_MESA``."""


def make_context_current() -> None:
    """Have OpenGL drawn by Mesa into memory, in this thread; before napari is imported."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    os.environ.setdefault("PYOPENGL_PLATFORM", "egl")
    from OpenGL import EGL  # noqa: PLC0415 - napari brings it

    major, minor, count = ctypes.c_long(), ctypes.c_long(), ctypes.c_long()
    display = EGL.eglGetPlatformDisplay(SURFACELESS, None, None)
    EGL.eglInitialize(display, major, minor)
    EGL.eglBindAPI(EGL.EGL_OPENGL_API)
    wanted = EGL.EGL_SURFACE_TYPE, EGL.EGL_PBUFFER_BIT, EGL.EGL_RENDERABLE_TYPE, EGL.EGL_OPENGL_BIT
    config = (EGL.EGLConfig * 1)()
    EGL.eglChooseConfig(display, (ctypes.c_int * 5)(*wanted, EGL.EGL_NONE), config, 1, count)
    context = EGL.eglCreateContext(display, config[0], EGL.EGL_NO_CONTEXT, None)
    size = EGL.EGL_WIDTH, 64, EGL.EGL_HEIGHT, 64, EGL.EGL_NONE
    surface = EGL.eglCreatePbufferSurface(display, config[0], (ctypes.c_int * 5)(*size))
    EGL.eglMakeCurrent(display, surface, surface, context)

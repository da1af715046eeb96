"""What a model folder brings -> nn.Module; nothing here knows the manifest.

=============  =====================================================================================
architectures  an allow-listed class and its arguments
onnx           ONNX files, checked, and computed by ONNX Runtime
torchscript    TorchScript files, where they are allowed
=============  =====================================================================================
"""

from app.model.modules.architectures import build_network, find_architecture
from app.model.modules.onnx import EXPORT, OnnxNetwork, read_onnx
from app.model.modules.torchscript import is_saved, read_script

__all__ = [
    "EXPORT",
    "OnnxNetwork",
    "build_network",
    "find_architecture",
    "is_saved",
    "read_onnx",
    "read_script",
]
